#[cfg(feature = "cube")]
use super::launch;
use super::reference;
use crate::matmul::MatmulOps;
use crate::operators::prelude::*;
use crate::optional::{OptionalBool, OptionalFloat};

/// The outputs of `k` experts for each of the input's rows.
#[cfg(feature = "fusion")]
fn routing(input: &TensorSpec, k: usize) -> (TensorSpec, TensorSpec) {
    let shape = [input.shape[0], k];
    (spec(shape, DType::F32), spec(shape, DType::I32))
}

operators! {
    /// Extension of Burn's backends by the operators of this family.
    pub trait RouterOps: MatmulOps;

    /// See [`sqrt_softplus`](super::sqrt_softplus).
    #[fusion(default)]
    fn sqrt_softplus(logits: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::sqrt_softplus::<Self>(logits)
    }

    /// See [`topk_select`](super::topk_select).
    #[fusion(meta = |scores, k| (
        spec([scores.shape[0], *k], scores.dtype),
        spec([scores.shape[0], *k], DType::I32),
    ))]
    fn topk_select(scores: FloatTensor<Self>, k: usize) -> (FloatTensor<Self>, IntTensor<Self>) {
        reference::topk_select::<Self>(scores, k)
    }
    if launch::can_select(&scores, k) => launch::select(scores, None, None, k, None);

    /// See [`activation_topk`](super::activation_topk).
    #[fusion(meta = |logits, _bias, _padding, k, _scale| routing(logits, *k))]
    fn activation_topk(
        logits: FloatTensor<Self>,
        #[extension_type] bias: OptionalFloat<Self>,
        #[extension_type] padding: OptionalBool<Self>,
        k: usize,
        scale: f64,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let (bias, padding) = (bias.into_option(), padding.into_option());
        reference::activation_topk::<Self>(logits, bias, padding, k, scale)
    }
    if launch::can_select(&logits, k) =>
        launch::select(logits, bias.into_option(), padding.into_option(), k, Some(scale));

    /// See [`hash_route`](super::hash_route).
    #[fusion(meta = |token_ids, table, _logits, _experts, _scale| {
        routing(token_ids, table.shape[1])
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
    if launch::can_look_up(&token_ids, &table, experts) =>
        launch::hash_route(token_ids, table, logits.into_option(), experts, scale);

    /// See [`dense_router`](super::dense_router).
    #[fusion(meta = |x, _gate, _bias, _padding, k, _scale| routing(x, *k))]
    fn dense_router(
        x: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        #[extension_type] bias: OptionalFloat<Self>,
        #[extension_type] padding: OptionalBool<Self>,
        k: usize,
        scale: f64,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let logits = reference::logits::<Self>(x, gate);
        Self::activation_topk(logits, bias, padding, k, scale)
    }

    cube {
        fn dense_router(
            x: FloatTensor<Self>,
            gate: FloatTensor<Self>,
            bias: OptionalFloat<Self>,
            padding: OptionalBool<Self>,
            k: usize,
            scale: f64,
        ) -> (FloatTensor<Self>, IntTensor<Self>) {
            if launch::can_fuse(&x, &gate, k) {
                let (bias, padding) = (bias.into_option(), padding.into_option());
                return launch::dense_router(x, gate, bias, padding, k, scale);
            }
            let logits = if x.shape().num_elements() > 0 {
                crate::gemm::launch::library::linear(x, gate, burn::tensor::DType::F32)
            } else {
                reference::logits::<Self>(x, gate)
            };
            Self::activation_topk(logits, bias, padding, k, scale)
        }
    }
}
