use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{SortedPairs, optional};
use crate::gemm::Matrices;
use crate::gemm::kernel::{PairSizesLaunch, Pairing, StreamBlueprint, StreamProblemLaunch};

/// Time for 16 bytes of FP8 that become `f16`, relative to that of other weights: cubes that
/// multiply by them are done that much earlier.
pub(super) const F16_INPUT_WORK: f64 = 0.65;

/// Rows of `x`, the matrices of a stack that they are multiplied by, and where the products go.
pub(crate) struct StreamProblem<'a> {
    /// The matrix of every pair, for [`Pairing::Ids`].
    pub ids: Option<&'a CubeTensor>,
    /// For [`Pairing::Sorted`].
    pub sorted: Option<&'a SortedPairs>,
    /// Factors of gated pairs.
    pub scores: Option<&'a CubeTensor>,
    pub matrices: &'a Matrices,
    pub output: &'a CubeTensor,
    pub tokens: usize,
    /// Pairs of a token; one without ids and groups.
    pub slots: usize,
    /// The limit of gates.
    pub limit: f64,
    pub blueprint: StreamBlueprint,
}

impl<'a> StreamProblem<'a> {
    /// Without ids and gates: rows of `x` by one matrix, or `tokens` rows by each.
    pub fn of_rows(
        matrices: &'a Matrices,
        output: &'a CubeTensor,
        tokens: usize,
        blueprint: StreamBlueprint,
    ) -> Self {
        Self {
            ids: None,
            sorted: None,
            scores: None,
            matrices,
            output,
            tokens,
            slots: matrices.count,
            limit: 0.0,
            blueprint,
        }
    }

    /// Tiles of a matrix.
    pub(super) fn matrix_tiles(&self) -> usize {
        let rows = match self.blueprint.gated {
            Some(_) => self.matrices.rows / 2,
            None => self.matrices.rows,
        };
        rows.div_ceil(self.blueprint.tile_outputs() as usize)
    }

    /// Matrices that can be in use: with ids, as many are if all are different.
    pub(super) fn groups(&self) -> usize {
        let count = self.matrices.count;
        match self.blueprint.pairing {
            Pairing::Ids => (self.tokens * self.slots).min(count),
            Pairing::Sorted => self.sorted.map_or(0, |sorted| sorted.max_problems),
            Pairing::One => 1,
            Pairing::Every => count,
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
            && self.sorted.is_none()
            && own > 0
            && of_plane(tiles.div_ceil(own)) <= of_plane((tiles * groups).div_ceil(cubes));
        pays.then_some(own)
    }

    /// The work of reading a matrix: its bytes, where those that the hardware decodes count less;
    /// without ids, as often as all rows of `x` take.
    pub(super) fn work(&self) -> f64 {
        let vectors = self.matrices.rows * self.matrices.columns
            / self.blueprint.input.format.columns() as usize;
        let reads = match self.blueprint.pairing {
            Pairing::Ids | Pairing::Sorted => 1,
            _ => self.tokens.div_ceil(self.blueprint.pass_pairs() as usize),
        };
        let work = match self.blueprint.input.f16_input {
            true => F16_INPUT_WORK,
            false => 1.0,
        };
        (vectors * reads) as f64 * work
    }

    pub(super) fn arg<I: Int, Y: Float>(&self) -> StreamProblemLaunch<I, Y> {
        StreamProblemLaunch::new(
            optional(self.ids),
            optional(self.scores),
            self.matrices.arg(),
            self.output.clone().into_buffer_arg(),
            PairSizesLaunch::new(self.tokens as u32, self.slots as u32),
            self.slots as u32,
            self.matrix_tiles() as u32,
            self.limit as f32,
        )
    }
}
