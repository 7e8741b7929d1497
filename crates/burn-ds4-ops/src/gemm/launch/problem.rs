use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{Grouping, Product, optional};
use crate::gemm::kernel::{PairSizesLaunch, StreamBlueprint, StreamProblemLaunch};

/// Time for 16 bytes of FP8 that become `f16`, relative to that of other weights: cubes that
/// multiply by them are done that much earlier.
pub(super) const F16_INPUT_WORK: f64 = 0.65;

/// A product of few rows to a matrix, and where it goes.
pub(crate) struct StreamProblem<'a> {
    pub product: Product<'a>,
    pub output: &'a CubeTensor,
    pub blueprint: StreamBlueprint,
}

impl StreamProblem<'_> {
    /// Tokens, or what stands for them, and pairs of each.
    fn sizes(&self) -> [usize; 2] {
        let Product { pairs, per_row, .. } = self.product;
        match self.product.grouping {
            Grouping::Ids(_) => [pairs / per_row, per_row],
            Grouping::Sorted(_) => [pairs, per_row],
            Grouping::Every => [pairs, self.product.matrices.count],
        }
    }

    /// Tiles of a matrix.
    pub(super) fn matrix_tiles(&self) -> usize {
        let outputs = self.product.outputs();
        outputs.div_ceil(self.blueprint.tile_outputs() as usize)
    }

    /// Matrices that can be in use: with ids, as many are if all are different.
    pub(super) fn groups(&self) -> usize {
        let Product {
            matrices, pairs, ..
        } = self.product;
        match self.product.grouping {
            Grouping::Ids(_) => pairs.min(matrices.count),
            Grouping::Sorted(sorted) => sorted.max_problems,
            Grouping::Every => matrices.count,
        }
    }

    /// Tiles of all matrices that can be in use.
    pub(super) fn tiles(&self) -> usize {
        self.matrix_tiles() * self.groups()
    }

    /// Cubes of each of the [`groups`](Self::groups), of `cubes` for all of them. `None` where
    /// planes of some would have more tiles than if all tiles were divided equally.
    pub(super) fn group_cubes(&self, cubes: usize) -> Option<usize> {
        let (groups, tiles) = (self.groups(), self.matrix_tiles());
        let of_plane = |tiles: usize| tiles.div_ceil(self.blueprint.concurrent_tiles as usize);
        let own = cubes / groups.max(1);
        let pays = groups > 1
            && self.product.sorted().is_none()
            && own > 0
            && of_plane(tiles.div_ceil(own)) <= of_plane((tiles * groups).div_ceil(cubes));
        pays.then_some(own)
    }

    /// The work of reading a matrix: its bytes, where those that the hardware decodes count less;
    /// without ids, as often as all rows of `x` take.
    pub(super) fn work(&self) -> f64 {
        let Product {
            matrices, pairs, ..
        } = self.product;
        let vectors = matrices.rows * matrices.columns / matrices.format.columns() as usize;
        let reads = match self.product.grouping {
            Grouping::Every => pairs.div_ceil(self.blueprint.pass_pairs() as usize),
            _ => 1,
        };
        let work = match self.blueprint.input.f16_input {
            true => F16_INPUT_WORK,
            false => 1.0,
        };
        (vectors * reads) as f64 * work
    }

    pub(super) fn arg<I: Int, Y: Float>(&self) -> StreamProblemLaunch<I, Y> {
        let ids = match self.product.grouping {
            Grouping::Ids(ids) => Some(ids),
            _ => None,
        };
        let [tokens, slots] = self.sizes().map(|size| size as u32);
        StreamProblemLaunch::new(
            optional(ids),
            optional(self.product.scores),
            self.product.matrices.arg(),
            self.output.clone().into_buffer_arg(),
            PairSizesLaunch::new(tokens, slots),
            slots,
            self.matrix_tiles() as u32,
            self.product.limit as f32,
        )
    }
}
