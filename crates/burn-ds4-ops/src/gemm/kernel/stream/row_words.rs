//! Products of a K-step, and what is done to their sums.

use cubecl::prelude::*;

use super::blueprint::StreamBlueprint;
use crate::caps::Target;
use crate::gemm::kernel::input::InputLayout;
use crate::gemm::kernel::weights::weight_x2;
use crate::intrinsics::{multiply_tiles, shuffle_xor};

/// Accumulators of a lane for each tile of `x`.
pub(super) const ACCUMULATORS: u32 = 3;

/// A lane's 16 bytes of two rows of weights, and their scales.
#[derive(CubeType)]
pub(super) struct RowWords {
    pub low: Vector<u32, Const<4>>,
    pub high: Vector<u32, Const<4>>,
    pub low_scale: u32,
    pub high_scale: u32,
}

#[cube]
impl RowWords {
    /// Adds the products of a K-step to two alternating accumulators for each tile of `x`, whose
    /// vec8s are in `columns` from `first` on. `rare` is the slow path: FP4 scales above two, FP8
    /// codes that are NaN.
    pub fn multiply(
        &self,
        columns: &Array<Vector<u32, Const<4>>>,
        #[comptime] first: u32,
        sums: &mut Array<Vector<f32, Const<4>>>,
        #[comptime] blueprint: StreamBlueprint,
        #[comptime] rare: bool,
    ) {
        let InputLayout {
            format, f16_input, ..
        } = comptime!(blueprint.input);
        let dtype = comptime!(if f16_input { "f16" } else { "bf16" });
        #[unroll]
        for u in 0..comptime!(format.vec8s() as usize) {
            #[unroll]
            for m in 0..2usize {
                let (i, j) = comptime!((2 * m, 2 * m + 1));
                let low_i = weight_x2(self.low, self.low_scale, u, i, format, f16_input, rare);
                let high_i = weight_x2(self.high, self.high_scale, u, i, format, f16_input, rare);
                let low_j = weight_x2(self.low, self.low_scale, u, j, format, f16_input, rare);
                let high_j = weight_x2(self.high, self.high_scale, u, j, format, f16_input, rare);
                #[unroll]
                for tile in 0..comptime!(blueprint.x_tiles() as usize) {
                    let x = columns[comptime!(first as usize + tile * format.vec8s() as usize + u)];
                    let sum = comptime!(ACCUMULATORS as usize * tile + m);
                    sums[sum] = multiply_tiles(
                        low_i,
                        high_i,
                        low_j,
                        high_j,
                        x.extract(i),
                        x.extract(j),
                        sums[sum],
                        dtype,
                    );
                }
            }
        }
    }
}

/// Moves sums from the columns of a K-step to those of another, whose number differs by `mask`.
#[cube]
pub(super) fn between_columns(
    sums: Vector<f32, Const<4>>,
    #[comptime] mask: u32,
    #[comptime] target: Target,
) -> Vector<f32, Const<4>> {
    let mut moved = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for i in 0..4usize {
        let sum = shuffle_xor(sums.extract(i), mask, target);
        moved.insert(i, sum);
    }
    moved
}
