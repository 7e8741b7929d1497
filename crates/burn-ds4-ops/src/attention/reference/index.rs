//! Scores of the lightning indexer.

use super::positions::{NewPositions, hidden_blocks};
use crate::attention::args::{BlockVisibility, IndexInputs};
use crate::attention::options::{DECODE_TOKENS, MASKED};
use crate::dims::Dims;
use crate::matmul::MatmulOps;
use crate::reference::prelude::*;

/// Scores queries as they are.
pub(in crate::attention) fn index_scores<B: MatmulOps>(inputs: IndexInputs<B>) -> FloatTensor<B> {
    let scores = all_scores::<B>(inputs.queries, inputs.keys.in_order(), inputs.weights);
    let scores = B::float_mul_scalar(scores, inputs.scale.into());
    let BlockVisibility::From { start, ratio } = inputs.visibility else {
        return scores;
    };
    let [_, count, rows] = scores.dims();
    let positions = NewPositions::new(start, scored_positions(count));
    let hidden = hidden_blocks::<B>(&positions, count, rows, ratio);
    B::float_mask_fill(scores, hidden, MASKED.into())
}

/// So many that every position fits i32.
pub(super) fn scored_positions(count: usize) -> usize {
    i32::MAX as usize - count
}

fn all_scores<B: MatmulOps>(
    queries: FloatTensor<B>,
    keys: FloatTensor<B>,
    weights: FloatTensor<B>,
) -> FloatTensor<B> {
    let [batch, count, _, _] = queries.dims();
    let queries = as_f32::<B>(queries);
    let keys = B::float_swap_dims(as_f32::<B>(keys), 1, 2);
    if batch * count > DECODE_TOKENS {
        return scores_at_once::<B>(queries, keys, weights);
    }
    let scores = (0..count).map(|query| {
        let query = query..query + 1;
        let queries = slice::<B>(queries.clone(), 1, query.clone());
        scores_at_once::<B>(queries, keys.clone(), slice::<B>(weights.clone(), 1, query))
    });
    B::float_cat(scores.collect(), 1)
}

/// Scores all queries together, with keys `[batch, width, rows]`.
fn scores_at_once<B: MatmulOps>(
    queries: FloatTensor<B>,
    keys: FloatTensor<B>,
    weights: FloatTensor<B>,
) -> FloatTensor<B> {
    let [batch, count, heads, width] = queries.dims();
    let [_, _, rows] = keys.dims();
    let queries = reshape::<B>(queries, [batch, count * heads, width]);
    let dots = B::relu(B::precise_matmul(queries, keys));
    let dots = reshape::<B>(dots, [batch * count, heads, rows]);
    let weights = reshape::<B>(weights, [batch * count, 1, heads]);
    let scores = B::precise_matmul(weights, dots);
    reshape::<B>(scores, [batch, count, rows])
}
