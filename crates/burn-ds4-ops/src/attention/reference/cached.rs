//! Attention over a cache, and its new rows: every index and mask is computed here, from the sequences' starts.

use burn::backend::TensorMetadata;
use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::tensor::Shape;

use super::places::{Places, round};
use super::{INT, mask};
use crate::attention::backend::{AttentionOps, CachedBlocks, CompressedRows, NewRows, Queries};
use crate::optional::OptionalFloat;
use crate::reference::bool_dtype;

pub(in crate::attention) fn append_rows<B: AttentionOps>(
    new: NewRows<B>,
    ring: FloatTensor<B>,
) -> FloatTensor<B> {
    let [batch, count, width] = new.x.shape().dims();
    let [known, rotated] = new.angles.shape().dims();
    let places = Places::<B>::new(new.start.clone(), known);
    let rows = B::float_reshape(new.x, Shape::new([batch * count, width]));
    let rows = B::rms_norm(rows, OptionalFloat::Some(new.norm), new.epsilon);
    let rows = B::float_reshape(rows, Shape::new([batch, count, 1, width]));
    let rows = turned::<B>(rows, new.angles, new.start, false);
    let rows = B::float_reshape(rows, Shape::new([batch, count, width]));
    places.put_newest(ring, round::<B>(rows, width - rotated, new.rounding))
}

pub(in crate::attention) fn cached_attention<B: AttentionOps>(
    queries: Queries<B>,
    window: FloatTensor<B>,
    blocks: CachedBlocks<B>,
) -> FloatTensor<B> {
    let [batch, count, heads, width] = queries.x.shape().dims();
    let [_, slots, _] = window.shape().dims();
    let places = Places::<B>::new(queries.start.clone(), queries.angles.shape()[0]);

    let rows = B::float_reshape(queries.x, Shape::new([batch * count * heads, width]));
    let rows = B::rms_norm(rows, OptionalFloat::None, queries.epsilon);
    let rows = B::float_reshape(rows, Shape::new([batch, count, heads, width]));
    let (angles, start) = (queries.angles, queries.start);
    let rows = turned::<B>(rows, angles.clone(), start.clone(), false);

    let before = queries.span - 1;
    let columns = before + count;
    let window = places.at(window, places.slots(-(before as i64), columns, slots));
    // What is before the first position, or of a sequence that is not there.
    let position = places.from(places.start.clone(), columns);
    let mask_dtype = bool_dtype::<B>(&window.device());
    let hidden = B::int_lower_elem(position, (before as i64).into(), mask_dtype);
    let skipped = B::bool_expand(places.skipped.clone(), hidden.shape());
    let window_bias = mask::<B>(B::bool_or(hidden, skipped));

    let compressed = match blocks {
        CachedBlocks::None => CompressedRows::None,
        CachedBlocks::All { rows, ratio, .. } => CompressedRows::Shared {
            bias: block_bias(&places, count, rows.shape()[1], ratio),
            rows,
        },
        CachedBlocks::Picked { rows, picks, ratio } => CompressedRows::Picked {
            bias: block_bias(&places, count, rows.shape()[1], ratio),
            rows,
            picks,
        },
    };
    let output = B::sink_attention(
        rows,
        window,
        window_bias,
        compressed,
        queries.sinks,
        queries.span,
        queries.scale,
    );
    turned::<B>(output, angles, start, true)
}

/// No tensor that gets to an operator is empty: without channels that turn, there is nothing to do.
fn turned<B: AttentionOps>(
    x: FloatTensor<B>,
    angles: FloatTensor<B>,
    start: IntTensor<B>,
    inverse: bool,
) -> FloatTensor<B> {
    if angles.shape()[1] == 0 {
        return x;
    }
    B::rotate_at(x, angles, start, inverse)
}

/// Mask of rows that stand for blocks: `[batch, count, rows]`.
fn block_bias<B: AttentionOps>(
    places: &Places<B>,
    count: usize,
    rows: usize,
    ratio: usize,
) -> FloatTensor<B> {
    mask::<B>(hidden_blocks(places, count, rows, ratio))
}

/// Whether rows that stand for blocks of so many positions are hidden from new positions: `[batch, count, rows]`.
pub(super) fn hidden_blocks<B: AttentionOps>(
    places: &Places<B>,
    count: usize,
    rows: usize,
    ratio: usize,
) -> BoolTensor<B> {
    let position = places.from(places.start.clone(), count);
    let [batch, _] = position.shape().dims();
    let shape = Shape::new([batch, count, rows]);
    let mask_dtype = bool_dtype::<B>(&position.device());
    // No block that is longer than what positions can be is ever complete.
    let ratio = ratio.min(i32::MAX as usize) as i64;
    let visible = B::int_div_scalar(B::int_add_scalar(position, 1.into()), ratio.into());
    let visible = B::int_reshape(visible, Shape::new([batch, count, 1]));
    let row: IntTensor<B> = B::int_arange(0..rows as i64, &visible.device(), INT);
    let row = B::int_reshape(row, Shape::new([1, 1, rows]));
    let hidden = B::int_greater_equal(
        B::int_expand(row, shape.clone()),
        B::int_expand(visible, shape.clone()),
        mask_dtype,
    );
    let skipped = B::bool_reshape(places.skipped.clone(), Shape::new([batch, 1, 1]));
    B::bool_or(hidden, B::bool_expand(skipped, shape))
}
