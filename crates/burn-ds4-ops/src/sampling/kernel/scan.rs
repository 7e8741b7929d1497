//! Sums over the units of a cube.

use cubecl::prelude::*;

use super::wide::Wide;

/// A sum over the units before this one, and over all.
#[derive(CubeType)]
pub(super) struct Scan {
    pub before: Wide,
    pub total: Wide,
}

/// Sums in shared memory: after a scan, each unit's own and all before it.
#[derive(CubeType)]
pub(super) struct Scanner {
    high: Shared<[u32]>,
    low: Shared<[u32]>,
    #[cube(comptime)]
    units: u32,
}

#[cube]
impl Scanner {
    pub fn new(#[comptime] units: u32) -> Scanner {
        Scanner {
            high: Shared::new_slice(units as usize),
            low: Shared::new_slice(units as usize),
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

    /// All of the cube must be here, and be done with what the last one left.
    pub fn scan(&mut self, own: &Wide) -> Scan {
        let units = comptime!(self.units);
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
        Scan {
            before: self.sum_at(UNIT_POS).minus(own),
            total: self.sum_at(comptime!(units - 1)),
        }
    }

    /// The highest of all keys, and the lowest id that has it: as the high and the low half. All of the cube must be here.
    pub fn first_highest(&mut self, key: u32, id: u32) -> Wide {
        let units = comptime!(self.units);
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
}
