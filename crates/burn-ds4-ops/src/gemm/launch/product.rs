use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use super::sort::SortedPairs;
use super::{Schedule, optional, wgmma};
use crate::gemm::Matrices;
use crate::gemm::kernel::{LargeMPairsLaunch, WeightFormat};

/// How pairs find their matrices.
#[derive(Clone, Copy)]
pub(crate) enum Grouping<'a> {
    /// By ids, `[tokens, slots]`. Every cube groups the pairs for itself.
    Ids(&'a CubeTensor),
    /// By ids that have been [sorted](super::sort).
    Sorted(&'a SortedPairs),
    /// Every row of `x` has a pair with each matrix of the stack, in their order.
    Every,
}

/// Rows of `x`, the matrices that they are multiplied by, and what happens to the sums.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub x: &'a CubeTensor,
    /// Those of `x`, if it is what [`quantize`](super::quantize) makes of it.
    pub x_scales: Option<&'a CubeTensor>,
    pub matrices: &'a Matrices,
    pub grouping: Grouping<'a>,
    /// Without ids, those of each matrix.
    pub pairs: usize,
    /// Pairs that have one row of `x` by their ids.
    pub per_row: usize,
    /// Factors of gated pairs.
    pub scores: Option<&'a CubeTensor>,
    /// What is added to the sums of a token's pairs.
    pub addend: Option<&'a CubeTensor>,
    /// Half of the rows are a gate; the result is for weights of this format.
    pub gated: Option<WeightFormat>,
    /// Whether `x` is in the order of its weights, as gated results are: a row for each pair and
    /// term. No matter for the portable kernel.
    pub permuted: bool,
    /// The dtype of the rows of `x`, which gated results are rounded to. A permuted `x` consists of
    /// terms of it.
    pub dtype: DType,
    /// The limit of gates.
    pub limit: f64,
}

impl<'a> Product<'a> {
    /// `x · Wᵀ` for all rows of `x`: row `r` and matrix `m` of `count` have row `r * count + m` of
    /// `x` and of the result.
    pub fn of_rows(x: &'a CubeTensor, matrices: &'a Matrices) -> Self {
        Self {
            x,
            x_scales: None,
            matrices,
            grouping: Grouping::Every,
            pairs: x.meta.shape()[0] / matrices.count,
            per_row: 1,
            scores: None,
            addend: None,
            gated: None,
            permuted: false,
            dtype: x.dtype,
            limit: 0.0,
        }
    }

    pub fn launch(&self, schedule: Schedule, result: &CubeTensor) {
        match schedule {
            Schedule::Portable => self.launch_portable(result),
            Schedule::Stream(blueprint) => self.launch_streamed(blueprint, result),
            Schedule::Planes(x_tiles) => self.launch_planes(x_tiles, result),
            Schedule::Warpgroups(columns) => wgmma::launch(self, columns, result),
            Schedule::Fp8 => wgmma::launch_fp8(self, result),
        }
    }

    pub(super) fn sorted(&self) -> Option<&'a SortedPairs> {
        match self.grouping {
            Grouping::Sorted(sorted) => Some(sorted),
            _ => None,
        }
    }

    /// Matrices that every row of `x` has a pair with.
    pub(super) fn matrix_count(&self) -> usize {
        match self.grouping {
            Grouping::Every => self.matrices.count,
            _ => 1,
        }
    }

    /// Columns of the result.
    pub(super) fn outputs(&self) -> usize {
        self.matrices.rows / (1 + usize::from(self.gated.is_some()))
    }

    /// Problems of at most `rows` rows of `x`, at most.
    pub(super) fn problems(&self, rows: usize) -> usize {
        match self.sorted() {
            Some(sorted) => sorted.max_problems,
            None => self.pairs.div_ceil(rows) * self.matrix_count(),
        }
    }

    /// The pairs as an argument of the kernels for many of them.
    pub(super) fn pairs_arg(&self) -> LargeMPairsLaunch {
        let sorted = self.sorted();
        LargeMPairsLaunch::new(
            optional(sorted.map(|sorted| &sorted.order)),
            optional(sorted.map(|sorted| &sorted.problems)),
            optional(self.scores),
            self.pairs as u32,
            self.matrix_count() as u32,
            self.per_row as u32,
            self.limit as f32,
        )
    }
}
