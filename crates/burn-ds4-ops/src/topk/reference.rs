//! Top-k of rows in plain tensor operations. Generic over the backend, as these are the default
//! bodies of the operators' backend trait.

use super::args::CausalWindow;
use crate::dims::Dims;
use crate::reference::prelude::*;

pub(crate) fn top_k_ids<B: Backend>(
    logits: FloatTensor<B>,
    starts: Option<IntTensor<B>>,
    ends: Option<IntTensor<B>>,
    causal: CausalWindow,
    k: usize,
) -> IntTensor<B> {
    let device = logits.device();
    let [rows, columns] = logits.dims();
    // CubeCL devices panic on some operations without elements.
    if rows == 0 || columns == 0 {
        return B::int_full([rows, k].into(), (-1).into(), &device, INT);
    }
    let none = B::int_zeros([rows, k].into(), &device, INT);
    let shape = Shape::new([rows, columns]);
    let wide = |column: IntTensor<B>| B::int_expand(column, shape.clone());
    let starts = match starts {
        Some(starts) => bounds::<B>(starts, columns),
        None => B::int_zeros([rows, 1].into(), &device, INT),
    };
    let ends = match ends {
        Some(ends) => ends_of::<B>(ends, causal, columns),
        None => B::int_full([rows, 1].into(), (columns as i64).into(), &device, INT),
    };
    let length = B::int_clamp_min(B::int_sub(ends.clone(), starts.clone()), 0.into());
    let count = B::int_clamp_max(length, (k as i64).into());

    let dtype = bool_dtype::<B>(&device);
    let column = numbers::<B>(0..columns as i64, 1, shape.clone(), &device);
    let inside = B::bool_and(
        B::int_greater_equal(column.clone(), wide(starts.clone()), dtype),
        B::int_lower(column.clone(), wide(ends), dtype),
    );
    let values = as_f32::<B>(logits);
    let nan = B::float_is_nan(values.clone(), dtype);
    let lowest = f32::NEG_INFINITY;
    let values = B::float_mask_fill(values, nan, lowest.into());
    // Elements outside of the window rank with the lowest, which leaves the first `count` values of
    // the sorted row as they are.
    let values = B::float_mask_fill(values, B::bool_not(inside.clone()), lowest.into());

    // Only the value of the last entry is taken from the sort, as its order among equals is not
    // specified.
    let threshold = if k == 1 {
        B::float_max_dim(values.clone(), 1)
    } else {
        let last = B::int_clamp_min(B::int_sub_scalar(count.clone(), 1.into()), 0.into());
        B::float_gather(1, B::float_sort(values.clone(), 1, true), last)
    };
    let threshold = B::float_expand(threshold, shape.clone());
    let above = B::float_greater(values.clone(), threshold.clone(), dtype);
    let equal = B::bool_and(B::float_equal(values, threshold, dtype), inside);
    let ones = |mask: BoolTensor<B>| B::bool_into_int(mask, INT);
    let remaining = B::int_sub(count, B::int_sum_dim(ones(above.clone()), 1));
    let rank = B::int_cumsum(ones(equal.clone()), 1);
    let first = B::int_lower_equal(rank, wide(remaining), dtype);
    let chosen = ones(B::bool_or(above, B::bool_and(equal, first)));

    // The i-th chosen column of a row goes to slot i; the others add nothing to slot 0. Columns are
    // stored plus one, so that a slot without one becomes -1.
    let slot = B::int_sub_scalar(B::int_cumsum(chosen.clone(), 1), 1.into());
    let slot = B::int_mul(slot, chosen.clone());
    let relative = B::int_add_scalar(B::int_sub(column, wide(starts)), 1.into());
    let ids = B::int_scatter(
        1,
        none,
        slot,
        B::int_mul(relative, chosen),
        IndexingUpdateOp::Add,
    );
    B::int_sub_scalar(ids, 1.into())
}

/// Bounds clamped to a row of `columns` columns: `[rows, 1]`.
fn bounds<B: Backend>(bounds: IntTensor<B>, columns: usize) -> IntTensor<B> {
    let rows = bounds.shape()[0];
    let bounds = within::<B>(bounds, columns + 1);
    int_reshape::<B>(B::int_cast(bounds, INT), [rows, 1])
}

