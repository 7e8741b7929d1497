use cubecl::prelude::*;

use super::blueprint::StreamBlueprint;
use crate::gemm::kernel::input::{SCALE_COLUMNS, block_factors, larger_magnitudes, scaled_bf16};
use crate::gemm::kernel::weights::K_STEPS;
use crate::intrinsics::plane_value;

/// K-steps of an FP8 block of columns, whose products are scaled together.
pub(super) const BLOCK_STEPS: u32 = 2;
/// Such blocks of a K-block.
const BLOCKS: u32 = K_STEPS / BLOCK_STEPS;

/// The rows of `x` of one K-block as a lane's operands, for FP8 weights that the hardware converts
/// to `f16`. A plane has all it needs, so that planes do not wait for each other.
#[derive(CubeType)]
pub(super) struct XOperands {
    /// For each K-step, those of each tile of `x`: the lane's columns of its row.
    pub vec8s: Array<Vector<u32, Const<4>>>,
    /// For each tile of `x` and each block of columns, the factors that undo the scaling in the
    /// sums of products: a lane has those of two rows of the tile.
    factors: Array<f32>,
    #[cube(comptime)]
    blueprint: StreamBlueprint,
}

#[cube]
impl XOperands {
    /// Of no use where the blueprint has `x` in shared memory.
    pub fn new(#[comptime] blueprint: StreamBlueprint) -> XOperands {
        let factors = comptime!(2 * BLOCKS * blueprint.x_tiles());
        XOperands {
            vec8s: Array::new(comptime!(blueprint.lane_vec8s().max(1) as usize)),
            factors: Array::new(comptime!(factors as usize)),
            blueprint,
        }
    }

    /// Begins to read a K-block of rows of `bf16`. `rows` has where the lane's row of each tile of
    /// `x` begins, `vec8` is its first one in the K-block. Four lanes read a cache line.
    pub fn read<X: Float, N: Size>(&mut self, x: &[Vector<X, N>], rows: &Array<usize>, vec8: u32) {
        let vec8s = comptime!(self.blueprint.input.format.vec8s());
        let x_tiles = comptime!(self.blueprint.x_tiles());
        #[unroll]
        for i in 0..comptime!(self.blueprint.lane_vec8s()) {
            let (k_step, tile) = comptime!((i / vec8s / x_tiles, i / vec8s % x_tiles));
            let ahead = comptime!(4 * vec8s * k_step + i % vec8s);
            let at = rows[tile as usize] + (vec8 + ahead) as usize;
            self.vec8s[i as usize] = Vector::reinterpret(x[at]);
        }
    }

    /// Scales every block of columns of what was read, and turns it into `f16`. Every lane of the
    /// plane must call this.
    pub fn scale(&mut self) {
        comptime!(assert!(
            self.blueprint.input.format.k_step() * BLOCK_STEPS == SCALE_COLUMNS
        ));
        let target = comptime!(self.blueprint.target);
        let vec8s = comptime!(self.blueprint.input.format.vec8s());
        let x_tiles = comptime!(self.blueprint.x_tiles());
        #[unroll]
        for tile in 0..x_tiles {
            #[unroll]
            for block in 0..BLOCKS {
                // The first vec8 of the block; those of the next K-step are all tiles further.
                let own = comptime!((block * BLOCK_STEPS * x_tiles + tile) * vec8s);
                let mut magnitudes = 0u32;
                #[unroll]
                for i in 0..comptime!(BLOCK_STEPS * vec8s) {
                    let at = comptime!(own + i / vec8s * x_tiles * vec8s + i % vec8s);
                    magnitudes = larger_magnitudes(self.vec8s[at as usize], magnitudes);
                }
                // Four neighbouring lanes have the columns of a row.
                let (factor, inverse) = block_factors(magnitudes, 4u32, target);
                #[unroll]
                for i in 0..comptime!(BLOCK_STEPS * vec8s) {
                    let at = comptime!(own + i / vec8s * x_tiles * vec8s + i % vec8s);
                    self.vec8s[at as usize] = scaled_bf16(self.vec8s[at as usize], factor);
                }
                // A lane's sums are of two other rows than its operands.
                #[unroll]
                for i in 0..2u32 {
                    let from = UNIT_POS_X % 4 * 8 + comptime!(4 * i);
                    let of_row = plane_value(u32::reinterpret(inverse), from, target);
                    let to = comptime!((tile * BLOCKS + block) * 2 + i);
                    self.factors[to as usize] = f32::reinterpret(of_row);
                }
            }
        }
    }

    /// The factors of the rows of a tile of `x` that the lane has sums of.
    pub fn factors_of(&self, #[comptime] tile: u32, #[comptime] block: u32) -> (f32, f32) {
        let at = comptime!((2 * (tile * BLOCKS + block)) as usize);
        (self.factors[at], self.factors[comptime!(at + 1)])
    }
}
