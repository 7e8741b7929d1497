//! Attention over a cache, and its new rows. All indices and masks are computed here, from the
//! starts of the sequences.

use burn::backend::TensorMetadata;
use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::tensor::Shape;

use super::positions::{NewPositions, round};
use super::{INT, SinkInputs, mask};
use crate::attention::WindowLayout;
use crate::attention::backend::{AttentionOps, CachedBlocks, CompressedRows, NewRows, Queries};
use crate::optional::OptionalFloat;
use crate::reference::{bool_dtype, slice};

pub(in crate::attention) fn append_rows<B: AttentionOps>(
    new: NewRows<B>,
    ring: FloatTensor<B>,
) -> FloatTensor<B> {
    let [batch, count, width] = new.x.shape().dims();
    let [known, rotated] = new.angles.shape().dims();
    let positions = NewPositions::<B>::new(new.start.clone(), known);
    let rows = B::float_reshape(new.x, Shape::new([batch * count, width]));
    let rows = B::rms_norm(rows, OptionalFloat::Some(new.norm), new.epsilon);
    let rows = B::float_reshape(rows, Shape::new([batch, count, 1, width]));
    let rows = rotate_by_position::<B>(rows, new.angles, new.start, false);
    let rows = B::float_reshape(rows, Shape::new([batch, count, width]));
    positions.put_newest(ring, round::<B>(rows, width - rotated, new.rounding))
}

pub(in crate::attention) fn cached_attention<B: AttentionOps>(
    queries: Queries<B>,
    window: FloatTensor<B>,
    blocks: CachedBlocks<B>,
) -> FloatTensor<B> {
    let causal = queries.causal;
    let prepared = Prepared::new(queries, window);
    if !causal {
        let output = prepared.attend_to_all();
        return prepared.rotate_back(output);
    }
    let compressed = match blocks {
        CachedBlocks::None => CompressedRows::None,
        CachedBlocks::All { rows, ratio, .. } => CompressedRows::Shared {
            bias: prepared.block_bias(rows.shape()[1], ratio),
            rows,
        },
        CachedBlocks::Picked { rows, picks, ratio } => CompressedRows::Picked {
            bias: prepared.block_bias(rows.shape()[1], ratio),
            rows,
            picks,
        },
    };
    let SinkInputs {
        queries,
        window,
        window_bias,
        sinks,
        span,
        scale,
        ..
    } = prepared.inputs.clone();
    let output = B::sink_attention(queries, window, window_bias, compressed, sinks, span, scale);
    prepared.rotate_back(output)
}

/// Queries that are normalised and rotated, and the rows of their windows.
pub(super) struct Prepared<B: AttentionOps> {
    /// Without compressed rows.
    pub inputs: SinkInputs<B>,
    positions: NewPositions<B>,
    angles: FloatTensor<B>,
    start: IntTensor<B>,
}

impl<B: AttentionOps> Prepared<B> {
    pub fn new(queries: Queries<B>, window: FloatTensor<B>) -> Self {
        let [batch, count, heads, width] = queries.x.shape().dims();
        let [_, slots, _] = window.shape().dims();
        let positions = NewPositions::<B>::new(queries.start.clone(), queries.angles.shape()[0]);

        let rows = B::float_reshape(queries.x, Shape::new([batch * count * heads, width]));
        let rows = B::rms_norm(rows, OptionalFloat::None, queries.epsilon);
        let rows = B::float_reshape(rows, Shape::new([batch, count, heads, width]));
        let (angles, start) = (queries.angles, queries.start);
        let rows = rotate_by_position::<B>(rows, angles.clone(), start.clone(), false);

        let before = queries.span - 1;
        let columns = before + count;
        let window = match queries.layout {
            WindowLayout::Ring => {
                positions.at(window, positions.slots(-(before as i64), columns, slots))
            }
            WindowLayout::Latest => slice::<B>(window, 1, slots - columns..slots),
        };
        // Positions before the first one, and those of vacant sequences, are hidden.
        let position = positions.from(positions.start.clone(), columns);
        let mask_dtype = bool_dtype::<B>(&window.device());
        let hidden = B::int_lower_elem(position, (before as i64).into(), mask_dtype);
        let vacant = B::bool_expand(positions.vacant.clone(), hidden.shape());
        Self {
            inputs: SinkInputs {
                queries: rows,
                window,
                window_bias: mask::<B>(B::bool_or(hidden, vacant)),
                compressed: CompressedRows::None,
                sinks: queries.sinks,
                span: queries.span,
                scale: queries.scale,
            },
            positions,
            angles,
            start,
        }
    }

    /// Attention of each query to all rows of the window: each query counts as a sequence.
    fn attend_to_all(&self) -> FloatTensor<B> {
        let SinkInputs {
            queries,
            window,
            window_bias,
            sinks,
            scale,
            ..
        } = self.inputs.clone();
        let [batch, count, heads, width] = queries.shape().dims();
        let [_, columns, _] = window.shape().dims();
        let all = batch * count;
        let window = B::float_reshape(window, Shape::new([batch, 1, columns, width]));
        let window = B::float_expand(window, Shape::new([batch, count, columns, width]));
        let window = B::float_reshape(window, Shape::new([all, columns, width]));
        let bias = B::float_reshape(window_bias, Shape::new([batch, 1, columns]));
        let bias = B::float_expand(bias, Shape::new([batch, count, columns]));
        let bias = B::float_reshape(bias, Shape::new([all, columns]));
        let queries = B::float_reshape(queries, Shape::new([all, 1, heads, width]));
        let (none, span) = (CompressedRows::None, columns);
        let output = B::sink_attention(queries, window, bias, none, sinks, span, scale);
        B::float_reshape(output, Shape::new([batch, count, heads, width]))
    }

    /// Rotates what was attended to back. Vacant sequences have zeros, even where a query is no
    /// number.
    pub fn rotate_back(self, output: FloatTensor<B>) -> FloatTensor<B> {
        let shape = output.shape();
        let vacant = B::bool_reshape(self.positions.vacant, Shape::new([shape[0], 1, 1, 1]));
        let output = B::float_mask_fill(output, B::bool_expand(vacant, shape), 0.0.into());
        rotate_by_position::<B>(output, self.angles, self.start, true)
    }

    /// The mask of compressed rows: `[batch, count, rows]`.
    fn block_bias(&self, rows: usize, ratio: usize) -> FloatTensor<B> {
        let count = self.inputs.queries.shape()[1];
        mask::<B>(hidden_blocks(&self.positions, count, rows, ratio))
    }
}

/// Rotates by position. Without rotated channels there is nothing to do, and operators take no
/// empty tensor.
fn rotate_by_position<B: AttentionOps>(
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

/// Whether compressed rows, of blocks of `ratio` positions, are hidden from new positions: `[batch,
/// count, rows]`.
pub(super) fn hidden_blocks<B: AttentionOps>(
    positions: &NewPositions<B>,
    count: usize,
    rows: usize,
    ratio: usize,
) -> BoolTensor<B> {
    let position = positions.from(positions.start.clone(), count);
    let [batch, _] = position.shape().dims();
    let shape = Shape::new([batch, count, rows]);
    let mask_dtype = bool_dtype::<B>(&position.device());
    // A block that is longer than the largest position is never complete.
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
    let vacant = B::bool_reshape(positions.vacant.clone(), Shape::new([batch, 1, 1]));
    B::bool_or(hidden, B::bool_expand(vacant, shape))
}
