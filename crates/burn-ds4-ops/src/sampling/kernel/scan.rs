//! Sums over the units of a cube, in 64 bits.

use cubecl::prelude::*;

use super::wide::Wide;
use crate::intrinsics::{plane_highest, plane_running_sum, sum_of_plane};
use crate::select::CubeUnits;

/// A sum over the preceding units, and over all.
#[derive(CubeType)]
pub(super) struct WideScan {
    pub before: Wide,
    pub total: Wide,
}

/// Shared memory for sums. After a scan it holds, for each unit, the sum up to and including it.
///
/// With planes of one lane, units exchange everything through shared memory.
#[derive(CubeType)]
pub(super) struct WideScanner {
    high: Shared<[u32]>,
    low: Shared<[u32]>,
    plane_high: Shared<[u32]>,
    plane_low: Shared<[u32]>,
    #[cube(comptime)]
    units: CubeUnits,
}

/// Planes that exchange sums.
fn planes_of(units: CubeUnits) -> usize {
    match units.plane {
        1 => 1,
        _ => units.planes() as usize,
    }
}

#[cube]
impl WideScanner {
    pub fn new(#[comptime] units: CubeUnits) -> WideScanner {
        let planes = comptime!(planes_of(units));
        WideScanner {
            high: Shared::new_slice(units.cube as usize),
            low: Shared::new_slice(units.cube as usize),
            plane_high: Shared::new_slice(planes),
            plane_low: Shared::new_slice(planes),
            units,
        }
    }

    pub fn sum_at(&self, unit: u32) -> Wide {
        Wide::new(self.high[unit as usize], self.low[unit as usize])
    }

    fn set(&mut self, high: u32, low: u32) {
        self.high[UNIT_POS as usize] = high;
        self.low[UNIT_POS as usize] = low;
    }

    /// Sums over the units. Every unit of the cube must call this, and the cube must synchronise
    /// between reads of the results of the previous call and this one.
    pub fn scan(&mut self, own: &Wide) -> WideScan {
        if comptime!(self.units.plane == 1) {
            self.scan_units(own)
        } else {
            self.scan_planes(own)
        }
    }

    fn scan_units(&mut self, own: &Wide) -> WideScan {
        let units = comptime!(self.units.cube);
        self.set(own.high, own.low);
        sync_cube();
        for step in 0..comptime!(units.ilog2()) {
            let distance = 1u32 << step;
            let mut sum = self.sum_at(UNIT_POS);
            if UNIT_POS >= distance {
                let other = self.sum_at(UNIT_POS - distance);
                sum.add(&other);
            }
            sync_cube();
            self.set(sum.high, sum.low);
            sync_cube();
        }
        WideScan {
            before: self.sum_at(UNIT_POS).minus(own),
            total: self.sum_at(comptime!(units - 1)),
        }
    }

    fn scan_planes(&mut self, own: &Wide) -> WideScan {
        let units = comptime!(self.units);
        let lane = UNIT_POS % units.plane;
        let plane = UNIT_POS / units.plane;
        let mut running = Wide::from_limbs(
            plane_running_sum(own.limb(0u32), units.plane, units.target),
            plane_running_sum(own.limb(1u32), units.plane, units.target),
            plane_running_sum(own.limb(2u32), units.plane, units.target),
        );
        if lane == comptime!(units.plane - 1) {
            self.plane_high[plane as usize] = running.high;
            self.plane_low[plane as usize] = running.low;
        }
        sync_cube();
        let mut before = Wide::new(0u32, 0u32);
        let mut total = Wide::new(0u32, 0u32);
        let planes = comptime!(units.planes());
        #[unroll]
        for i in 0..comptime!(planes.div_ceil(units.plane)) {
            let other = i * units.plane + lane;
            if comptime!(planes % units.plane == 0) || other < planes {
                let sum = Wide::new(
                    self.plane_high[other as usize],
                    self.plane_low[other as usize],
                );
                total.add(&sum);
                if other < plane {
                    before.add(&sum);
                }
            }
        }
        let before = plane_sum_of(&before, units);
        let total = plane_sum_of(&total, units);
        running.add(&before);
        self.set(running.high, running.low);
        sync_cube();
        WideScan {
            before: running.minus(own),
            total,
        }
    }

    /// The highest of all keys in the high half and the lowest id that has it in the low half.
    /// Every unit of the cube must call this.
    pub fn first_highest(&mut self, key: u32, id: u32) -> Wide {
        if comptime!(self.units.plane == 1) {
            self.first_highest_of_units(key, id)
        } else {
            self.first_highest_of_planes(key, id)
        }
    }

    fn first_highest_of_units(&mut self, key: u32, id: u32) -> Wide {
        let units = comptime!(self.units.cube);
        self.set(key, id);
        sync_cube();
        for step in 0..comptime!(units.ilog2()) {
            let distance = units >> (step + 1);
            if UNIT_POS < distance {
                let own = self.sum_at(UNIT_POS);
                let other = self.sum_at(UNIT_POS + distance);
                if other.high > own.high || (other.high == own.high && other.low < own.low) {
                    self.set(other.high, other.low);
                }
            }
            sync_cube();
        }
        let first = self.sum_at(0u32);
        sync_cube();
        first
    }

    fn first_highest_of_planes(&mut self, key: u32, id: u32) -> Wide {
        let units = comptime!(self.units);
        let lane = UNIT_POS % units.plane;
        let plane = UNIT_POS / units.plane;
        let first = plane_first_highest(key, id, units);
        if lane == 0 {
            self.plane_high[plane as usize] = first.high;
            self.plane_low[plane as usize] = first.low;
        }
        sync_cube();
        let mut key = 0u32;
        let mut id = u32::MAX.runtime();
        let planes = comptime!(units.planes());
        #[unroll]
        for i in 0..comptime!(planes.div_ceil(units.plane)) {
            let other = i * units.plane + lane;
            if comptime!(planes % units.plane == 0) || other < planes {
                let (high, low) = (
                    self.plane_high[other as usize],
                    self.plane_low[other as usize],
                );
                if high > key || (high == key && low < id) {
                    key = high;
                    id = low;
                }
            }
        }
        let first = plane_first_highest(key, id, units);
        sync_cube();
        first
    }
}

/// The sum over the plane, in all lanes.
#[cube]
fn plane_sum_of(own: &Wide, #[comptime] units: CubeUnits) -> Wide {
    Wide::from_limbs(
        sum_of_plane(own.limb(0u32), units.plane, units.target),
        sum_of_plane(own.limb(1u32), units.plane, units.target),
        sum_of_plane(own.limb(2u32), units.plane, units.target),
    )
}

/// The highest key of the plane, and its lowest id.
#[cube]
fn plane_first_highest(key: u32, id: u32, #[comptime] units: CubeUnits) -> Wide {
    let highest = plane_highest(key, units.plane, units.target);
    let reversed = select(key == highest, !id, 0u32);
    let reversed = plane_highest(reversed, units.plane, units.target);
    Wide::new(highest, !reversed)
}
