//! Penalties and counts in plain tensor operations.

use super::super::layout::{BIAS, BIAS_ID, FREQUENCY, PRESENCE, PROMPT, REPETITION, WIDTH};
use super::super::params::MAX_LOGIT_BIAS;
use crate::dims::{Dims, dims_of};
use crate::reference::prelude::*;

pub(in super::super) fn apply_penalties<B: Backend>(
    logits: FloatTensor<B>,
    drafts: Option<IntTensor<B>>,
    counts: IntTensor<B>,
    floats: FloatTensor<B>,
    words: IntTensor<B>,
) -> FloatTensor<B> {
    let dtype = bool_dtype::<B>(&logits.device());
    let ([rows, columns], [lanes, _]) = (logits.dims(), counts.dims());
    let shape = Shape::new([lanes, rows / lanes, columns]);
    let logits = B::float_reshape(logits, shape.clone());
    let floats = reshape::<B>(floats, [lanes, WIDTH]);
    let parameter = |column: usize| {
        let value = slice::<B>(floats.clone(), 1, column..column + 1);
        broadcast::<B>(value, [lanes, 1, 1], shape.clone())
    };
    let logits = add_bias::<B>(logits, floats.clone(), words);

    let prompt = B::int_greater_equal_elem(counts.clone(), i64::from(PROMPT).into(), dtype);
    let prompt = bool_broadcast::<B>(prompt, [lanes, 1, columns], shape.clone());
    let counts = B::bitwise_and_scalar(counts, i64::from(PROMPT - 1).into());
    let counts = output_counts::<B>(counts, drafts, &shape);
    let output = B::int_greater_elem(counts.clone(), 0.into(), dtype);

    let repetition = parameter(REPETITION);
    let penalised = B::float_mask_where(
        B::float_mul(logits.clone(), repetition.clone()),
        B::float_greater_elem(logits.clone(), 0.0.into(), dtype),
        B::float_div(logits.clone(), repetition),
    );
    let seen = B::bool_or(prompt, output.clone());
    let logits = B::float_mask_where(logits, seen, penalised);
    let frequency = B::float_mul(
        B::int_into_float(counts, FloatDType::F32),
        parameter(FREQUENCY),
    );
    let less = B::float_sub(B::float_sub(logits.clone(), frequency), parameter(PRESENCE));
    let logits = B::float_mask_where(logits, output, less);
    reshape::<B>(logits, [rows, columns])
}

/// Adds the bias of each lane to the logits of its tokens, and leaves the others as they are.
fn add_bias<B: Backend>(
    logits: FloatTensor<B>,
    floats: FloatTensor<B>,
    words: IntTensor<B>,
) -> FloatTensor<B> {
    let device = logits.device();
    let shape = logits.shape();
    let [lanes, _, columns] = dims_of(&shape);
    let words = int_reshape::<B>(words, [lanes, WIDTH]);
    let ids = int_slice::<B>(words, 1, BIAS_ID..BIAS_ID + MAX_LOGIT_BIAS);
    let values = slice::<B>(floats, 1, BIAS..BIAS + MAX_LOGIT_BIAS);
    let (slots, used) = slots::<B>(ids, columns);
    let wide = Shape::new([lanes, columns + 1]);
    let add = IndexingUpdateOp::Add;
    let zeros = B::float_zeros(wide.clone(), &device, FloatDType::F32);
    let bias = B::float_scatter(1, zeros, slots.clone(), values, add);
    let used = B::int_scatter(1, B::int_zeros(wide, &device, INT), slots, used, add);
    let used = int_slice::<B>(used, 1, 0..columns);
    let used = B::int_greater_elem(used, 0.into(), bool_dtype::<B>(&device));
    let bias = slice::<B>(bias, 1, 0..columns);
    let one = [lanes, 1, columns];
    let used = bool_broadcast::<B>(used, one, shape.clone());
    let bias = broadcast::<B>(bias, one, shape);
    let biased = B::float_add(logits.clone(), bias);
    B::float_mask_where(logits, used, biased)
}

/// The columns of tokens, where one that is no column has a column after the last; and 1 or, for
/// those, 0.
fn slots<B: Backend>(ids: IntTensor<B>, columns: usize) -> (IntTensor<B>, IntTensor<B>) {
    let inside = are_within::<B>(ids.clone(), columns);
    let outside = B::bool_not(inside.clone());
    let slots = B::int_mask_fill(ids, outside, (columns as i64).into());
    (B::int_cast(slots, INT), B::bool_into_int(inside, INT))
}

/// Counts of each row's output: `counts`, and the drafts before the row.
fn output_counts<B: Backend>(
    counts: IntTensor<B>,
    drafts: Option<IntTensor<B>>,
    shape: &Shape,
) -> IntTensor<B> {
    let [lanes, rows, columns] = dims_of(shape);
    let mut all = vec![counts];
    for row in 1..rows {
        let drafts = drafts
            .clone()
            .expect("drafts where there are rows for them");
        let draft = int_slice::<B>(drafts, 1, row - 1..row);
        all.push(count_tokens::<B>(all[row - 1].clone(), draft));
    }
    let all = all.into_iter();
    let all = all.map(|counts| int_reshape::<B>(counts, [lanes, 1, columns]));
    B::int_cat(all.collect(), 1)
}

pub(in super::super) fn count_tokens<B: Backend>(
    counts: IntTensor<B>,
    tokens: IntTensor<B>,
) -> IntTensor<B> {
    let [lanes, columns] = counts.dims();
    let (slots, ones) = slots::<B>(tokens, columns);
    let after = B::int_zeros([lanes, 1].into(), &counts.device(), INT);
    let wide = B::int_cat(vec![counts, after], 1);
    let counted = B::int_scatter(1, wide, slots, ones, IndexingUpdateOp::Add);
    int_slice::<B>(counted, 1, 0..columns)
}
