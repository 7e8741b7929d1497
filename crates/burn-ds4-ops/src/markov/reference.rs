//! The drafts in plain tensor operations. Generic over the backend, as it is the default body of
//! the operator's backend trait.

use crate::dims::{Dims, dims_of};
use crate::reference::prelude::*;

pub(super) fn markov_drafts<B: Backend>(
    logits: FloatTensor<B>,
    ids: Option<IntTensor<B>>,
    tokens: IntTensor<B>,
    [embedding, output]: [FloatTensor<B>; 2],
) -> IntTensor<B> {
    let [lanes, places, columns] = logits.dims();
    let [vocabulary, _] = embedding.dims();
    let [embedding, output] = [embedding, output].map(|matrix| as_f32::<B>(matrix));
    let known = |ids| B::int_cast(within::<B>(ids, vocabulary), INT);
    let mut last = known(tokens);
    let mut drafts = Vec::new();
    for place in 0..places {
        let flat = Shape::new([lanes, columns]);
        let own = slice::<B>(logits.clone(), 1, place..place + 1);
        let own = B::float_reshape(own, flat.clone());
        let ids = ids
            .clone()
            .map(|ids| int_slice::<B>(ids, 1, place..place + 1));
        let ids = ids.map(|ids| B::int_reshape(ids, flat.clone()));
        let before = B::float_select(embedding.clone(), 0, last);
        let candidates = ids.clone().map(known);
        let bias = bias::<B>(before, output.clone(), candidates);
        let draft = best::<B>(B::float_add(own, bias), ids);
        last = known(draft.clone());
        drafts.push(int_reshape::<B>(draft, [lanes, 1]));
    }
    B::int_cat(drafts, 1)
}

/// What embeddings `[lanes, rank]` add to the logits of all tokens, or of candidates `[lanes,
/// columns]`.
fn bias<B: Backend>(
    embedded: FloatTensor<B>,
    output: FloatTensor<B>,
    candidates: Option<IntTensor<B>>,
) -> FloatTensor<B> {
    let [lanes, rank] = embedded.dims();
    let Some(candidates) = candidates else {
        return B::float_matmul(embedded, B::float_swap_dims(output, 0, 1));
    };
    let [_, columns] = candidates.dims();
    let shape = Shape::new([lanes, columns, rank]);
    let candidates = int_reshape::<B>(candidates, [lanes * columns]);
    let rows = B::float_reshape(B::float_select(output, 0, candidates), shape.clone());
    let embedded = reshape::<B>(embedded, [lanes, 1, rank]);
    let products = B::float_mul(rows, B::float_expand(embedded, shape));
    reshape::<B>(B::float_sum_dim(products, 2), [lanes, columns])
}

/// The candidate with the highest of the sums `[lanes, columns]`, of equal ones that in the lowest
/// column, -1 where there is none: `[lanes]`.
fn best<B: Backend>(sums: FloatTensor<B>, ids: Option<IntTensor<B>>) -> IntTensor<B> {
    let (device, shape) = (sums.device(), sums.shape());
    let [lanes, columns] = dims_of(&shape);
    let dtype = bool_dtype::<B>(&device);
    let nan = B::float_is_nan(sums.clone(), dtype);
    let sums = B::float_mask_fill(sums, nan, f32::NEG_INFINITY.into());
    let highest = B::float_max_dim(sums.clone(), 1);
    let none = B::float_equal_elem(highest.clone(), f32::NEG_INFINITY.into(), dtype);
    let equal = B::float_equal(sums, B::float_expand(highest, shape.clone()), dtype);
    let column = numbers::<B>(0..columns as i64, 1, shape, &device);
    let others = B::bool_not(equal);
    let column = B::int_mask_fill(column, others, (columns as i64 - 1).into());
    let column = B::int_min_dim(column, 1);
    let id = match ids {
        None => column,
        Some(ids) => B::int_gather(1, ids, column),
    };
    let id = B::int_mask_fill(id, none, (-1).into());
    int_reshape::<B>(id, [lanes])
}
