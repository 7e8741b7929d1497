use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Int, Tensor, activation};

use super::Experts;
use crate::device::is_host;
use crate::matmul::matmul;

/// Up to this many (token, slot) pairs the matrices are gathered per pair, where reading the ids back would stall the device.
const MAX_GATHERED_PAIRS: usize = 48;

pub(super) fn swiglu<const D: usize>(
    gate: Tensor<D>,
    up: Tensor<D>,
    limit: Option<f64>,
) -> Tensor<D> {
    match limit {
        Some(limit) => activation::silu(gate.clamp_max(limit)) * up.clamp(-limit, limit),
        None => activation::silu(gate) * up,
    }
}

pub(super) fn expert_ffn(
    x: Tensor<2>,
    ids: Tensor<2, Int>,
    weights: Tensor<2>,
    gate_up: &impl Experts,
    down: &impl Experts,
    limit: Option<f64>,
) -> Tensor<2> {
    let [tokens, k] = ids.dims();
    if tokens * k * gate_up.count() == 0 {
        let [_, d] = x.dims();
        return Tensor::zeros([tokens, d], (&x.device(), DType::F32));
    }
    if tokens * k <= MAX_GATHERED_PAIRS && !is_host(&x.device()) {
        gathered(x, ids, weights, gate_up, down, limit)
    } else {
        grouped(x, ids, weights, gate_up, down, limit)
    }
}

fn gathered(
    x: Tensor<2>,
    ids: Tensor<2, Int>,
    weights: Tensor<2>,
    gate_up: &impl Experts,
    down: &impl Experts,
    limit: Option<f64>,
) -> Tensor<2> {
    let [tokens, d] = x.dims();
    let [_, k] = ids.dims();
    let pairs = tokens * k;
    let dtype: FloatDType = x.dtype().into();
    // An id out of range is clamped to one that can be read, and its output dropped: as a product with a weight of zero it
    // would let an infinity through.
    let clamped = ids.clone().clamp(0, gate_up.count() as i64 - 1);
    let padding = clamped.clone().not_equal(ids).unsqueeze_dim::<3>(2);
    let ids = clamped.reshape([pairs]);
    let x = x
        .unsqueeze_dim::<3>(1)
        .expand([tokens, k, d])
        .reshape([pairs, d, 1]);
    let hidden = matmul(gate_up.gather(ids.clone(), dtype), x).squeeze_dim::<2>(2);
    let hidden = hidden_layer(hidden, weights.reshape([pairs, 1]), limit).cast(dtype);
    matmul(down.gather(ids, dtype), hidden.unsqueeze_dim::<3>(2))
        .reshape([tokens, k, d])
        .cast(FloatDType::F32)
        .mask_fill(padding.expand([tokens, k, d]), 0.0)
        .sum_dim(1)
        .squeeze_dim(1)
}

fn grouped(
    x: Tensor<2>,
    ids: Tensor<2, Int>,
    weights: Tensor<2>,
    gate_up: &impl Experts,
    down: &impl Experts,
    limit: Option<f64>,
) -> Tensor<2> {
    let [tokens, d] = x.dims();
    let [_, k] = ids.dims();
    let device = x.device();
    let dtype: FloatDType = x.dtype().into();

    let mut pairs_of = vec![Vec::new(); gate_up.count()];
    for (pair, id) in ids.into_data().iter::<i64>().enumerate() {
        // An id out of range is padding.
        if let Some(pairs) = usize::try_from(id).ok().and_then(|id| pairs_of.get_mut(id)) {
            pairs.push(pair as i64);
        }
    }
    let order: Vec<i64> = pairs_of.concat();
    if order.is_empty() {
        return Tensor::zeros([tokens, d], (&device, DType::F32));
    }
    // The pairs of one expert side by side, so that all experts share every operation but the matrix products.
    let rows: Vec<i64> = order.iter().map(|pair| pair / k as i64).collect();
    let x = x.select(0, Tensor::from_data(rows.as_slice(), &device));
    let hidden = per_expert(x, &pairs_of, gate_up, dtype);
    let pairs = Tensor::<1, Int>::from_data(order.as_slice(), &device);
    let weights = weights.reshape([tokens * k, 1]).select(0, pairs.clone());
    let hidden = hidden_layer(hidden, weights, limit).cast(dtype);
    let outputs = per_expert(hidden, &pairs_of, down, dtype).cast(FloatDType::F32);
    // Back to one row per (token, slot), so that the sum over slots has a fixed order.
    Tensor::<2>::zeros([tokens * k, d], (&device, DType::F32))
        .select_assign(0, pairs, outputs, IndexingUpdateOp::Assign)
        .reshape([tokens, k, d])
        .sum_dim(1)
        .squeeze_dim(1)
}

/// Multiplies the rows of `x`, which are ordered by expert, by the matrices of their experts.
fn per_expert(
    x: Tensor<2>,
    pairs_of: &[Vec<i64>],
    matrices: &impl Experts,
    dtype: FloatDType,
) -> Tensor<2> {
    let mut from = 0;
    let mut outputs = Vec::new();
    for (expert, pairs) in pairs_of.iter().enumerate() {
        if !pairs.is_empty() {
            let rows = x.clone().slice_dim(0, from..from + pairs.len());
            outputs.push(matmul(rows, matrices.one(expert, dtype).transpose()));
            from += pairs.len();
        }
    }
    Tensor::cat(outputs, 0)
}

/// Splits the gate-up projection, applies the activation in f32 and the routing weight.
fn hidden_layer(gate_up: Tensor<2>, weights: Tensor<2>, limit: Option<f64>) -> Tensor<2> {
    let [rows, width] = gate_up.dims();
    let gate_up = gate_up.cast(FloatDType::F32);
    let gate = gate_up.clone().slice([0..rows, 0..width / 2]);
    let up = gate_up.slice([0..rows, width / 2..width]);
    swiglu(gate, up, limit) * weights
}
