//! Sums over the units of a cube.

use cubecl::prelude::*;

use super::units::CubeUnits;
use crate::intrinsics::{plane_running_sum, plane_value, sum_of_plane};

/// A sum over the preceding units, and over all.
#[derive(CubeType)]
pub(crate) struct Scan {
    pub before: u32,
    pub total: u32,
}

/// Prefix sums over the units of a cube, and their shared memory.
#[derive(CubeType)]
pub(crate) struct Scanner {
    planes: Shared<[u32]>,
    #[cube(comptime)]
    units: CubeUnits,
}

#[cube]
impl Scanner {
    pub fn new(#[comptime] units: CubeUnits) -> Scanner {
        Scanner {
            planes: Shared::new_slice(comptime!(units.planes() as usize)),
            units,
        }
    }

    /// Sums `x` over the units. Every unit of the cube must call this, and the cube must
    /// synchronise between two calls.
    pub fn scan(&mut self, x: u32) -> Scan {
        let units = comptime!(self.units);
        let sum = plane_running_sum(x, units.plane, units.target);
        let last = comptime!(units.plane - 1);
        let all = self.scan_planes(plane_value(sum, last, units.target));
        Scan {
            before: all.before + sum - x,
            total: all.total,
        }
    }

    /// Sums over the planes, where all lanes of a plane have the same value. Same conditions as
    /// [`scan`](Self::scan).
    pub fn scan_planes(&mut self, sum: u32) -> Scan {
        let units = comptime!(self.units);
        let count = comptime!(units.planes());
        let lane = UNIT_POS % units.plane;
        let plane = UNIT_POS / units.plane;
        if lane == 0 {
            self.planes[plane as usize] = sum;
        }
        sync_cube();
        let mut before = 0u32;
        let mut total = 0u32;
        #[unroll]
        for i in 0..comptime!(count.div_ceil(units.plane)) {
            let other = i * units.plane + lane;
            let mut sum = 0u32;
            if comptime!(count % units.plane == 0) || other < count {
                sum = self.planes[other as usize];
            }
            before += select(other < plane, sum, 0u32);
            total += sum;
        }
        Scan {
            before: sum_of_plane(before, units.plane, units.target),
            total: sum_of_plane(total, units.plane, units.target),
        }
    }
}
