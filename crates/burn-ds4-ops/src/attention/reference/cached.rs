//! Attention over a cache, and its new rows. All indices and masks are computed here, from the
//! starts of the sequences.

use std::ops::Range;

use super::positions::{NewPositions, hidden_blocks, hidden_picks, mask, round};
use crate::attention::args::{CachedBlocks, CompressedRows, NewRows, Queries, SinkInputs};
use crate::attention::options::{DECODE_TOKENS, WindowLayout};
use crate::attention::rows::RowOps;
use crate::dims::Dims;
use crate::matmul::MatmulOps;
use crate::norm::{NormOps, norm_rows};
use crate::optional::OptionalFloat;
use crate::reference::prelude::*;

/// Elements of a mask of picked rows that are made at the same time, at most, unless few queries
/// have more.
const MAX_MASKED: usize = 1 << 26;

/// What attention over a cache is composed of.
pub(in crate::attention) trait CachedOps:
    MatmulOps + NormOps + RowOps
{
}

impl<B: MatmulOps + NormOps + RowOps> CachedOps for B {}

pub(in crate::attention) fn append_rows<B: CachedOps>(
    new: NewRows<B>,
    ring: FloatTensor<B>,
) -> FloatTensor<B> {
    let [batch, count, width] = new.x.dims();
    let [known, rotated] = new.angles.dims();
    let positions = NewPositions::<B>::new(new.start.clone(), known);
    let rows = norm_rows::<B>(new.x, OptionalFloat::Some(new.norm), new.epsilon);
    let rows = reshape::<B>(rows, [batch, count, 1, width]);
    let rows = rotate_by_position::<B>(rows, new.angles, new.start, false);
    let rows = reshape::<B>(rows, [batch, count, width]);
    positions.put_newest(ring, round::<B>(rows, width - rotated, new.rounding))
}

/// Attention by `attend`, once all is prepared for it.
pub(in crate::attention) fn cached_attention<B: CachedOps>(
    queries: Queries<B>,
    window: FloatTensor<B>,
    blocks: CachedBlocks<B>,
    attend: impl Fn(SinkInputs<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let causal = queries.causal;
    let shape = queries.x.shape();
    let prepared = Prepared::new(queries, window);
    if !causal {
        let output = attend(prepared.of_all());
        return prepared.rotate_back(B::float_reshape(output, shape));
    }
    let compressed = match blocks {
        CachedBlocks::None => CompressedRows::None,
        CachedBlocks::All { rows, ratio, .. } => {
            let rows = rows.in_order();
            let bias = prepared.block_bias(rows.shape()[1], ratio);
            CompressedRows::Shared { rows, bias }
        }
        CachedBlocks::Picked { rows, picks, ratio } => {
            let output = prepared.of_picks(rows.in_order(), picks, ratio, attend);
            return prepared.rotate_back(output);
        }
    };
    let inputs = prepared.inputs.clone();
    let output = attend(SinkInputs {
        compressed,
        ..inputs
    });
    prepared.rotate_back(output)
}

/// Queries that are normalised and rotated, and the rows of their windows.
pub(super) struct Prepared<B: CachedOps> {
    /// Without compressed rows.
    pub inputs: SinkInputs<B>,
    positions: NewPositions<B>,
    angles: FloatTensor<B>,
    start: IntTensor<B>,
}

impl<B: CachedOps> Prepared<B> {
    pub fn new(queries: Queries<B>, window: FloatTensor<B>) -> Self {
        let count = queries.x.shape()[1];
        let [_, slots, _] = window.dims();
        let positions = NewPositions::<B>::new(queries.start.clone(), queries.angles.shape()[0]);

        let rows = match queries.epsilon {
            Some(epsilon) => norm_rows::<B>(queries.x, OptionalFloat::None, epsilon),
            None => queries.x,
        };
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

    /// What lets each query attend to all rows of the window: it counts as a sequence.
    fn of_all(&self) -> SinkInputs<B> {
        let inputs = self.inputs.clone();
        let [batch, count, heads, width] = inputs.queries.dims();
        let [_, columns, _] = inputs.window.dims();
        let all = batch * count;
        let repeated = |rows: FloatTensor<B>, width: usize| {
            let rows = reshape::<B>(rows, [batch, 1, columns, width]);
            let rows = B::float_expand(rows, [batch, count, columns, width].into());
            reshape::<B>(rows, [all, columns, width])
        };
        let bias = repeated(inputs.window_bias, 1);
        SinkInputs {
            queries: reshape::<B>(inputs.queries, [all, 1, heads, width]),
            window: repeated(inputs.window, width),
            window_bias: reshape::<B>(bias, [all, columns]),
            span: columns,
            ..inputs
        }
    }

    /// Attention to the window and to picked rows, some queries at a time.
    fn of_picks(
        &self,
        rows: FloatTensor<B>,
        picks: IntTensor<B>,
        ratio: usize,
        attend: impl Fn(SinkInputs<B>) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        let [batch, available, _] = rows.dims();
        let [_, count, _] = picks.dims();
        // What is not visible of the picks is missing, so that nothing is worked out for all rows.
        let picks = B::int_cast(picks, INT);
        let hidden = hidden_picks(&self.positions, &picks, ratio);
        let picks = B::int_mask_fill(picks, hidden, (-1).into());
        let of_some = |inputs: SinkInputs<B>, own: Range<usize>| {
            let shape = Shape::new([batch, own.len(), available]);
            let compressed = CompressedRows::Picked {
                rows: rows.clone(),
                bias: B::float_zeros(shape, &rows.device(), FloatDType::F32),
                picks: int_slice::<B>(picks.clone(), 1, own),
            };
            attend(SinkInputs {
                compressed,
                ..inputs
            })
        };
        let most = (MAX_MASKED / (batch * available)).max(DECODE_TOKENS);
        if count <= most {
            return of_some(self.inputs.clone(), 0..count);
        }
        let firsts = (0..count).step_by(most);
        let ranges = firsts.map(|first| first..count.min(first + most));
        let outputs = ranges.map(|own| of_some(self.inputs.some(own.clone()), own));
        B::float_cat(outputs.collect(), 1)
    }

    /// Rotates what was attended to back. Vacant sequences have zeros, even where a query is no
    /// number.
    pub fn rotate_back(self, output: FloatTensor<B>) -> FloatTensor<B> {
        let shape = output.shape();
        let vacant = bool_reshape::<B>(self.positions.vacant, [shape[0], 1, 1, 1]);
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
fn rotate_by_position<B: CachedOps>(
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
