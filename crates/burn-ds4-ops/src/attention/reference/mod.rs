//! Attention in plain tensor operations.
//!
//! Everything that has a kernel is generic over the backend, as it is the default body of the
//! operators' backend trait. Up to [`DECODE_TOKENS`] tokens are computed one at a time, since a
//! matrix product or a sum of more of them may be partitioned, and rounded, differently.

#[cfg(feature = "flex")]
mod by_query;
mod cached;
mod compress;
mod positions;
mod step;

use std::ops::Range;

use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, IntDType, Shape, Slice};

use super::backend::{AttentionOps, BlockVisibility, CompressedRows};
use super::{DECODE_TOKENS, HIDDEN_BELOW, MASKED, TINY};
use crate::matmul::MatmulOps;
use crate::reference::{bool_dtype, ranges, slice};
#[cfg(feature = "flex")]
pub(super) use by_query::{cached_attention_by_query, index_scores_by_query};
use cached::hidden_blocks;
pub(super) use cached::{append_rows, cached_attention};
pub(super) use compress::compress_rows;
use positions::{NewPositions, flat};
pub(super) use step::store_step;

/// The dtype of positions and picks.
const INT: IntDType = IntDType::I32;

pub(super) fn rotate<B: Backend>(
    x: FloatTensor<B>,
    cos: FloatTensor<B>,
    sin: FloatTensor<B>,
) -> FloatTensor<B> {
    let [batch, positions, heads, width] = x.shape().dims();
    let rotated = cos.shape()[2];
    let dtype: FloatDType = x.dtype().into();
    let channels = |range: std::ops::Range<usize>| -> FloatTensor<B> {
        let rows = [0..batch, 0..positions, 0..heads, range];
        B::float_slice(x.clone(), &rows.map(Slice::from))
    };
    let tail = B::float_cast(channels(width - rotated..width), FloatDType::F32);
    let shape = tail.shape();
    let pairs = Shape::new([batch, positions, heads, rotated / 2, 2]);
    let swapped = B::float_flip(B::float_reshape(tail.clone(), pairs), &[4]);
    let swapped = B::float_reshape(swapped, shape.clone());
    let of_heads = |angles: FloatTensor<B>| {
        let angles = B::float_reshape(angles, Shape::new([batch, positions, 1, rotated]));
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

pub(super) fn rotate_at<B: AttentionOps>(
    x: FloatTensor<B>,
    angles: FloatTensor<B>,
    start: IntTensor<B>,
    inverse: bool,
) -> FloatTensor<B> {
    let [batch, count, _, _] = x.shape().dims();
    let [known, _] = angles.shape().dims();
    let last = known as i64 - 1;
    // Clamped in its own dtype: a cast could bring a start that is out of range into the range.
    let start = B::int_cast(B::int_clamp(start, 0.into(), last.into()), INT);
    let steps = B::int_arange(0..count as i64, &x.device(), INT);
    let shape = Shape::new([batch, count]);
    let positions = B::int_add(
        B::int_expand(B::int_reshape(start, Shape::new([batch, 1])), shape.clone()),
        B::int_expand(B::int_reshape(steps, Shape::new([1, count])), shape),
    );
    let positions = B::int_clamp_max(positions, last.into());
    let (cos, sin) = rotation::<B>(angles, positions, inverse);
    B::rotate(x, cos, sin)
}

/// Cosines and sines of `positions` (`[batch, count]`, all within the table), as [`rotate`] takes
/// them.
fn rotation<B: Backend>(
    angles: FloatTensor<B>,
    positions: IntTensor<B>,
    inverse: bool,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let [batch, count] = positions.shape().dims();
    let pairs = angles.shape()[1] / 2;
    let positions = B::int_reshape(positions, Shape::new([batch * count]));
    let angles = B::float_select(angles, 0, positions);
    let half = |range: Range<usize>| {
        let half = slice::<B>(angles.clone(), 1, range);
        B::float_reshape(half, Shape::new([batch, count, pairs, 1]))
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
        B::float_reshape(of_channels, Shape::new([batch, count, 2 * pairs]))
    };
    (of_channels([cos.clone(), cos]), of_channels(sines))
}

pub(super) fn pool<B: Backend>(values: FloatTensor<B>, scores: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = values.dtype();
    let [batch, blocks, _, width] = values.shape().dims();
    let scores = B::float_cast(scores, FloatDType::F32);
    let weights = B::softmax(scores, 2);
    let weighted = B::float_mul(weights, B::float_cast(values, FloatDType::F32));
    let pooled = B::float_reshape(
        B::float_sum_dim(weighted, 2),
        Shape::new([batch, blocks, width]),
    );
    B::float_cast(pooled, dtype.into())
}

pub(super) fn index_scores<B: AttentionOps>(
    queries: FloatTensor<B>,
    keys: FloatTensor<B>,
    weights: FloatTensor<B>,
    scale: f64,
    visibility: BlockVisibility<B>,
) -> FloatTensor<B> {
    let scores = all_scores::<B>(queries, keys, weights);
    let scores = B::float_mul_scalar(scores, scale.into());
    let BlockVisibility::From { start, ratio } = visibility else {
        return scores;
    };
    let [_, count, rows] = scores.shape().dims();
    let positions = NewPositions::new(start, scored_positions(count));
    let hidden = hidden_blocks::<B>(&positions, count, rows, ratio);
    B::float_mask_fill(scores, hidden, MASKED.into())
}

/// So many that every position fits i32.
fn scored_positions(count: usize) -> usize {
    i32::MAX as usize - count
}

fn all_scores<B: MatmulOps>(
    queries: FloatTensor<B>,
    keys: FloatTensor<B>,
    weights: FloatTensor<B>,
) -> FloatTensor<B> {
    let [batch, count, _, _] = queries.shape().dims();
    let queries = B::float_cast(queries, FloatDType::F32);
    let keys = B::float_swap_dims(B::float_cast(keys, FloatDType::F32), 1, 2);
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
    let [batch, count, heads, width] = queries.shape().dims();
    let [_, _, rows] = keys.shape().dims();
    let queries = B::float_reshape(queries, Shape::new([batch, count * heads, width]));
    let dots = B::relu(B::precise_matmul(queries, keys));
    let dots = B::float_reshape(dots, Shape::new([batch * count, heads, rows]));
    let weights = B::float_reshape(weights, Shape::new([batch * count, 1, heads]));
    let scores = B::precise_matmul(weights, dots);
    B::float_reshape(scores, Shape::new([batch, count, rows]))
}

/// Elements of picked rows that are gathered at the same time, at most, unless one query has more.
const MAX_GATHERED: usize = 1 << 27;

/// The inputs of [`sink_attention`](super::sink_attention).
#[derive(Clone)]
pub(super) struct SinkInputs<B: Backend> {
    pub queries: FloatTensor<B>,
    pub window: FloatTensor<B>,
    pub window_bias: FloatTensor<B>,
    pub compressed: CompressedRows<B>,
    pub sinks: FloatTensor<B>,
    pub span: usize,
    pub scale: f64,
}

/// The compressed rows that a group of queries attends to. A group is a sequence, or a single query
/// with rows of its own.
struct SelectedRows<B: Backend> {
    /// `[groups, rows, width]`.
    rows: FloatTensor<B>,
    /// `[batch, count, rows]`.
    bias: FloatTensor<B>,
}

impl<B: MatmulOps> SinkInputs<B> {
    pub(super) fn output(self) -> FloatTensor<B> {
        let [batch, count, _, _] = self.queries.shape().dims();
        let many = batch * count > DECODE_TOKENS;
        let most = if many { self.gathered_queries() } else { 1 };
        if many && count <= most {
            return self.attend();
        }
        let firsts = (0..count).step_by(most);
        let outputs = firsts.map(|first| self.some(first..count.min(first + most)).attend());
        B::float_cat(outputs.collect(), 1)
    }

    /// Queries of each sequence whose picked rows can be gathered at the same time.
    fn gathered_queries(&self) -> usize {
        let CompressedRows::Picked { rows, picks, .. } = &self.compressed else {
            return usize::MAX;
        };
        let ([batch, _, width], [_, _, number]) = (rows.shape().dims(), picks.shape().dims());
        (MAX_GATHERED / (batch * number * width)).max(1)
    }

    /// The inputs of some queries of each sequence, with the part of the window in their spans.
    fn some(&self, own: Range<usize>) -> Self {
        let [_, columns, _] = self.window.shape().dims();
        let [_, count, _, _] = self.queries.shape().dims();
        let first = columns + 1 - count - self.span + own.start;
        let in_span = first..first + self.span + own.len() - 1;
        let one = |tensor: &FloatTensor<B>| slice::<B>(tensor.clone(), 1, own.clone());
        Self {
            queries: one(&self.queries),
            window: slice::<B>(self.window.clone(), 1, in_span.clone()),
            window_bias: slice::<B>(self.window_bias.clone(), 1, in_span),
            compressed: match &self.compressed {
                CompressedRows::None => CompressedRows::None,
                CompressedRows::Shared { rows, bias } => CompressedRows::Shared {
                    rows: rows.clone(),
                    bias: one(bias),
                },
                CompressedRows::Picked { rows, bias, picks } => CompressedRows::Picked {
                    rows: rows.clone(),
                    bias: one(bias),
                    picks: B::int_slice(picks.clone(), &ranges(&picks.shape(), 1, own.clone())),
                },
            },
            sinks: self.sinks.clone(),
            ..*self
        }
    }

    fn attend(self) -> FloatTensor<B> {
        let [batch, count, heads, width] = self.queries.shape().dims();
        let dtype = self.queries.dtype();
        let [_, columns, _] = self.window.shape().dims();
        let selected = self.selected();
        let probabilities = self.softmax(&selected);
        let values = |range: Range<usize>, rows: FloatTensor<B>| {
            let groups = rows.shape()[0];
            let shape = [groups, batch * count / groups * heads, range.len()];
            let part = B::float_cast(
                slice::<B>(probabilities.clone(), 3, range),
                FloatDType::from(dtype),
            );
            let part = B::float_reshape(part, Shape::new(shape));
            B::float_reshape(
                B::precise_matmul(part, rows),
                Shape::new([batch, count, heads, width]),
            )
        };
        let output = values(0..columns, self.window.clone());
        match selected {
            None => output,
            Some(selected) => {
                let more = selected.rows.shape()[1];
                B::float_add(output, values(columns..columns + more, selected.rows))
            }
        }
    }

    pub(super) fn probabilities(self) -> FloatTensor<B> {
        self.softmax(&self.selected())
    }

    /// The weights of the window's columns and of the compressed ones: `[batch, count, heads,
    /// columns]`.
    fn softmax(&self, selected: &Option<SelectedRows<B>>) -> FloatTensor<B> {
        let [batch, count, heads, _] = self.queries.shape().dims();
        let [_, columns, _] = self.window.shape().dims();
        let bias = B::float_reshape(self.window_bias.clone(), Shape::new([batch, 1, 1, columns]));
        let mut all = self.logits(self.window.clone());
        all = B::float_add(all.clone(), B::float_expand(bias, all.shape()));
        if columns > self.span {
            let band = B::float_reshape(self.band(), Shape::new([1, count, 1, columns]));
            all = B::float_add(all.clone(), B::float_expand(band, all.shape()));
        }
        if let Some(SelectedRows { rows, bias }) = selected {
            let logits = self.logits(rows.clone());
            let bias = B::float_reshape(
                bias.clone(),
                Shape::new([batch, count, 1, logits.shape()[3]]),
            );
            let bias = B::float_expand(bias, logits.shape());
            all = B::float_cat(vec![all, B::float_add(logits, bias)], 3);
        }

        let single = Shape::new([batch, count, heads, 1]);
        let sinks = B::float_clamp_min(self.sinks.clone(), MASKED.into());
        let sinks = B::float_reshape(sinks, Shape::new([1, 1, heads, 1]));
        let sinks = B::float_expand(sinks, single);
        let maximum = B::float_clamp_min(B::float_max_dim(all.clone(), 3), HIDDEN_BELOW.into());
        let mask_dtype = bool_dtype::<B>(&all.device());
        let below = B::float_lower(maximum.clone(), sinks.clone(), mask_dtype);
        let maximum = B::float_mask_where(maximum, below, sinks.clone());
        let shape = all.shape();
        let distances = B::float_sub(all, B::float_expand(maximum.clone(), shape.clone()));
        let exponentials = B::float_exp(distances);
        let sink = B::float_exp(B::float_sub(sinks, maximum));
        let sum = B::float_add(B::float_sum_dim(exponentials.clone(), 3), sink);
        let sum = B::float_clamp_min(sum, TINY.into());
        B::float_div(exponentials, B::float_expand(sum, shape))
    }

    /// Logits of all queries with rows of `[groups, columns, width]`, in f32: `[batch, count,
    /// heads, columns]`.
    fn logits(&self, rows: FloatTensor<B>) -> FloatTensor<B> {
        let [batch, count, heads, width] = self.queries.shape().dims();
        let [groups, columns, _] = rows.shape().dims();
        let queries = B::float_reshape(
            self.queries.clone(),
            Shape::new([groups, batch * count / groups * heads, width]),
        );
        let dots = B::precise_matmul(queries, B::float_swap_dims(rows, 1, 2));
        let dots = B::float_cast(dots, FloatDType::F32);
        let dots = B::float_reshape(dots, Shape::new([batch, count, heads, columns]));
        B::float_mul_scalar(dots, self.scale.into())
    }

    /// The mask of columns outside a query's span: `[count, columns]`.
    fn band(&self) -> FloatTensor<B> {
        let device = self.queries.device();
        let [_, count, _, _] = self.queries.shape().dims();
        let [_, columns, _] = self.window.shape().dims();
        let first = (columns + 1 - count - self.span) as i64;
        let shape = Shape::new([count, columns]);
        let column = B::int_arange(0..columns as i64, &device, INT);
        let column = B::int_reshape(column, Shape::new([1, columns]));
        let start = B::int_arange(first..first + count as i64, &device, INT);
        let start = B::int_reshape(start, Shape::new([count, 1]));
        let distance = B::int_sub(
            B::int_expand(column, shape.clone()),
            B::int_expand(start, shape),
        );
        let mask_dtype = bool_dtype::<B>(&device);
        let before = B::int_lower_elem(distance.clone(), 0.into(), mask_dtype);
        let after = B::int_greater_equal_elem(distance, (self.span as i64).into(), mask_dtype);
        mask::<B>(B::bool_or(before, after))
    }

    fn selected(&self) -> Option<SelectedRows<B>> {
        let (rows, bias, picks) = match self.compressed.clone() {
            CompressedRows::None => return None,
            CompressedRows::Shared { rows, bias } => return Some(SelectedRows { rows, bias }),
            CompressedRows::Picked { rows, bias, picks } => (rows, bias, picks),
        };
        let device = rows.device();
        let [batch, available, width] = rows.shape().dims();
        let [_, count, number] = picks.shape().dims();
        // Clamped in their own dtype: a cast could bring a pick that is out of range into the
        // range.
        let known = B::int_clamp(picks.clone(), 0.into(), (available as i64 - 1).into());
        let missing = B::int_not_equal(known.clone(), picks, bool_dtype::<B>(&device));
        let known = B::int_cast(known, INT);
        let bias = B::float_add(B::float_gather(2, bias, known.clone()), mask::<B>(missing));
        let known = B::int_reshape(known, Shape::new([batch, count * number]));
        let positions = flat::<B>(known, available);
        let rows = B::float_reshape(rows, Shape::new([batch * available, width]));
        let rows = B::float_reshape(
            B::float_select(rows, 0, positions),
            Shape::new([batch * count, number, width]),
        );
        Some(SelectedRows { rows, bias })
    }
}

/// [`MASKED`] where `hidden` is true, 0 elsewhere.
fn mask<B: Backend>(hidden: BoolTensor<B>) -> FloatTensor<B> {
    B::float_mul_scalar(B::bool_into_float(hidden, FloatDType::F32), MASKED.into())
}
