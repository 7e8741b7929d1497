use std::ops::Range;

use crate::dims::Dims;
use crate::reference::prelude::*;

pub(super) fn rotate<B: Backend>(
    x: FloatTensor<B>,
    cos: FloatTensor<B>,
    sin: FloatTensor<B>,
) -> FloatTensor<B> {
    let [batch, positions, heads, width] = x.dims();
    let rotated = cos.shape()[2];
    let dtype: FloatDType = x.dtype().into();
    let channels = |range: Range<usize>| -> FloatTensor<B> {
        let rows = [0..batch, 0..positions, 0..heads, range];
        B::float_slice(x.clone(), &rows.map(Slice::from))
    };
    let tail = as_f32::<B>(channels(width - rotated..width));
    let shape = tail.shape();
    let pairs = Shape::new([batch, positions, heads, rotated / 2, 2]);
    let swapped = B::float_flip(B::float_reshape(tail.clone(), pairs), &[4]);
    let swapped = B::float_reshape(swapped, shape.clone());
    let of_heads = |angles: FloatTensor<B>| {
        let angles = reshape::<B>(angles, [batch, positions, 1, rotated]);
        B::float_expand(angles, shape.clone())
    };
    let output = B::float_add(
        B::float_mul(tail, of_heads(cos)),
        B::float_mul(swapped, of_heads(sin)),
    );
    let output = B::float_cast(output, dtype);
    if rotated == width {
        return output;
    }
    B::float_cat(vec![channels(0..width - rotated), output], 3)
}

pub(super) fn rotate_at<B: Backend>(
    x: FloatTensor<B>,
    angles: FloatTensor<B>,
    start: IntTensor<B>,
    inverse: bool,
) -> FloatTensor<B> {
    let [batch, count, _, _] = x.dims();
    let [known, _] = angles.dims();
    let start = B::int_cast(within::<B>(start, known), INT);
    let start = int_broadcast::<B>(start, [batch, 1], [batch, count]);
    let steps = numbers::<B>(0..count as i64, 1, [batch, count], &x.device());
    let positions = within::<B>(B::int_add(start, steps), known);
    let (cos, sin) = rotation::<B>(angles, positions, inverse);
    rotate::<B>(x, cos, sin)
}

/// Cosines and sines of `positions` (`[batch, count]`, all within the table), as [`rotate`] takes
/// them.
pub(in crate::attention) fn rotation<B: Backend>(
    angles: FloatTensor<B>,
    positions: IntTensor<B>,
    inverse: bool,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let [batch, count] = positions.dims();
    let pairs = angles.shape()[1] / 2;
    let positions = int_reshape::<B>(positions, [batch * count]);
    let angles = B::float_select(angles, 0, positions);
    let half = |range: Range<usize>| {
        let half = slice::<B>(angles.clone(), 1, range);
        reshape::<B>(half, [batch, count, pairs, 1])
    };
    let (cos, sin) = (half(0..pairs), half(pairs..2 * pairs));
    let negated = B::float_neg(sin.clone());
    let sines = if inverse {
        [sin, negated]
    } else {
        [negated, sin]
    };
    let of_channels = |of_pairs: [FloatTensor<B>; 2]| {
        let of_channels = B::float_cat(of_pairs.into(), 3);
        reshape::<B>(of_channels, [batch, count, 2 * pairs])
    };
    (of_channels([cos.clone(), cos]), of_channels(sines))
}

pub(super) fn pool<B: Backend>(values: FloatTensor<B>, scores: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = values.dtype();
    let [batch, blocks, _, width] = values.dims();
    let scores = as_f32::<B>(scores);
    let weights = B::softmax(scores, 2);
    let weighted = B::float_mul(weights, as_f32::<B>(values));
    let pooled = reshape::<B>(B::float_sum_dim(weighted, 2), [batch, blocks, width]);
    B::float_cast(pooled, dtype.into())
}
