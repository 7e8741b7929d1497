//! Feed-forward experts: clamped SwiGLU, routed or always on.

mod reference;

use burn::tensor::{FloatDType, Int, Tensor};

/// `silu(min(gate, limit)) · clamp(up, -limit, limit)`; no clamp where `limit` is `None`.
///
/// # Shapes
///
/// - `gate`, `up`: the same shape, as is the output
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `Expert.forward`: the gate is clamped from above only, before the SiLU.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>, limit: Option<f64>) -> Tensor<D> {
    reference::swiglu(gate, up, limit)
}

/// The weights of all experts of a layer: what [`expert_ffn`] needs to know of them.
///
/// Implemented by whatever holds the weights, packed or not, so that only the experts in use are ever decoded.
pub trait Experts {
    /// Number of experts.
    fn count(&self) -> usize;
    /// The matrices `[ids, out, in]` of the experts in `ids` (`[ids]`, on the device).
    fn gather(&self, ids: Tensor<1, Int>, dtype: FloatDType) -> Tensor<3>;
    /// The matrix `[out, in]` of one expert.
    fn one(&self, expert: usize, dtype: FloatDType) -> Tensor<2>;
}

/// Routed experts: for every token, `Σ_slot down(weight · swiglu(gate_up · x))` over its `k` chosen experts.
///
/// Few tokens gather the matrices they need on the device and read nothing back; more tokens, and all on the CPU, are grouped by
/// expert, for which the ids are read back once.
///
/// # Shapes and dtypes
///
/// - `x`: `[tokens, d]`
/// - `ids`, `weights`: `[tokens, k]`, weights f32
/// - `gate_up`: matrices `[2·inner, d]`, the gate's rows first; `down`: matrices `[d, inner]`
/// - output: `[tokens, d]`, f32, summed over the slots in f32
///
/// # Padding
///
/// A slot whose id is negative or not below the number of experts contributes exactly 0, whatever its weight. [`Experts`]
/// never sees such an id.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `MoE.forward`: the routing weight is applied before the down projection.
///
/// # Panics
///
/// If `ids` and `weights` differ in shape, or the number of tokens differs from that of `x`.
pub fn expert_ffn(
    x: Tensor<2>,
    ids: Tensor<2, Int>,
    weights: Tensor<2>,
    gate_up: &impl Experts,
    down: &impl Experts,
    limit: Option<f64>,
) -> Tensor<2> {
    assert_eq!(
        ids.dims(),
        weights.dims(),
        "expert_ffn: ids and weights must have the same shape"
    );
    assert_eq!(
        ids.dims()[0],
        x.dims()[0],
        "expert_ffn: ids must have one row per token"
    );
    reference::expert_ffn(x, ids, weights, gate_up, down, limit)
}
