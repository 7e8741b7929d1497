//! The router in plain tensor operations. Generic over the backend, as these are the default bodies
//! of the operators' backend trait.

use crate::matmul::MatmulOps;
use crate::reference::prelude::*;

/// Added to the sum of the chosen activations, which may underflow to zero.
pub(super) const DENOMINATOR_EPSILON: f64 = 1e-20;

/// Below this, `sqrt(softplus(x))` is `exp(x / 2)` to f32 precision.
const TAIL: f64 = -20.0;

pub(super) fn sqrt_softplus<B: Backend>(logits: FloatTensor<B>) -> FloatTensor<B> {
    // CubeCL devices panic on some operations without elements.
    if logits.shape().num_elements() == 0 {
        return logits;
    }
    // softplus(x) = max(x, 0) + log1p(exp(-|x|))
    let t = B::float_exp(B::float_neg(B::float_abs(logits.clone())));
    let positive = B::float_clamp_min(logits.clone(), 0.0.into());
    let root = B::float_sqrt(B::float_add(positive, log1p::<B>(t)));
    // The root divides the exponent by two here, as `t` itself would underflow.
    let tail = B::float_lower_elem(
        logits.clone(),
        TAIL.into(),
        bool_dtype::<B>(&logits.device()),
    );
    let halved = B::float_exp(B::float_mul_scalar(logits, 0.5.into()));
    B::float_mask_where(root, tail, halved)
}

pub(super) fn topk_select<B: Backend>(
    scores: FloatTensor<B>,
    k: usize,
) -> (FloatTensor<B>, IntTensor<B>) {
    let ids = select_ids::<B>(scores.clone(), k);
    (B::float_gather(1, scores, ids.clone()), ids)
}

pub(super) fn no_rows<B: Backend>(device: &B::Device, k: usize) -> (FloatTensor<B>, IntTensor<B>) {
    let shape = Shape::new([0, k]);
    (
        B::float_zeros(shape.clone(), device, FloatDType::F32),
        B::int_zeros(shape, device, INT),
    )
}

fn select_ids<B: Backend>(scores: FloatTensor<B>, k: usize) -> IntTensor<B> {
    let (device, dtype) = (scores.device(), FloatDType::from(scores.dtype()));
    let rows = scores.shape()[0];
    // A taken column drops to -inf. All others stay above it, so that no column is taken twice.
    let lowest = dtype.finfo().min;
    let nan = B::float_is_nan(scores.clone(), bool_dtype::<B>(&device));
    let mut remaining = B::float_clamp_min(
        B::float_mask_fill(scores, nan, lowest.into()),
        lowest.into(),
    );
    let taken = B::float_full([rows, 1].into(), f32::NEG_INFINITY.into(), &device, dtype);
    let mut ids = Vec::with_capacity(k);
    for rank in 0..k {
        let id = B::float_argmax(remaining.clone(), 1, INT);
        if rank + 1 < k {
            remaining = B::float_scatter(
                1,
                remaining,
                id.clone(),
                taken.clone(),
                IndexingUpdateOp::Assign,
            );
        }
        ids.push(id);
    }
    B::int_cat(ids, 1)
}

pub(super) fn activation_topk<B: Backend>(
    logits: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    padding: Option<BoolTensor<B>>,
    k: usize,
    scale: f64,
) -> (FloatTensor<B>, IntTensor<B>) {
    let shape = logits.shape();
    if shape[0] == 0 {
        return no_rows::<B>(&logits.device(), k);
    }
    let scores = sqrt_softplus::<B>(as_f32::<B>(logits));
    let selection = match bias {
        Some(bias) => {
            let bias = reshape::<B>(bias, [1, shape[1]]);
            B::float_add(scores.clone(), B::float_expand(bias, shape))
        }
        None => scores.clone(),
    };
    let ids = select_ids::<B>(selection, k);
    let weights = weights::<B>(scores, ids.clone(), scale);
    match padding {
        Some(padding) => blank::<B>(weights, ids, padding),
        None => (weights, ids),
    }
}

/// `x · gateᵀ` in f32.
pub(super) fn logits<B: MatmulOps>(x: FloatTensor<B>, gate: FloatTensor<B>) -> FloatTensor<B> {
    let shape = Shape::new([x.shape()[0], gate.shape()[0]]);
    // CubeCL devices panic on some operations without elements.
    if shape[0] == 0 || x.shape()[1] == 0 {
        return B::float_zeros(shape, &x.device(), FloatDType::F32);
    }
    B::precise_matmul(as_f32::<B>(x), B::float_transpose(as_f32::<B>(gate)))
}

pub(super) fn hash_route<B: Backend>(
    token_ids: IntTensor<B>,
    table: IntTensor<B>,
    logits: Option<FloatTensor<B>>,
    experts: usize,
    scale: f64,
) -> (FloatTensor<B>, IntTensor<B>) {
    let device = token_ids.device();
    let [rows, vocabulary, k] = [token_ids.shape()[0], table.shape()[0], table.shape()[1]];
    if rows == 0 {
        return no_rows::<B>(&device, k);
    }
    let padding = B::int_lower_elem(token_ids.clone(), 0.into(), bool_dtype::<B>(&device));
    let known = within::<B>(token_ids, vocabulary);
    let ids = B::int_select(table, 0, known);
    let ids = B::int_cast(within::<B>(ids, experts), INT);
    let weights = match logits {
        Some(logits) => {
            let scores = sqrt_softplus::<B>(as_f32::<B>(logits));
            weights::<B>(scores, ids.clone(), scale)
        }
        None => B::float_full(
            [rows, k].into(),
            (scale / k as f64).into(),
            &device,
            FloatDType::F32,
        ),
    };
    blank::<B>(weights, ids, padding)
}

fn weights<B: Backend>(scores: FloatTensor<B>, ids: IntTensor<B>, scale: f64) -> FloatTensor<B> {
    let chosen = B::float_gather(1, scores, ids);
    let sum = B::float_add_scalar(
        B::float_sum_dim(chosen.clone(), 1),
        DENOMINATOR_EPSILON.into(),
    );
    let sum = B::float_expand(sum, chosen.shape());
    B::float_mul_scalar(B::float_div(chosen, sum), scale.into())
}

/// Sets weight 0 and id -1 in the rows marked as padding.
fn blank<B: Backend>(
    weights: FloatTensor<B>,
    ids: IntTensor<B>,
    padding: BoolTensor<B>,
) -> (FloatTensor<B>, IntTensor<B>) {
    let shape = ids.shape();
    let padding = bool_reshape::<B>(padding, [shape[0], 1]);
    let padding = B::bool_expand(padding, shape);
    (
        B::float_mask_fill(weights, padding.clone(), 0.0.into()),
        B::int_mask_fill(ids, padding, (-1).into()),
    )
}
