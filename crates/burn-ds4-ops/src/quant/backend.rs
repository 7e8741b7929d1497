use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, ExtensionType, TensorMetadata, backend_extension};
use burn::tensor::{FloatDType, Shape};

use super::{Activations, reference};
use crate::gemm::Fp4Layout;
#[cfg(feature = "cube")]
use crate::matmul::INVARIANT_ROWS;
use crate::matmul::{MatmulOps, TensorGroup};
use crate::reference::ranges;
use crate::roundtrip::SmallFloat;

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
        /// `[count, parts * ceil(out / parts / 128), ceil(columns / 128)]`.
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
            Self::Dense { values } => values.shape().dims(),
            Self::Fp8 { words, columns, .. } | Self::Fp4 { words, columns, .. } => {
                let [count, rows, _] = words.shape().dims();
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
pub struct GroupProducts<B: Backend> {
    /// `[rows, out]` of the first packed matrix.
    pub first: FloatTensor<B>,
    /// `[rows, out]` of the second.
    pub second: FloatTensor<B>,
    /// `[rows, out]` of each dense one.
    #[extension_type]
    pub dense: TensorGroup<B>,
}

/// Extension of Burn's backends by the operators of this family; the default bodies are the
/// reference.
///
/// No tensor that gets here is empty.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait QuantOps: MatmulOps {
    /// See [`Weights::dequantize`](super::Weights::dequantize).
    #[fusion(meta = |weights, dtype| fusion::floats(weights, *dtype))]
    fn dequantize_weights(
        #[extension_type] weights: PackedWeights<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        reference::dequantize::<Self>(weights, dtype)
    }

    /// See [`fp8_roundtrip`](super::fp8_roundtrip) and [`fp4_roundtrip`](super::fp4_roundtrip); `x`
    /// is `[rows, columns]`.
    #[fusion(meta = |x, _block, _to| x.clone())]
    fn roundtrip(x: FloatTensor<Self>, block: usize, to: SmallFloat) -> FloatTensor<Self> {
        reference::roundtrip::<Self>(x, block, to)
    }

    /// See [`quant_linear`](super::quant_linear); `x` is `[rows, in]`.
    #[fusion(meta = |x, weights, _activations| fusion::product(x, weights))]
    fn quant_linear(
        x: FloatTensor<Self>,
        #[extension_type] weights: PackedWeights<Self>,
        activations: Activations,
    ) -> FloatTensor<Self> {
        reference::quant_linear::<Self>(x, weights, activations)
    }

    /// See [`quant_linear_pair`](super::quant_linear_pair); `x` is `[rows, in]`.
    #[fusion(meta = |x, first, second, _activations| {
        (fusion::product(x, first), fusion::product(x, second))
    })]
    fn quant_linear_pair(
        x: FloatTensor<Self>,
        #[extension_type] first: PackedWeights<Self>,
        #[extension_type] second: PackedWeights<Self>,
        activations: Activations,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        reference::quant_linear_pair::<Self>(x, first, second, activations)
    }

    /// See [`quant_linear_group`](super::quant_linear_group); `x` is `[rows, in]`, of at most
    /// [`INVARIANT_ROWS`](crate::matmul::INVARIANT_ROWS) rows. The `dense` weights have one dtype.
    #[fusion(meta = |x, first, second, dense, _activations, dtype| {
        fusion::group(x, [first, second], dense, *dtype)
    })]
    fn quant_linear_group(
        x: FloatTensor<Self>,
        #[extension_type] first: PackedWeights<Self>,
        #[extension_type] second: PackedWeights<Self>,
        #[extension_type] dense: TensorGroup<Self>,
        activations: Activations,
        dtype: FloatDType,
    ) -> GroupProducts<Self> {
        reference::quant_linear_group::<Self>(x, [first, second], dense, activations, dtype)
    }

    /// See [`grouped_linear`](super::grouped_linear); `x` is `[tokens, groups, in]`.
    #[fusion(meta = |x, weights, _activations| fusion::products(x, weights))]
    fn grouped_linear(
        x: FloatTensor<Self>,
        #[extension_type] weights: PackedWeights<Self>,
        activations: Activations,
    ) -> FloatTensor<Self> {
        reference::grouped_linear::<Self>(x, weights, activations)
    }
}

#[cfg(feature = "flex")]
impl QuantOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl QuantOps for burn_cubecl::CubeBackend {
    fn roundtrip(x: FloatTensor<Self>, block: usize, to: SmallFloat) -> FloatTensor<Self> {
        if crate::roundtrip::launch::can_round(&x, block) {
            crate::roundtrip::launch::round(x, block, to)
        } else {
            reference::roundtrip::<Self>(x, block, to)
        }
    }

