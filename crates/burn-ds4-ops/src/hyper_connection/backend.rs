use burn::backend::tensor::FloatTensor;
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, ExtensionType, TensorMetadata, backend_extension};

use super::{Sinkhorn, reference};
use crate::matmul::MatmulOps;
use crate::norm::NormOps;

/// The output that is to be spread over the streams before they are used.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum PendingOutput<B: Backend> {
    /// Nothing.
    None,
    /// A sub-layer's output.
    Some {
        /// `[tokens, d]`.
        output: FloatTensor<B>,
        /// `[tokens, (2 + n)·n]`.
        coefficients: FloatTensor<B>,
    },
}

/// The inputs of [`collapse_norm`](super::collapse_norm) and [`head_norm`](super::head_norm), as
/// backends see them.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct Mix<B: Backend> {
    /// `[tokens, n, d]`.
    pub streams: FloatTensor<B>,
    /// `[rows, n·d]`.
    pub function: FloatTensor<B>,
    /// f32, one value for each coefficient.
    pub base: FloatTensor<B>,
    /// f32, one value for each coefficient or one for all.
    pub scale: FloatTensor<B>,
    /// The weight of the norm, `[d]`.
    pub weight: FloatTensor<B>,
    /// The epsilon of the norm.
    pub epsilon: f64,
}

/// The backend operations of this family. The default bodies are the reference.
///
/// No tensor passed to these methods is empty. `projected` is `function · v` of every token, f32.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait HyperConnectionOps: MatmulOps + NormOps {
    /// `function · v` of every token in f32, where `v` is all its streams side by side:
    /// `[tokens, rows]`.
    #[fusion(meta = |streams, function| fusion::projected(streams, function))]
    fn hyper_project(streams: FloatTensor<Self>, function: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::project::<Self>(streams, function)
    }

    /// See [`collapse`](super::collapse). The second result has all coefficients,
    /// `[tokens, (2 + n)·n]`.
    #[fusion(meta = |streams, projected, _base, _scale, _sinkhorn| {
        (fusion::collapsed(streams), projected.clone())
    })]
    fn hyper_collapse(
        streams: FloatTensor<Self>,
        projected: FloatTensor<Self>,
        base: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        sinkhorn: Sinkhorn,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        reference::collapse::<Self>(streams, projected, base, scale, sinkhorn)
    }

    /// See [`expand`](super::expand).
    #[fusion(meta = |_output, streams, _coefficients| streams.clone())]
    fn hyper_expand(
        output: FloatTensor<Self>,
        streams: FloatTensor<Self>,
        coefficients: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::expand::<Self>(output, streams, coefficients)
    }

    /// See [`head`](super::head).
    #[fusion(meta = |streams, _projected, _base, _scale, _epsilon, _norm_epsilon| {
        fusion::collapsed(streams)
    })]
    fn hyper_head(
        streams: FloatTensor<Self>,
        projected: FloatTensor<Self>,
        base: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        epsilon: f64,
        norm_epsilon: f64,
    ) -> FloatTensor<Self> {
        reference::head::<Self>(streams, projected, base, scale, epsilon, norm_epsilon)
    }

    /// See [`collapse_norm`](super::collapse_norm). Returns the streams, the input, its norm and
    /// all coefficients.
    #[fusion(meta = |_pending, mix, _sinkhorn| fusion::normed(mix))]
    fn hyper_collapse_norm(
        #[extension_type] pending: PendingOutput<Self>,
        #[extension_type] mix: Mix<Self>,
        sinkhorn: Sinkhorn,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
    ) {
        reference::collapse_norm::<Self>(pending, mix, sinkhorn)
    }

    /// See [`head_norm`](super::head_norm).
    #[fusion(meta = |_pending, mix, _epsilon, _norm_epsilon| fusion::collapsed(&mix.streams))]
    fn hyper_head_norm(
        #[extension_type] pending: PendingOutput<Self>,
        #[extension_type] mix: Mix<Self>,
        epsilon: f64,
        norm_epsilon: f64,
    ) -> FloatTensor<Self> {
        reference::head_norm::<Self>(pending, mix, epsilon, norm_epsilon)
    }
}

#[cfg(feature = "flex")]
impl HyperConnectionOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl HyperConnectionOps for burn_cubecl::CubeBackend {
    fn hyper_project(streams: FloatTensor<Self>, function: FloatTensor<Self>) -> FloatTensor<Self> {
        if super::launch::can_project(&streams, &function) {
            super::launch::project(streams, function)
        } else {
            reference::project::<Self>(streams, function)
        }
    }

    fn hyper_collapse(
        streams: FloatTensor<Self>,
        projected: FloatTensor<Self>,
        base: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        sinkhorn: Sinkhorn,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        if super::launch::can_collapse(&streams) {
            super::launch::collapse(streams, projected, base, scale, sinkhorn)
        } else {
            reference::collapse::<Self>(streams, projected, base, scale, sinkhorn)
        }
    }

    fn hyper_expand(
        output: FloatTensor<Self>,
        streams: FloatTensor<Self>,
        coefficients: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        if super::launch::can_expand(&output, &streams) {
            super::launch::expand(output, streams, coefficients)
        } else {
            reference::expand::<Self>(output, streams, coefficients)
        }
    }

    fn hyper_head(
        streams: FloatTensor<Self>,
        projected: FloatTensor<Self>,
        base: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        epsilon: f64,
        norm_epsilon: f64,
    ) -> FloatTensor<Self> {
        if super::launch::can_collapse(&streams) {
            super::launch::head(streams, projected, base, scale, epsilon, norm_epsilon)
        } else {
            reference::head::<Self>(streams, projected, base, scale, epsilon, norm_epsilon)
        }
    }

    fn hyper_collapse_norm(
        pending: PendingOutput<Self>,
        mix: Mix<Self>,
        sinkhorn: Sinkhorn,
    ) -> reference::Collapsed<Self> {
        if super::launch::can_fuse(&pending, &mix) {
            super::launch::collapse_norm(pending, mix, sinkhorn)
        } else {
            reference::collapse_norm::<Self>(pending, mix, sinkhorn)
        }
    }

    fn hyper_head_norm(
        pending: PendingOutput<Self>,
        mix: Mix<Self>,
        epsilon: f64,
        norm_epsilon: f64,
    ) -> FloatTensor<Self> {
        if super::launch::can_fuse(&pending, &mix) {
            super::launch::head_norm(pending, mix, epsilon, norm_epsilon)
        } else {
            reference::head_norm::<Self>(pending, mix, epsilon, norm_epsilon)
        }
    }
}

/// Output shapes and dtypes that fusion needs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    use super::MixMetadata;

    pub(super) fn projected(streams: &TensorSpec, function: &TensorSpec) -> TensorSpec {
        let shape = [streams.shape[0], function.shape[0]];
        TensorSpec::new(shape.into(), DType::F32)
    }

    pub(super) fn normed(mix: &MixMetadata) -> (TensorSpec, TensorSpec, TensorSpec, TensorSpec) {
        let (streams, input) = (&mix.streams, collapsed(&mix.streams));
        let shape = [streams.shape[0], mix.function.shape[0]];
        let coefficients = TensorSpec::new(shape.into(), DType::F32);
        (streams.clone(), input.clone(), input, coefficients)
    }

    pub(super) fn collapsed(streams: &TensorSpec) -> TensorSpec {
        let shape = [streams.shape[0], streams.shape[2]];
        TensorSpec::new(shape.into(), streams.dtype)
    }
}
