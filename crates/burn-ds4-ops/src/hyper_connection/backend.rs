use burn::backend::tensor::FloatTensor;
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

use super::{Sinkhorn, reference};
use crate::matmul::MatmulOps;

/// Extension of Burn's backends by the operators of this family; the default bodies are the reference.
///
/// No tensor that gets here is empty. `projected` is `function · v` of every token, f32.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait HyperConnectionOps: MatmulOps {
    /// See [`collapse`](super::collapse). The second result has all coefficients, `[tokens, (2 + n)·n]`.
    #[fusion(meta = |streams, projected, _base, _scale, _sinkhorn| (fusion::collapsed(streams), projected.clone()))]
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
    #[fusion(meta = |streams, _projected, _base, _scale, _epsilon, _norm_epsilon| fusion::collapsed(streams))]
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
}

#[cfg(feature = "flex")]
impl HyperConnectionOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl HyperConnectionOps for burn_cubecl::CubeBackend {
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
}

/// What fusion has to know about the outputs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;

    pub(super) fn collapsed(streams: &TensorSpec) -> TensorSpec {
        let shape = [streams.shape[0], streams.shape[2]];
        TensorSpec::new(shape.into(), streams.dtype)
    }
}
