//! Log-probabilities in plain tensor operations.

use crate::reference::prelude::*;

pub(in super::super) fn log_probs<B: Backend>(
    logits: FloatTensor<B>,
    ids: IntTensor<B>,
) -> FloatTensor<B> {
    let dtype = bool_dtype::<B>(&logits.device());
    let ([rows, columns], [_, count]) = (logits.shape().dims(), ids.shape().dims());
    let none = f32::NEG_INFINITY;
    let logits = B::float_cast(logits, FloatDType::F32);
    let nan = B::float_is_nan(logits.clone(), dtype);
    let logits = B::float_mask_fill(logits, nan, none.into());
    let highest = B::float_max_dim(logits.clone(), 1);
    // The difference of equal infinities would be NaN.
    let differences = |x: FloatTensor<B>, columns: usize| {
        let highest = B::float_expand(highest.clone(), Shape::new([rows, columns]));
        let equal = B::float_equal(x.clone(), highest.clone(), dtype);
        B::float_mask_fill(B::float_sub(x, highest), equal, 0.0.into())
    };
    let weights = B::float_exp(differences(logits.clone(), columns));
    let total = B::float_log(B::float_sum_dim(weights, 1));

    let inside = B::bool_and(
        B::int_greater_equal_elem(ids.clone(), 0.into(), dtype),
        B::int_lower_elem(ids.clone(), (columns as i64).into(), dtype),
    );
    let within = B::int_mask_fill(ids, B::bool_not(inside.clone()), 0.into());
    let logits = B::float_gather(1, logits, within);
    let possible = B::float_greater_elem(logits.clone(), none.into(), dtype);
    let total = B::float_expand(total, Shape::new([rows, count]));
    let probs = B::float_sub(differences(logits, count), total);
    let impossible = B::bool_not(B::bool_and(inside, possible));
    B::float_mask_fill(probs, impossible, none.into())
}
