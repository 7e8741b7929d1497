//! Experts in plain tensor operations. Generic over the backend, as it is the default body of the
//! operators' backend trait.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};
#[cfg(feature = "flex")]
use burn::tensor::{IndexingUpdateOp, TensorData, read_sync};

use super::args::PackedExperts;
use super::backend::MoeOps;
use crate::dims::Dims;
#[cfg(feature = "flex")]
use crate::quant::{Activations, linear};
use crate::quant::{PackedWeights, QuantOps};
use crate::reference::{INT, bool_dtype, slice, within};
use crate::roundtrip::SmallFloat;

/// (token, slot) pairs whose matrices are decoded at once: a bound on the memory for them.
const MAX_GATHERED_PAIRS: usize = 48;

pub(super) fn swiglu<B: Backend>(
    gate: FloatTensor<B>,
    up: FloatTensor<B>,
    limit: f64,
) -> FloatTensor<B> {
    let (gate, up) = if limit == f64::INFINITY {
        (gate, up)
    } else {
        (
            B::float_clamp_max(gate, limit.into()),
            B::float_clamp(up, (-limit).into(), limit.into()),
        )
    };
    let silu = B::float_mul(gate.clone(), B::sigmoid(gate));
    B::float_mul(silu, up)
}

/// Gathers the two matrices of every (token, slot) pair on the device. Reads nothing back.
pub(super) fn gathered<B: QuantOps>(
    x: FloatTensor<B>,
    ids: IntTensor<B>,
    weights: FloatTensor<B>,
    experts: PackedExperts<B>,
) -> FloatTensor<B> {
    let [tokens, d] = x.dims();
    let [_, k] = ids.dims();
    let [count, _, _] = experts.gate_up.dims();
    let pairs = tokens * k;
    // An id out of range is clamped to one that can be read, and its output is dropped: as a
    // product with a weight of zero, it would let an infinity through.
    let known = within::<B>(ids.clone(), count);
    let padding = B::int_not_equal(known.clone(), ids.clone(), bool_dtype::<B>(&ids.device()));
    let ids = B::int_reshape(B::int_cast(known, INT), Shape::new([pairs]));
    let x = B::float_reshape(x, Shape::new([tokens, 1, d]));
    let x = B::float_expand(x, Shape::new([tokens, k, d]));
    let x = B::float_reshape(x, Shape::new([pairs, d]));
    let weights = B::float_reshape(weights, Shape::new([pairs, 1]));

    let mut outputs = Vec::new();
    for first in (0..pairs).step_by(MAX_GATHERED_PAIRS) {
        let range = first..pairs.min(first + MAX_GATHERED_PAIRS);
        let ids = B::int_slice(ids.clone(), &[range.clone().into()]);
        let x = slice::<B>(x.clone(), 0, range.clone());
        let weights = slice::<B>(weights.clone(), 0, range);
        let hidden = multiply::<B>(&experts.gate_up, ids.clone(), x.clone());
        let hidden = hidden_layer::<B>(hidden, weights, &experts, x.dtype().into());
        outputs.push(multiply::<B>(&experts.down, ids, hidden));
    }
    let outputs = B::float_cast(B::float_cat(outputs, 0), FloatDType::F32);
    let padding = B::bool_expand(
        B::bool_reshape(padding, Shape::new([pairs, 1])),
        Shape::new([pairs, d]),
    );
    sum_slots::<B>(B::float_mask_fill(outputs, padding, 0.0.into()), tokens)
}

/// Adds the shared expert's output to that of the routed ones, rounded to the dtype of `x`. Every
/// token has it with weight 1.
pub(super) fn mixture<B: MoeOps>(
    x: FloatTensor<B>,
    ids: IntTensor<B>,
    weights: FloatTensor<B>,
    routed: PackedExperts<B>,
    shared: PackedExperts<B>,
) -> FloatTensor<B> {
    let routed = B::expert_ffn(x.clone(), ids, weights, routed);
    let (dtype, device) = (x.dtype().into(), x.device());
    let [tokens, _] = x.dims();
    let to_first = B::int_zeros(Shape::new([tokens, 1]), &device, INT);
    let weights = B::float_ones(Shape::new([tokens, 1]), &device, FloatDType::F32);
    let shared = B::expert_ffn(x, to_first, weights, shared);
    B::float_cast(B::float_add(routed, shared), dtype)
}

/// Multiplies the matrix at each of `ids` by the corresponding row of `x`.
fn multiply<B: QuantOps>(
    matrices: &PackedWeights<B>,
    ids: IntTensor<B>,
    x: FloatTensor<B>,
) -> FloatTensor<B> {
    let [_, out, _] = matrices.dims();
    let [pairs, columns] = x.dims();
    let matrices = B::dequantize_weights(matrices.select(ids), x.dtype().into());
    let x = B::float_reshape(x, Shape::new([pairs, columns, 1]));
    let products = B::precise_matmul(matrices, x);
    B::float_reshape(products, Shape::new([pairs, out]))
}

