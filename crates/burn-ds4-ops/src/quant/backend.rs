use burn::tensor::FloatDType;

use super::args::{Activations, LinearProducts, PackedWeights};
#[cfg(feature = "cube")]
use super::launch;
use super::reference;
use crate::matmul::{INVARIANT_ROWS, MatmulOps, TensorList};
use crate::operators::prelude::*;
use crate::roundtrip::SmallFloat;

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

    /// See [`grouped_linear`](super::grouped_linear), and [`quant_linear`](super::quant_linear) for
    /// one group; `x` is `[tokens, groups, in]`.
    #[fusion(meta = |x, weights, _activations| fusion::products(x, weights))]
    fn grouped_linear(
        x: FloatTensor<Self>,
        #[extension_type] weights: PackedWeights<Self>,
        activations: Activations,
    ) -> FloatTensor<Self> {
        reference::grouped_linear::<Self>(x, weights, activations)
    }

    /// See [`quant_linear_group`](super::quant_linear_group); `x` is `[rows, in]`. The `dense`
    /// weights have one dtype; with any, there are at most [`INVARIANT_ROWS`] rows.
    #[fusion(meta = |x, first, second, dense, _activations, dtype| {
        fusion::group(x, [first, second], dense, *dtype)
    })]
    fn quant_linear_group(
        x: FloatTensor<Self>,
        #[extension_type] first: PackedWeights<Self>,
        #[extension_type] second: PackedWeights<Self>,
        #[extension_type] dense: TensorList<Self>,
        activations: Activations,
        dtype: FloatDType,
    ) -> LinearProducts<Self> {
        let dense = Self::small_m_matmul(x.clone(), dense, dtype, INVARIANT_ROWS);
        // The rows are rounded once.
        let (x, exact) = (reference::input::<Self>(x, activations), Activations::Exact);
        LinearProducts {
            first: reference::linear::<Self>(x.clone(), first, exact),
            second: reference::linear::<Self>(x, second, exact),
            dense,
        }
    }
}

#[cfg(feature = "flex")]
impl QuantOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl QuantOps for burn_cubecl::CubeBackend {
    fn roundtrip(x: FloatTensor<Self>, block: usize, to: SmallFloat) -> FloatTensor<Self> {
        launch::roundtrip(x, block, to)
    }

    fn grouped_linear(
        x: FloatTensor<Self>,
        weights: PackedWeights<Self>,
        activations: Activations,
    ) -> FloatTensor<Self> {
        launch::grouped_linear(&x, &weights, activations)
            .unwrap_or_else(|| reference::grouped_linear::<Self>(x, weights, activations))
    }

    fn quant_linear_group(
        x: FloatTensor<Self>,
        first: PackedWeights<Self>,
        second: PackedWeights<Self>,
        dense: TensorList<Self>,
        activations: Activations,
        dtype: FloatDType,
    ) -> LinearProducts<Self> {
        let matrices = || [&first, &second].map(|one| one.clone().into());
        let group = |dense: &[_]| launch::group(&x, matrices(), dense, activations, dtype.into());
        if let Some(products) = group(&dense.clone().into_vec()) {
            return products;
        }
        let dense = Self::small_m_matmul(x.clone(), dense, dtype, INVARIANT_ROWS);
        if let Some(pair) = group(&[]) {
            return LinearProducts { dense, ..pair };
        }
        // Each rounds for itself, since what FP8 tensor cores multiply is not rounded rows.
        let product = |one| reference::linear::<Self>(x.clone(), one, activations);
        LinearProducts {
            first: product(first.clone()),
            second: product(second.clone()),
            dense,
        }
    }
}

/// What fusion has to know about the outputs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use super::super::args::{LinearProductsMetadata, PackedWeightsMetadata};
    use crate::matmul::TensorListMetadata;
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::FloatDType;

    fn dims(weights: &PackedWeightsMetadata) -> [usize; 3] {
        match weights {
            PackedWeightsMetadata::Dense { values } => crate::dims::dims_of(&values.shape),
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
        dense: &TensorListMetadata,
        dtype: FloatDType,
    ) -> LinearProductsMetadata {
        LinearProductsMetadata {
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
