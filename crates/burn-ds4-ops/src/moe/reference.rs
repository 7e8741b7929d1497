use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Int, Tensor, activation};

use super::Experts;
use crate::matmul::matmul;

/// Up to this many (token, slot) pairs the matrices are gathered per pair.
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
    if tokens * k <= MAX_GATHERED_PAIRS {
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

    let weights = weights.reshape([tokens * k, 1]);
    let mut order = Vec::with_capacity(tokens * k);
    let mut outputs = Vec::new();
    for (expert, pairs) in pairs_of.iter().enumerate() {
        if pairs.is_empty() {
            continue;
        }
        let rows: Vec<i64> = pairs.iter().map(|pair| pair / k as i64).collect();
        let rows = Tensor::<1, Int>::from_data(rows.as_slice(), &device);
        let slots = Tensor::<1, Int>::from_data(pairs.as_slice(), &device);
        let hidden = matmul(
            x.clone().select(0, rows),
            gate_up.one(expert, dtype).transpose(),
        );
        let hidden = hidden_layer(hidden, weights.clone().select(0, slots), limit).cast(dtype);
        outputs.push(matmul(hidden, down.one(expert, dtype).transpose()).cast(FloatDType::F32));
        order.extend_from_slice(pairs);
    }
    let pairs = Tensor::<2>::zeros([tokens * k, d], (&device, DType::F32));
    if outputs.is_empty() {
        return pairs.reshape([tokens, k, d]).sum_dim(1).squeeze_dim(1);
    }
    // One row per (token, slot), so that the sum over slots has a fixed order.
    let order = Tensor::<1, Int>::from_data(order.as_slice(), &device);
    pairs
        .select_assign(0, order, Tensor::cat(outputs, 0), IndexingUpdateOp::Assign)
        .reshape([tokens, k, d])
        .sum_dim(1)
        .squeeze_dim(1)
}

/// Splits the gate-up projection, applies the activation in f32 and the routing weight.
fn hidden_layer(gate_up: Tensor<2>, weights: Tensor<2>, limit: Option<f64>) -> Tensor<2> {
    let [rows, width] = gate_up.dims();
    let gate_up = gate_up.cast(FloatDType::F32);
    let gate = gate_up.clone().slice([0..rows, 0..width / 2]);
    let up = gate_up.slice([0..rows, width / 2..width]);
    swiglu(gate, up, limit) * weights
}