/// Reads the ids, so that every matrix in use is decoded once and multiplied by all its rows at
/// once.
#[cfg(feature = "flex")]
pub(super) fn grouped<B: QuantOps>(
    x: FloatTensor<B>,
    ids: IntTensor<B>,
    weights: FloatTensor<B>,
    experts: PackedExperts<B>,
) -> FloatTensor<B> {
    let device = x.device();
    let dtype: FloatDType = x.dtype().into();
    let [tokens, d] = x.dims();
    let [_, k] = ids.dims();
    let [count, _, _] = experts.gate_up.dims();

    let ids = read_sync(B::int_into_data(ids)).expect("ids that can be read");
    let mut pairs_of = vec![Vec::new(); count];
    for (pair, id) in ids.iter::<i64>().enumerate() {
        // An id out of range is padding.
        if let Some(pairs) = usize::try_from(id).ok().and_then(|id| pairs_of.get_mut(id)) {
            pairs.push(pair as i32);
        }
    }
    let order: Vec<i32> = pairs_of.concat();
    let nothing = B::float_zeros(Shape::new([tokens * k, d]), &device, FloatDType::F32);
    if order.is_empty() {
        return sum_slots::<B>(nothing, tokens);
    }
    // Bring the pairs of one expert together, so that all experts share every operation but the
    // matrix products.
    let indices = |indices: Vec<i32>| {
        let length = indices.len();
        B::int_from_data(TensorData::new(indices, [length]), &device)
    };
    let rows = indices(order.iter().map(|pair| pair / k as i32).collect());
    let pairs = indices(order);
    let hidden = per_expert::<B>(B::float_select(x, 0, rows), &pairs_of, &experts.gate_up);
    let weights = B::float_reshape(weights, Shape::new([tokens * k, 1]));
    let weights = B::float_select(weights, 0, pairs.clone());
    let hidden = hidden_layer::<B>(hidden, weights, &experts, dtype);
    let outputs = per_expert::<B>(hidden, &pairs_of, &experts.down);
    let outputs = B::float_cast(outputs, FloatDType::F32);
    // Back to one row per (token, slot), so that the sum over slots has a fixed order.
    let outputs = B::float_select_assign(nothing, 0, pairs, outputs, IndexingUpdateOp::Assign);
    sum_slots::<B>(outputs, tokens)
}

/// Multiplies the rows of `x`, which are ordered by expert, by the matrices of their experts.
#[cfg(feature = "flex")]
fn per_expert<B: QuantOps>(
    x: FloatTensor<B>,
    pairs_of: &[Vec<i32>],
    matrices: &PackedWeights<B>,
) -> FloatTensor<B> {
    let mut from = 0;
    let mut outputs = Vec::new();
    for (expert, pairs) in pairs_of.iter().enumerate() {
        if !pairs.is_empty() {
            let to = from + pairs.len();
            let rows = slice::<B>(x.clone(), 0, from..to);
            let exact = Activations::Exact;
            outputs.push(linear::<B>(rows, matrices.one(expert), exact));
            from = to;
        }
    }
    B::float_cat(outputs, 0)
}

/// Splits the gate-up projection, applies the activation in f32 and the routing weight. The result
/// is rounded to `dtype`, and to FP8 if these experts do that.
fn hidden_layer<B: QuantOps>(
    gate_up: FloatTensor<B>,
    weights: FloatTensor<B>,
    experts: &PackedExperts<B>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let [_, width] = gate_up.dims();
    let gate_up = B::float_cast(gate_up, FloatDType::F32);
    let gate = slice::<B>(gate_up.clone(), 1, 0..width / 2);
    let up = slice::<B>(gate_up, 1, width / 2..width);
    let hidden = swiglu::<B>(gate, up, experts.limit);
    let weights = B::float_expand(weights, hidden.shape());
    let hidden = B::float_cast(B::float_mul(hidden, weights), dtype);
    match experts.rounded {
        Some(block) => B::roundtrip(hidden, block, SmallFloat::Fp8),
        None => hidden,
    }
}

/// Sums `[tokens · k, d]` over the `k` slots of a token.
fn sum_slots<B: Backend>(outputs: FloatTensor<B>, tokens: usize) -> FloatTensor<B> {
    let [pairs, d] = outputs.dims();
    let outputs = B::float_reshape(outputs, Shape::new([tokens, pairs / tokens, d]));
    B::float_reshape(B::float_sum_dim(outputs, 1), Shape::new([tokens, d]))
}