    fn quant_linear(
        x: FloatTensor<Self>,
        weights: PackedWeights<Self>,
        activations: Activations,
    ) -> FloatTensor<Self> {
        use burn::backend::ops::FloatTensorOps;

        if let PackedWeights::Dense { values } = &weights
            && x.shape()[0] <= INVARIANT_ROWS
        {
            let [_, out, columns] = weights.dims();
            let values = Self::float_reshape(values.clone(), Shape::new([out, columns]));
            let dtype = x.dtype().into();
            let x = reference::input::<Self>(x, activations);
            return Self::small_m_matmul(x, values, dtype, INVARIANT_ROWS);
        }
        let matrix = weights.clone().into();
        if super::launch::can_multiply_rows(&x, &matrix) {
            super::launch::multiply_rows(x, matrix, activations)
        } else {
            reference::quant_linear::<Self>(x, weights, activations)
        }
    }

    fn quant_linear_pair(
        x: FloatTensor<Self>,
        first: PackedWeights<Self>,
        second: PackedWeights<Self>,
        activations: Activations,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let matrices = [first.clone(), second.clone()].map(Into::into);
        match super::launch::pair_blueprint(&x, &matrices, x.shape()[0]) {
            Some(blueprint) => {
                let x = reference::input::<Self>(x, activations);
                super::launch::multiply_pair(x, matrices, blueprint)
            }
            // Each rounds for itself, since what FP8 tensor cores multiply is not rounded rows.
            None => {
                let product = Self::quant_linear(x.clone(), first, activations);
                (product, Self::quant_linear(x, second, activations))
            }
        }
    }

    fn quant_linear_group(
        x: FloatTensor<Self>,
        first: PackedWeights<Self>,
        second: PackedWeights<Self>,
        dense: TensorGroup<Self>,
        activations: Activations,
        dtype: FloatDType,
    ) -> GroupProducts<Self> {
        let pair = [first, second];
        // The products with dense weights are of exact activations.
        if activations == Activations::Exact {
            let (matrices, weights) = (pair.clone().map(Into::into), dense.clone().into_vec());
            let products = super::launch::multiply_group(&x, matrices, &weights, dtype.into());
            if let Some(products) = products {
                return products;
            }
        }
        reference::quant_linear_group::<Self>(x, pair, dense, activations, dtype)
    }

    fn grouped_linear(
        x: FloatTensor<Self>,
        weights: PackedWeights<Self>,
        activations: Activations,
    ) -> FloatTensor<Self> {
        let matrices = weights.clone().into();
        if super::launch::can_multiply_groups(&x, &matrices) {
            super::launch::multiply_groups(x, matrices, activations)
        } else {
            reference::grouped_linear::<Self>(x, weights, activations)
        }
    }
}

/// What fusion has to know about the outputs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use super::{GroupProductsMetadata, PackedWeightsMetadata};
    use crate::matmul::TensorGroupMetadata;
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::FloatDType;

    fn dims(weights: &PackedWeightsMetadata) -> [usize; 3] {
        match weights {
            PackedWeightsMetadata::Dense { values } => values.shape.dims(),
            PackedWeightsMetadata::Fp8 { words, columns, .. }
            | PackedWeightsMetadata::Fp4 { words, columns, .. } => {
                [words.shape[0], words.shape[1], *columns]
            }
        }
    }

    pub(super) fn floats(weights: &PackedWeightsMetadata, dtype: FloatDType) -> TensorSpec {
        TensorSpec::new(dims(weights).into(), dtype.into())
    }

    pub(super) fn product(x: &TensorSpec, weights: &PackedWeightsMetadata) -> TensorSpec {
        let [_, out, _] = dims(weights);
        TensorSpec::new([x.shape[0], out].into(), x.dtype)
    }

    pub(super) fn group(
        x: &TensorSpec,
        [first, second]: [&PackedWeightsMetadata; 2],
        dense: &TensorGroupMetadata,
        dtype: FloatDType,
    ) -> GroupProductsMetadata {
        GroupProductsMetadata {
            first: product(x, first),
            second: product(x, second),
            dense: crate::matmul::fusion::group(x, dense, dtype),
        }
    }

    pub(super) fn products(x: &TensorSpec, weights: &PackedWeightsMetadata) -> TensorSpec {
        let [groups, out, _] = dims(weights);
        TensorSpec::new([x.shape[0], groups, out].into(), x.dtype)
    }
}
