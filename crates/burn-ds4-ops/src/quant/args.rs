//! Arguments and results of operators that backend, launch and reference share.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, TensorMetadata};
use burn::tensor::Shape;

use crate::dims::Dims;
use crate::gemm::{FP8_BLOCK, FP8_BLOCKS, Fp4Layout};
use crate::matmul::TensorList;
use crate::reference::ranges;

/// Columns that share one FP4 weight scale.
pub const FP4_BLOCK: usize = 32;

/// The rows and columns that share a scale of FP8 matrices of this size and so many parts, by the
/// shape of their scales, `[count, block rows, block columns]`: of [`FP8_BLOCKS`], one of which has
/// it where all have, in which case there is one block. `None` where none has.
pub fn fp8_block(scales: [usize; 3], [rows, columns]: [usize; 2], parts: usize) -> Option<usize> {
    let of = |block| {
        [
            parts * (rows / parts).div_ceil(block),
            columns.div_ceil(block),
        ]
    };
    FP8_BLOCKS
        .into_iter()
        .find(|block| scales[1..] == of(*block))
}

/// What products by weights do to their other operand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activations {
    /// They take it as it is.
    #[default]
    Exact,
    /// They round it to FP8, as the released models do before each product by FP8 or FP4 weights:
    /// [`fp8_roundtrip`](super::fp8_roundtrip) in blocks of [`FP8_BLOCK`](super::FP8_BLOCK)
    /// columns. Experts also round what their second matrix takes.
    ///
    /// Linear maps of many rows of `bf16` by FP8 weights are made by FP8 tensor cores where a
    /// kernel uses them (Hopper): their sums keep about 13 digits of 128 columns before they are
    /// `f32`, and an infinite number counts as NaN.
    ///
    /// Source: DeepSeek-V4 `inference/kernel.py`, `act_quant`, called by `Linear`.
    Released,
    /// As [`Released`](Self::Released), in blocks of 32 columns: so does DeepSeek-V4.1. FP8 tensor
    /// cores have no part in it.
    Released32,
}

impl Activations {
    /// Columns that are rounded with one scale, `None` where nothing is.
    pub const fn block(self) -> Option<usize> {
        match self {
            Self::Exact => None,
            Self::Released => Some(FP8_BLOCK),
            Self::Released32 => Some(32),
        }
    }
}

/// [`Weights`](super::Weights) as backends see them: a stack of matrices `[count, out, in]`.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum PackedWeights<B: Backend> {
    /// Floats.
    Dense {
        /// `[count, out, in]`.
        values: FloatTensor<B>,
    },
    /// See [`Weights::fp8`](super::Weights::fp8).
    Fp8 {
        /// `[count, out, ceil(columns / 4)]`.
        words: IntTensor<B>,
        /// `[count, parts * ceil(out / parts / block), ceil(columns / block)]`.
        scales: FloatTensor<B>,
        /// Columns of a matrix.
        columns: usize,
        /// Groups of rows whose blocks start anew.
        parts: usize,
    },
    /// See [`Weights::fp4`](super::Weights::fp4).
    Fp4 {
        /// `[count, out, ceil(columns / 8)]`.
        words: IntTensor<B>,
        /// `[count, ceil(out * ceil(columns / 32) / 4)]`.
        scales: IntTensor<B>,
        /// Columns of a matrix.
        columns: usize,
        /// How codes are arranged in words.
        layout: Fp4Layout,
    },
}

impl<B: Backend> PackedWeights<B> {
    /// `[count, out, in]`.
    pub(crate) fn dims(&self) -> [usize; 3] {
        match self {
            Self::Dense { values } => values.dims(),
            Self::Fp8 { words, columns, .. } | Self::Fp4 { words, columns, .. } => {
                let [count, rows, _] = words.dims();
                [count, rows, *columns]
            }
        }
    }

    /// The matrices at `ids`, one after the other.
    pub(crate) fn select(&self, ids: IntTensor<B>) -> Self {
        self.map(
            |tensor| B::float_select(tensor.clone(), 0, ids.clone()),
            |tensor| B::int_select(tensor.clone(), 0, ids.clone()),
        )
    }

    /// A stack of the one matrix at `index`.
    pub(crate) fn one(&self, index: usize) -> Self {
        let range = |shape: Shape| ranges(&shape, 0, index..index + 1);
        self.map(
            |tensor| B::float_slice(tensor.clone(), &range(tensor.shape())),
            |tensor| B::int_slice(tensor.clone(), &range(tensor.shape())),
        )
    }

    fn map(
        &self,
        floats: impl Fn(&FloatTensor<B>) -> FloatTensor<B>,
        ints: impl Fn(&IntTensor<B>) -> IntTensor<B>,
    ) -> Self {
        let mut mapped = self.clone();
        match &mut mapped {
            Self::Dense { values } => *values = floats(values),
            Self::Fp8 { words, scales, .. } => (*words, *scales) = (ints(words), floats(scales)),
            Self::Fp4 { words, scales, .. } => (*words, *scales) = (ints(words), ints(scales)),
        }
        mapped
    }
}

/// The results of [`quant_linear_group`](super::quant_linear_group), as passed by a backend.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct LinearProducts<B: Backend> {
    /// `[rows, out]` of the first packed matrix.
    pub first: FloatTensor<B>,
    /// `[rows, out]` of the second.
    pub second: FloatTensor<B>,
    /// `[rows, out]` of each dense one.
    #[extension_type]
    pub dense: TensorList<B>,
}