/// The ends of the windows of each sequence's rows, by its length: `[rows, 1]`.
fn ends_of<B: Backend>(
    lengths: IntTensor<B>,
    causal: CausalWindow,
    columns: usize,
) -> IntTensor<B> {
    let (device, batch) = (lengths.device(), lengths.shape()[0]);
    let CausalWindow {
        next_n,
        counted,
        ratio,
    } = causal;
    let shape = Shape::new([batch, next_n]);
    let lengths = bounds::<B>(lengths, causal.max_length(columns));
    let first = 1 - counted as i64;
    let token = numbers::<B>(first..first + next_n as i64, 1, shape.clone(), &device);
    let visible = B::int_add(B::int_expand(lengths, shape), token);
    let visible = B::int_clamp_min(visible, 0.into());
    let ends = B::int_div_scalar(visible, (ratio as i64).into());
    bounds::<B>(int_reshape::<B>(ends, [batch * next_n]), columns)
}

pub(super) fn top_k_values<B: Backend>(
    logits: FloatTensor<B>,
    starts: Option<IntTensor<B>>,
    ids: IntTensor<B>,
    sorted: bool,
) -> (FloatTensor<B>, IntTensor<B>) {
    let (device, dtype) = (logits.device(), FloatDType::from(logits.dtype()));
    let columns = logits.shape()[1];
    let shape = ids.shape();
    if shape[0] == 0 || columns == 0 {
        let none = f32::NEG_INFINITY.into();
        return (B::float_full(shape, none, &device, dtype), ids);
    }
    let bools = bool_dtype::<B>(&device);
    let unused = B::int_lower_elem(ids.clone(), 0.into(), bools);
    let columns_of_ids = match starts {
        Some(starts) => B::int_add(
            ids.clone(),
            B::int_expand(bounds::<B>(starts, columns), shape),
        ),
        None => ids.clone(),
    };
    let known = within::<B>(columns_of_ids, columns);
    let values = B::float_gather(1, logits, known);
    let values = B::float_mask_fill(values, unused, f32::NEG_INFINITY.into());
    if !sorted {
        return (values, ids);
    }
    let order = ranks::<B>(as_f32::<B>(values.clone()));
    let (unordered, none) = (
        (values, ids.clone()),
        B::int_zeros(ids.shape(), &device, INT),
    );
    // Scatters the position of each rank's entry: adding to zeros assigns it.
    let k = ids.shape()[1];
    let position = numbers::<B>(0..k as i64, 1, ids.shape(), &device);
    let from = B::int_scatter(1, none, order, position, IndexingUpdateOp::Add);
    (
        B::float_gather(1, unordered.0, from.clone()),
        B::int_gather(1, unordered.1, from),
    )
}

/// The number of entries that come before each one: larger ones, and equal ones at lower positions.
/// Slots without an entry come last, as they are `-inf` at the highest positions.
fn ranks<B: Backend>(values: FloatTensor<B>) -> IntTensor<B> {
    let device = values.device();
    let [rows, k] = values.dims();
    let bools = bool_dtype::<B>(&device);
    let nan = B::float_is_nan(values.clone(), bools);
    let values = B::float_mask_fill(values, nan, f32::NEG_INFINITY.into());
    let shape = Shape::new([k, k]);
    let [others, own] = [1, 0].map(|axis| numbers::<B>(0..k as i64, axis, [k, k], &device));
    let before = B::int_lower(others, own, bools);
    // Row by row, as k² comparisons of all rows at once may not fit in memory.
    let ranks = (0..rows).map(|row| {
        let row = slice::<B>(values.clone(), 0, row..row + 1);
        let others = B::float_expand(row.clone(), shape.clone());
        let own = broadcast::<B>(row, [k, 1], shape.clone());
        let larger = B::float_greater(others.clone(), own.clone(), bools);
        let equal = B::bool_and(B::float_equal(others, own, bools), before.clone());
        let first = B::bool_into_int(B::bool_or(larger, equal), INT);
        int_reshape::<B>(B::int_sum_dim(first, 1), [1, k])
    });
    B::int_cat(ranks.collect(), 0)
}
