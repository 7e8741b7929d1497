//! The angles of a row, as the units that share it have them.

use cubecl::prelude::*;

use super::rotate::{AngleTable, read_angles_in_order, rotate_by};
use crate::caps::Target;

/// How a row is shared: in each step, neighbouring units have neighbouring vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RowSteps {
    pub steps: u32,
    /// Units that share the row.
    pub units: u32,
    /// Vectors in front that are not rotated.
    pub unrotated: u32,
    pub target: Target,
}

impl RowSteps {
    /// The first step in which a unit may have a rotated vector.
    fn first_rotated(&self) -> u32 {
        self.steps.min(self.unrotated / self.units)
    }

    /// Whether a unit may have a rotated vector in a step.
    pub(super) fn may_rotate(&self, step: u32) -> bool {
        step >= self.first_rotated()
    }
}

/// The angles of a unit's vectors of a row.
#[derive(CubeType)]
pub(super) struct UnitAngles<N: Size> {
    /// Those of the steps that have rotated vectors.
    cosines: Array<Vector<f32, N>>,
    sines: Array<Vector<f32, N>>,
    #[cube(comptime)]
    row: RowSteps,
}

#[cube]
impl<N: Size> UnitAngles<N> {
    pub fn new(#[comptime] row: RowSteps) -> UnitAngles<N> {
        let count = comptime!((row.steps - row.first_rotated()).max(1) as usize);
        UnitAngles::<N> {
            cosines: Array::new(count),
            sines: Array::new(count),
            row,
        }
    }

    /// Requests the angles from `angle` on of a row of `vectors` vectors, for unit `unit` of those
    /// that share it.
    pub fn request(&mut self, table: &AngleTable, angle: usize, unit: u32, vectors: u32) {
        let row = comptime!(self.row);
        let size = N::value();
        #[unroll]
        for step in comptime!(row.first_rotated())..row.steps {
            // A unit whose vector is not rotated reads what it does not need.
            let vector = unit + comptime!(step * row.units);
            let vector = min(max(vector, row.unrotated), vectors - 1);
            let pairs = (vector - row.unrotated) * comptime!(size as u32 / 2);
            let read = read_angles_in_order::<N>(table, angle + pairs as usize, row.target);
            let at = comptime!((step - row.first_rotated()) as usize);
            self.cosines[at] = read.0;
            self.sines[at] = read.1;
        }
    }

    /// Rotates vector `vector`, which the unit has in a step, if it is one of those; or rotates it
    /// back.
    // A condition on comptime values gets an `if` of its own.
    #[allow(clippy::collapsible_if)]
    pub fn rotate(
        &self,
        value: Vector<f32, N>,
        vector: u32,
        vectors: u32,
        #[comptime] step: u32,
        #[comptime] inverse: bool,
    ) -> Vector<f32, N> {
        let row = comptime!(self.row);
        let mut rotated = value;
        if comptime!(row.may_rotate(step)) {
            if vector >= row.unrotated && vector < vectors {
                let at = comptime!((step - row.first_rotated()) as usize);
                rotated = rotate_by::<N>(value, self.cosines[at], self.sines[at], inverse);
            }
        }
        rotated
    }
}
