//! Log-probabilities in plain tensor operations.

use crate::dims::Dims;
use crate::reference::prelude::*;

pub(in super::super) fn log_probs<B: Backend>(
    logits: FloatTensor<B>,
    ids: IntTensor<B>,
) -> FloatTensor<B> {
    let dtype = bool_dtype::<B>(&logits.device());
    let ([rows, columns], [_, count]) = (logits.dims(), ids.dims());
    let none = f32::NEG_INFINITY;
    let logits = as_f32::<B>(logits);
    let nan = B::float_is_nan(logits.clone(), dtype);
    let logits = B::float_mask_fill(logits, nan, none.into());
    let highest = B::float_max_dim(logits.clone(), 1);
    // The difference of equal infinities would be NaN.
    let differences = |x: FloatTensor<B>, columns: usize| {
        let highest = B::float_expand(highest.clone(), [rows, columns].into());
        let equal = B::float_equal(x.clone(), highest.clone(), dtype);
        B::float_mask_fill(B::float_sub(x, highest), equal, 0.0.into())
    };
    let weights = B::float_exp(differences(logits.clone(), columns));
    let total = B::float_log(B::float_sum_dim(weights, 1));

    let inside = are_within::<B>(ids.clone(), columns);
    let known = B::int_mask_fill(ids, B::bool_not(inside.clone()), 0.into());
    let logits = B::float_gather(1, logits, known);
    let possible = B::float_greater_elem(logits.clone(), none.into(), dtype);
    let total = B::float_expand(total, [rows, count].into());
    let probs = B::float_sub(differences(logits, count), total);
    let impossible = B::bool_not(B::bool_and(inside, possible));
    B::float_mask_fill(probs, impossible, none.into())
}
