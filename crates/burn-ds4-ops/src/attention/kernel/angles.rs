//! The angles of a query, as the lanes of a plane have them.

use cubecl::prelude::*;

use super::cached::CachedBlueprint;
use super::rotate::{AngleTable, read_angles_in_order, rotate_by};

/// The angles of a lane's vectors of a row, of which it has one in each step.
#[derive(CubeType)]
pub(super) struct LaneAngles<N: Size> {
    /// Those of the steps that have rotated vectors.
    cosines: Array<Vector<f32, N>>,
    sines: Array<Vector<f32, N>>,
    #[cube(comptime)]
    blueprint: CachedBlueprint,
}

impl CachedBlueprint {
    /// The first step in which a lane may have a rotated vector.
    fn first_rotated(&self) -> u32 {
        self.sink.steps.min(self.unrotated / self.sink.plane)
    }
}

#[cube]
impl<N: Size> LaneAngles<N> {
    /// Requests the angles from `angle` on of a row of `vectors` vectors.
    pub fn read(
        table: &AngleTable,
        angle: usize,
        vectors: u32,
        #[comptime] blueprint: CachedBlueprint,
    ) -> LaneAngles<N> {
        let first = comptime!(blueprint.first_rotated());
        let steps = comptime!(blueprint.sink.steps);
        let count = comptime!((steps - first) as usize);
        let mut angles = LaneAngles::<N> {
            cosines: Array::new(count),
            sines: Array::new(count),
            blueprint,
        };
        #[unroll]
        for step in first..steps {
            // A lane whose vector is not rotated reads what it does not need.
            let vector = UNIT_POS_X + step * blueprint.sink.plane;
            let vector = min(max(vector, blueprint.unrotated), vectors - 1);
            let pairs = (vector - blueprint.unrotated) * N::value() as u32 / 2;
            let target = comptime!(blueprint.sink.target);
            let read = read_angles_in_order::<N>(table, angle + pairs as usize, target);
            let at = comptime!((step - first) as usize);
            angles.cosines[at] = read.0;
            angles.sines[at] = read.1;
        }
        angles
    }

    /// Rotates the vector that the lane has in a step, if it is one of those.
    pub fn rotate(
        &self,
        value: Vector<f32, N>,
        vectors: u32,
        #[comptime] step: u32,
    ) -> Vector<f32, N> {
        let blueprint = comptime!(self.blueprint);
        let mut rotated = value;
        if comptime!(step >= blueprint.first_rotated()) {
            let vector = UNIT_POS_X + step * blueprint.sink.plane;
            if vector >= blueprint.unrotated && vector < vectors {
                let at = comptime!((step - blueprint.first_rotated()) as usize);
                rotated = rotate_by::<N>(value, self.cosines[at], self.sines[at], false);
            }
        }
        rotated
    }
}
