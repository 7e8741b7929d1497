use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

use super::reference;
use crate::matmul::MatmulOps;
use crate::optional::{OptionalBool, OptionalFloat};

/// Extension of Burn's backends by the operators of this family. The default bodies are the
/// reference.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait RouterOps: MatmulOps {
    /// See [`sqrt_softplus`](super::sqrt_softplus).
    #[fusion(default)]
    fn sqrt_softplus(logits: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::sqrt_softplus::<Self>(logits)
    }

    /// See [`topk_select`](super::topk_select).
    #[fusion(meta = |scores, k| (fusion::rows(scores, *k, scores.dtype), fusion::ids(scores, *k)))]
    fn topk_select(scores: FloatTensor<Self>, k: usize) -> (FloatTensor<Self>, IntTensor<Self>) {
        reference::topk_select::<Self>(scores, k)
    }

    /// See [`activation_topk`](super::activation_topk).
    #[fusion(meta = |logits, _bias, _padding, k, _scale| fusion::routing(logits, *k))]
    fn activation_topk(
        logits: FloatTensor<Self>,
        #[extension_type] bias: OptionalFloat<Self>,
        #[extension_type] padding: OptionalBool<Self>,
        k: usize,
        scale: f64,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        reference::activation_topk::<Self>(
            logits,
            bias.into_option(),
            padding.into_option(),
            k,
            scale,
        )
    }

    /// See [`hash_route`](super::hash_route).
    #[fusion(meta = |token_ids, table, _logits, _experts, _scale| {
        fusion::routing(token_ids, table.shape[1])
    })]
    fn hash_route(
        token_ids: IntTensor<Self>,
        table: IntTensor<Self>,
        #[extension_type] logits: OptionalFloat<Self>,
        experts: usize,
        scale: f64,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        reference::hash_route::<Self>(token_ids, table, logits.into_option(), experts, scale)
    }

    /// See [`dense_router`](super::dense_router).
    #[fusion(meta = |x, _gate, _bias, _padding, k, _scale| fusion::routing(x, *k))]
    fn dense_router(
        x: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        #[extension_type] bias: OptionalFloat<Self>,
        #[extension_type] padding: OptionalBool<Self>,
        k: usize,
        scale: f64,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let logits = reference::logits::<Self>(x, gate);
        reference::activation_topk::<Self>(
            logits,
            bias.into_option(),
            padding.into_option(),
            k,
            scale,
        )
    }
}

#[cfg(feature = "flex")]
impl RouterOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl RouterOps for burn_cubecl::CubeBackend {
    fn topk_select(scores: FloatTensor<Self>, k: usize) -> (FloatTensor<Self>, IntTensor<Self>) {
        if super::launch::can_select(&scores, k) {
            super::launch::topk_select(scores, k)
        } else {
            reference::topk_select::<Self>(scores, k)
        }
    }

    fn activation_topk(
        logits: FloatTensor<Self>,
        bias: OptionalFloat<Self>,
        padding: OptionalBool<Self>,
        k: usize,
        scale: f64,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let (bias, padding) = (bias.into_option(), padding.into_option());
        if super::launch::can_select(&logits, k) {
            super::launch::activation_topk(logits, bias, padding, k, scale)
        } else {
            reference::activation_topk::<Self>(logits, bias, padding, k, scale)
        }
    }

    fn hash_route(
        token_ids: IntTensor<Self>,
        table: IntTensor<Self>,
        logits: OptionalFloat<Self>,
        experts: usize,
        scale: f64,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let logits = logits.into_option();
        if super::launch::can_look_up(&token_ids, &table, experts) {
            super::launch::hash_route(token_ids, table, logits, experts, scale)
        } else {
            reference::hash_route::<Self>(token_ids, table, logits, experts, scale)
        }
    }

    fn dense_router(
        x: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        bias: OptionalFloat<Self>,
        padding: OptionalBool<Self>,
        k: usize,
        scale: f64,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        if super::launch::can_fuse(&x, &gate, k) {
            let (bias, padding) = (bias.into_option(), padding.into_option());
            return super::launch::dense_router(x, gate, bias, padding, k, scale);
        }
        let logits = if x.shape().num_elements() > 0 {
            crate::gemm::launch::library::linear(x, gate, burn::tensor::DType::F32)
        } else {
            reference::logits::<Self>(x, gate)
        };
        <Self as RouterOps>::activation_topk(logits, bias, padding, k, scale)
    }
}

/// The shapes and dtypes of outputs, which fusion needs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    pub(super) fn rows(input: &TensorSpec, k: usize, dtype: DType) -> TensorSpec {
        TensorSpec::new([input.shape[0], k].into(), dtype)
    }

    pub(super) fn ids(input: &TensorSpec, k: usize) -> TensorSpec {
        rows(input, k, DType::I32)
    }

    pub(super) fn routing(input: &TensorSpec, k: usize) -> (TensorSpec, TensorSpec) {
        (rows(input, k, DType::F32), ids(input, k))
    }
}
