//! Sums over the units of a cube, in 64 bits.

use cubecl::prelude::*;

use super::wide::Wide;

/// A sum over the preceding units, and over all.
#[derive(CubeType)]
pub(super) struct WideScan {
    pub before: Wide,
    pub total: Wide,
}

/// Shared memory for sums. After a scan it holds, for each unit, the sum up to and including it.
#[derive(CubeType)]
pub(super) struct WideScanner {
    high: Shared<[u32]>,
    low: Shared<[u32]>,
    #[cube(comptime)]
    units: u32,
}

#[cube]
impl WideScanner {
    pub fn new(#[comptime] units: u32) -> WideScanner {
        WideScanner {
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

    /// Sums over the units. Every unit of the cube must call this, after it has read the results of
    /// the previous call.
    pub fn scan(&mut self, own: &Wide) -> WideScan {
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
        WideScan {
            before: self.sum_at(UNIT_POS).minus(own),
            total: self.sum_at(comptime!(units - 1)),
        }
    }

    /// The highest of all keys in the high half and the lowest id that has it in the low half.
    /// Every unit of the cube must call this.
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
