//! The two stages in plain tensor operations.

use super::args::HeadTensors;
use crate::dims::Dims;
use crate::matmul::{MatmulOps, multiply_one};
use crate::optional::OptionalInt;
use crate::reference::prelude::*;
use crate::topk::{self, CausalWindow, TopkOps};

/// The largest number below 1.
const BELOW_ONE: f32 = 1.0 - f32::EPSILON / 2.0;

pub(super) fn clusters<B: MatmulOps + TopkOps>(
    h: FloatTensor<B>,
    head: HeadTensors<B>,
    uniform: Option<FloatTensor<B>>,
    probes: usize,
    temperature: f64,
) -> IntTensor<B> {
    let (tokens, clusters) = (h.shape()[0], head.ids.shape()[0]);
    if probes == clusters {
        let all = int_reshape::<B>(head.clusters, [1, clusters]);
        return B::int_expand(all, [tokens, clusters].into());
    }
    let mut scores = multiply_one::<B>(h, head.centroids, FloatDType::F32);
    if let Some(uniform) = uniform {
        let norms = reshape::<B>(head.norms, [1, clusters]);
        let norms = B::float_expand(norms, [tokens, clusters].into());
        let scaled = B::float_div_scalar(B::float_mul(scores, norms), temperature.into());
        scores = B::float_add(scaled, gumbel::<B>(uniform));
    }
    if probes <= topk::MAX_K {
        B::top_k_ids(
            scores,
            OptionalInt::None,
            OptionalInt::None,
            CausalWindow::ONE,
            probes,
        )
    } else {
        topk::reference::top_k_ids::<B>(scores, None, None, CausalWindow::ONE, probes)
    }
}

/// `-ln(-ln(u))`.
fn gumbel<B: Backend>(uniform: FloatTensor<B>) -> FloatTensor<B> {
    let mask_dtype = bool_dtype::<B>(&uniform.device());
    let u = B::float_clamp(uniform, f32::MIN_POSITIVE.into(), BELOW_ONE.into());
    let upper = B::float_greater_elem(u.clone(), 0.5.into(), mask_dtype);
    // Close to 1, a device's logarithm may have no correct digit left, and even be 0; -ln(u) is
    // also log1p((1 - u) / u).
    let left = B::float_add_scalar(B::float_neg(u.clone()), 1.0.into());
    let quotient = B::float_clamp_max(B::float_div(left, u.clone()), 1.0.into());
    let exponential = B::float_neg(B::float_log(u));
    let exponential = B::float_mask_where(exponential, upper, log1p::<B>(quotient));
    B::float_neg(B::float_log(exponential))
}

pub(super) fn candidates<B: MatmulOps>(
    h: FloatTensor<B>,
    head: HeadTensors<B>,
    special: Option<IntTensor<B>>,
    chosen: IntTensor<B>,
) -> (IntTensor<B>, FloatTensor<B>) {
    let device = h.device();
    let mask_dtype = bool_dtype::<B>(&device);
    let tokens = h.shape()[0];
    let [clusters, capacity] = head.ids.dims();
    let probes = chosen.shape()[1];
    let all_ids = int_reshape::<B>(head.ids, [clusters * capacity]);
    let ids_of = |rows: IntTensor<B>| {
        let shape = rows.shape();
        let rows = int_reshape::<B>(rows, [shape.num_elements()]);
        B::int_reshape(B::int_select(all_ids.clone(), 0, rows), shape)
    };

    let shape = [tokens, probes, capacity];
    let first = B::int_mul_scalar(chosen.clone(), (capacity as i64).into());
    let first = int_broadcast::<B>(first, [tokens, probes, 1], shape);
    let rows = B::int_add(first, numbers::<B>(0..capacity as i64, 2, shape, &device));
    let mut rows = int_reshape::<B>(rows, [tokens, probes * capacity]);
    let mut ids = ids_of(rows.clone());
    if let Some(special) = special {
        let count = special.shape()[0];
        let own = int_broadcast::<B>(special, [1, count], [tokens, count]);
        let pairs = Shape::new([tokens, probes, count]);
        let cluster = B::int_div_scalar(own.clone(), (capacity as i64).into());
        let cluster = int_reshape::<B>(cluster, [tokens, 1, count]);
        let chosen = int_reshape::<B>(chosen, [tokens, probes, 1]);
        let same = B::int_equal(
            B::int_expand(chosen, pairs.clone()),
            B::int_expand(cluster, pairs),
            mask_dtype,
        );
        let times = B::int_sum_dim(B::bool_into_int(same, INT), 1);
        let times = int_reshape::<B>(times, [tokens, count]);
        let twice = B::int_greater_elem(times, 0.into(), mask_dtype);
        let own_ids = B::int_mask_fill(ids_of(own.clone()), twice, (-1).into());
        rows = B::int_cat(vec![rows, own], 1);
        ids = B::int_cat(vec![ids, own_ids], 1);
    }

    let count = rows.shape()[1];
    let logits = (0..tokens).map(|token| {
        let h = slice::<B>(h.clone(), 0, token..token + 1);
        let rows = int_slice::<B>(rows.clone(), 0, token..token + 1);
        let rows = int_reshape::<B>(rows, [count]);
        let weight = B::float_select(head.weight.clone(), 0, rows);
        multiply_one::<B>(h, weight, FloatDType::F32)
    });
    let logits = B::float_cat(logits.collect(), 0);
    let padding = B::int_lower_elem(ids.clone(), 0.into(), mask_dtype);
    let logits = B::float_mask_fill(logits, padding, f32::NEG_INFINITY.into());
    (ids, logits)
}

