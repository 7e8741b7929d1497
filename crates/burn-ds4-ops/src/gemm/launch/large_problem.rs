use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use super::optional;
use super::sort::SortedPairs;
use crate::gemm::Matrices;
use crate::gemm::kernel::{LargeMPairsLaunch, StreamBlueprint, WeightFormat};

/// How many rows of `x` a cube multiplies at a time, and with which instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LargeMTiles {
    /// Those of problems by which the weights of experts are streamed: how gates and up are
    /// compiled, and down.
    Stream([StreamBlueprint; 2]),
    /// Tiles of 8 columns, which are terms of rows, for products of planes.
    Planes(usize),
    /// Rows, for products of warpgroups.
    Warpgroups(usize),
    /// [`FP8_TILE`] rows that are rounded to E4M3, by FP8 weights.
    Fp8,
}

/// A launch of [`large_m_kernel`], or of the kernel for warpgroups.
#[derive(Clone, Copy)]
pub(crate) struct LargeM<'a> {
    pub x: &'a CubeTensor,
    /// Those of `x`, if it is what [`quantize`](super::quantize) makes of it.
    pub x_scales: Option<&'a CubeTensor>,
    pub sorted: Option<&'a SortedPairs>,
    pub scores: Option<&'a CubeTensor>,
    pub matrices: &'a Matrices,
    pub gated: Option<WeightFormat>,
    pub permuted: bool,
    /// Where they are not sorted, those of each matrix.
    pub pairs: usize,
    /// Matrices that each row has a pair with, where they are not sorted.
    pub matrix_count: usize,
    pub pairs_per_row: usize,
    pub tiles: LargeMTiles,
    /// The dtype of the rows of `x`, which gated results are rounded to. A permuted `x` consists of
    /// terms of it.
    pub dtype: DType,
    pub limit: f64,
}

impl<'a> LargeM<'a> {
    /// `x · Wᵀ` for all rows of `x` and the one matrix.
    pub fn of_rows(x: &'a CubeTensor, matrices: &'a Matrices, tiles: LargeMTiles) -> Self {
        Self {
            x,
            x_scales: None,
            sorted: None,
            scores: None,
            matrices,
            gated: None,
            permuted: false,
            pairs: x.meta.shape()[0],
            matrix_count: 1,
            pairs_per_row: 1,
            tiles,
            dtype: x.dtype,
            limit: 0.0,
        }
    }

    /// Columns of the result.
    pub(super) fn outputs(&self) -> usize {
        self.matrices.rows / (1 + usize::from(self.gated.is_some()))
    }

    /// Problems of at most `rows` rows of `x`, at most.
    pub(super) fn problems(&self, rows: usize) -> usize {
        match self.sorted {
            Some(sorted) => sorted.max_problems,
            None => self.pairs.div_ceil(rows) * self.matrix_count,
        }
    }

    /// The pairs as a kernel argument.
    pub(super) fn pairs_arg(&self) -> LargeMPairsLaunch {
        LargeMPairsLaunch::new(
            optional(self.sorted.map(|sorted| &sorted.order)),
            optional(self.sorted.map(|sorted| &sorted.problems)),
            optional(self.scores),
            self.pairs as u32,
            self.matrix_count as u32,
            self.pairs_per_row as u32,
            self.limit as f32,
        )
    }
}
