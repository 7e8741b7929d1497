//! Compares the few keys that a search has left with each other, instead of in further passes.

use cubecl::prelude::*;

use crate::intrinsics::ballot;
use crate::select::CubeUnits;
use crate::select::key::NONE;

/// Keys that each lane compares at most.
const LANE_KEYS: u32 = 4;

/// Keys that are ranked at most.
pub(super) fn most_ranked(units: CubeUnits) -> u32 {
    LANE_KEYS * units.plane
}

/// The last of the k largest elements: its key, and its place among equal keys.
#[derive(CubeType, Clone, Copy)]
pub(super) struct LastTaken {
    pub key: u32,
    pub place: u32,
}

#[cube]
impl LastTaken {
    /// Whether an element is among the k largest.
    pub fn takes(&self, key: u32, place: u32) -> bool {
        key > self.key || (key == self.key && place <= self.place)
    }
}

/// Keys in shared memory, in no particular order, each with the place of its element: the lower of
/// two equal keys' places comes first.
#[derive(CubeType)]
pub(super) struct RankedKeys {
    keys: Shared<[u32]>,
    places: Shared<[u32]>,
    count: Shared<[Atomic<u32>]>,
    found: Shared<[u32]>,
    #[cube(comptime)]
    units: CubeUnits,
}

#[cube]
impl RankedKeys {
    /// Creates an empty list. The cube must synchronise before the first key is added.
    pub fn new(#[comptime] units: CubeUnits) -> RankedKeys {
        let most = comptime!(most_ranked(units) as usize);
        let ranked = RankedKeys {
            keys: Shared::new_slice(most),
            places: Shared::new_slice(most),
            count: Shared::new_slice(1usize),
            found: Shared::new_slice(2usize),
            units,
        };
        if UNIT_POS == 0 {
            ranked.count[0usize].store(0u32);
        }
        ranked
    }

    /// Adds one of [`most_ranked`] keys.
    pub fn add(&mut self, key: u32, place: u32) {
        let slot = self.count[0usize].fetch_add(1u32);
        if slot < comptime!(most_ranked(self.units)) {
            self.keys[slot as usize] = key;
            self.places[slot as usize] = place;
        }
    }

    /// The element that is number `needed` in the order of keys, largest first, and then of places.
    /// Every unit of the cube must call this.
    pub fn last_taken(&mut self, needed: u32) -> LastTaken {
        let units = comptime!(self.units);
        let lane = UNIT_POS % units.plane;
        sync_cube();
        let count = min(
            self.count[0usize].load(),
            comptime!(most_ranked(units)).runtime(),
        );
        let mut own_keys = Array::<u32>::new(comptime!(LANE_KEYS as usize));
        let mut own_places = Array::<u32>::new(comptime!(LANE_KEYS as usize));
        #[unroll]
        for i in 0..LANE_KEYS {
            let slot = i * units.plane + lane;
            // No key is larger than another because of these.
            own_keys[i as usize] = select(slot < count, self.keys[slot as usize], NONE);
            own_places[i as usize] = self.places[slot as usize];
        }
        // Each plane ranks keys of its own.
        let mut slot = UNIT_POS / units.plane;
        while slot < count {
            let key = self.keys[slot as usize];
            let place = self.places[slot as usize];
            let mut before = 0u32;
            #[unroll]
            for i in 0..LANE_KEYS {
                let (own, own_place) = (own_keys[i as usize], own_places[i as usize]);
                let precedes = own > key || (own == key && own_place < place);
                before += ballot(precedes, units.target).count_ones();
            }
            if before == needed - 1 && lane == 0 {
                self.found[0usize] = key;
                self.found[1usize] = place;
            }
            slot += comptime!(units.planes());
        }
        sync_cube();
        LastTaken {
            key: self.found[0usize],
            place: self.found[1usize],
        }
    }
}