pub(super) fn argmax<B: MatmulOps>(
    h: FloatTensor<B>,
    head: HeadTensors<B>,
    special: Option<IntTensor<B>>,
    chosen: IntTensor<B>,
) -> IntTensor<B> {
    let tokens = h.shape()[0];
    let (ids, logits) = candidates::<B>(h, head, special, chosen);
    let mask_dtype = bool_dtype::<B>(&ids.device());
    let nan = B::float_is_nan(logits.clone(), mask_dtype);
    let lowest = f32::NEG_INFINITY;
    // Padding has that logit, too.
    let values = B::float_mask_fill(logits, nan, lowest.into());
    let best = B::float_expand(B::float_max_dim(values.clone(), 1), values.shape());
    let none = B::float_equal_elem(values.clone(), lowest.into(), mask_dtype);
    let best = B::float_equal(values, best, mask_dtype);
    let refused = B::bool_or(B::bool_not(best), none);
    let winner = B::int_min_dim(B::int_mask_fill(ids, refused, i32::MAX.into()), 1);
    let none = B::int_equal_elem(winner.clone(), i32::MAX.into(), mask_dtype);
    let winner = B::int_mask_fill(winner, none, (-1).into());
    int_reshape::<B>(winner, [tokens])
}

pub(super) fn logits<B: MatmulOps>(
    h: FloatTensor<B>,
    head: HeadTensors<B>,
    special: Option<IntTensor<B>>,
    chosen: IntTensor<B>,
    vocabulary: usize,
) -> FloatTensor<B> {
    let (tokens, device) = (h.shape()[0], h.device());
    let (ids, logits) = candidates::<B>(h, head, special, chosen);
    let number = ids.shape().num_elements();
    // Padding goes to a column of its own, after those of the vocabulary.
    let columns = vocabulary + 1;
    let padding = B::int_lower_elem(ids.clone(), 0.into(), bool_dtype::<B>(&device));
    let ids = B::int_mask_fill(ids, padding, (vocabulary as i64).into());
    let first = numbers::<B>(0..tokens as i64, 0, ids.shape(), &device);
    let first = B::int_mul_scalar(first, (columns as i64).into());
    let places = int_reshape::<B>(B::int_add(ids, first), [number]);
    let none = f32::NEG_INFINITY.into();
    let all = B::float_full([tokens * columns].into(), none, &device, FloatDType::F32);
    let logits = reshape::<B>(logits, [number]);
    let all = B::float_select_assign(all, 0, places, logits, IndexingUpdateOp::Assign);
    let all = reshape::<B>(all, [tokens, columns]);
    slice::<B>(all, 1, 0..vocabulary)
}
