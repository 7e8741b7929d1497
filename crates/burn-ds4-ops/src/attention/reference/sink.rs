//! Attention with a sink.

use std::ops::Range;

use super::positions::{flat, mask};
use crate::attention::args::{CompressedRows, SinkInputs};
use crate::attention::options::{DECODE_TOKENS, HIDDEN_BELOW, MASKED, TINY};
use crate::dims::Dims;
use crate::matmul::MatmulOps;
use crate::reference::prelude::*;

/// Elements of picked rows that are gathered at the same time, at most, unless one query has more.
const MAX_GATHERED: usize = 1 << 27;

/// The compressed rows that a group of queries attends to. A group is a sequence, or a single query
/// with rows of its own.
struct SelectedRows<B: Backend> {
    /// `[groups, rows, width]`.
    rows: FloatTensor<B>,
    /// `[batch, count, rows]`.
    bias: FloatTensor<B>,
}

impl<B: MatmulOps> SinkInputs<B> {
    pub(in crate::attention) fn output(self) -> FloatTensor<B> {
        let [batch, count, _, _] = self.queries.dims();
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
        let ([batch, _, width], [_, _, number]) = (rows.dims(), picks.dims());
        (MAX_GATHERED / (batch * number * width)).max(1)
    }

    /// The inputs of some queries of each sequence, with the part of the window in their spans.
    pub(super) fn some(&self, own: Range<usize>) -> Self {
        let [_, columns, _] = self.window.dims();
        let [_, count, _, _] = self.queries.dims();
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
                    picks: int_slice::<B>(picks.clone(), 1, own.clone()),
                },
            },
            sinks: self.sinks.clone(),
            ..*self
        }
    }

    pub(super) fn attend(self) -> FloatTensor<B> {
        let [batch, count, heads, width] = self.queries.dims();
        let dtype = self.queries.dtype();
        let [_, columns, _] = self.window.dims();
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
            reshape::<B>(B::precise_matmul(part, rows), [batch, count, heads, width])
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

    pub(in crate::attention) fn probabilities(self) -> FloatTensor<B> {
        self.softmax(&self.selected())
    }

    /// The weights of the window's columns and of the compressed ones: `[batch, count, heads,
    /// columns]`.
    fn softmax(&self, selected: &Option<SelectedRows<B>>) -> FloatTensor<B> {
        let [batch, count, heads, _] = self.queries.dims();
        let [_, columns, _] = self.window.dims();
        let bias = reshape::<B>(self.window_bias.clone(), [batch, 1, 1, columns]);
        let mut all = self.logits(self.window.clone());
        all = B::float_add(all.clone(), B::float_expand(bias, all.shape()));
        if columns > self.span {
            let band = reshape::<B>(self.band(), [1, count, 1, columns]);
            all = B::float_add(all.clone(), B::float_expand(band, all.shape()));
        }
        if let Some(SelectedRows { rows, bias }) = selected {
            let logits = self.logits(rows.clone());
            let bias = reshape::<B>(bias.clone(), [batch, count, 1, logits.shape()[3]]);
            let bias = B::float_expand(bias, logits.shape());
            all = B::float_cat(vec![all, B::float_add(logits, bias)], 3);
        }

        let single = Shape::new([batch, count, heads, 1]);
        let sinks = B::float_clamp_min(self.sinks.clone(), MASKED.into());
        let sinks = reshape::<B>(sinks, [1, 1, heads, 1]);
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
        let [batch, count, heads, width] = self.queries.dims();
        let [groups, columns, _] = rows.dims();
        let queries = reshape::<B>(
            self.queries.clone(),
            [groups, batch * count / groups * heads, width],
        );
        let dots = B::precise_matmul(queries, B::float_swap_dims(rows, 1, 2));
        let dots = as_f32::<B>(dots);
        let dots = reshape::<B>(dots, [batch, count, heads, columns]);
        B::float_mul_scalar(dots, self.scale.into())
    }

    /// The mask of columns outside a query's span: `[count, columns]`.
    fn band(&self) -> FloatTensor<B> {
        let device = self.queries.device();
        let [_, count, _, _] = self.queries.dims();
        let [_, columns, _] = self.window.dims();
        let first = (columns + 1 - count - self.span) as i64;
        let shape = [count, columns];
        let column = numbers::<B>(0..columns as i64, 1, shape, &device);
        let start = numbers::<B>(first..first + count as i64, 0, shape, &device);
        let distance = B::int_sub(column, start);
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
        let [batch, available, width] = rows.dims();
        let [_, count, number] = picks.dims();
        let known = within::<B>(picks.clone(), available);
        let missing = B::int_not_equal(known.clone(), picks, bool_dtype::<B>(&device));
        let known = B::int_cast(known, INT);
        let bias = B::float_add(B::float_gather(2, bias, known.clone()), mask::<B>(missing));
        let known = int_reshape::<B>(known, [batch, count * number]);
        let positions = flat::<B>(known, available);
        let rows = reshape::<B>(rows, [batch * available, width]);
        let rows = reshape::<B>(
            B::float_select(rows, 0, positions),
            [batch * count, number, width],
        );
        Some(SelectedRows { rows, bias })
    }
}
