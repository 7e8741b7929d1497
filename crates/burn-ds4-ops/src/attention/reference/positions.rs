//! New positions, and their slots in the tensors of a cache.

use crate::attention::options::{CONTENT_BLOCK, MASKED, RowRounding, SHARED_BLOCK, WHOLE_BLOCK};
use crate::dims::{Dims, dims_of};
use crate::quant::FP4_BLOCK;
use crate::reference::prelude::*;
use crate::roundtrip::reference::{hadamard, roundtrip, roundtrip_scaled};
use crate::roundtrip::{E2M1, E4M3};

/// The new positions of every sequence, from its start on.
pub(super) struct NewPositions<B: Backend> {
    /// Starts within the known positions: `[batch, 1]`.
    pub start: IntTensor<B>,
    /// Whether sequences are vacant: `[batch, 1]`.
    pub vacant: BoolTensor<B>,
    batch: usize,
}

impl<B: Backend> NewPositions<B> {
    /// For starts that are one of the `known` positions, or else of a vacant sequence.
    pub fn new(given: IntTensor<B>, known: usize) -> Self {
        let [batch] = given.dims();
        let start = within::<B>(given.clone(), known);
        let vacant = B::int_not_equal(start.clone(), given, bool_dtype::<B>(&start.device()));
        let single = Shape::new([batch, 1]);
        Self {
            start: B::int_reshape(B::int_cast(start, INT), single.clone()),
            vacant: B::bool_reshape(vacant, single),
            batch,
        }
    }

    /// `first`, `first + 1`, ... of every sequence: `[batch, count]`.
    pub fn from(&self, first: IntTensor<B>, count: usize) -> IntTensor<B> {
        let shape = [self.batch, count];
        let steps = numbers::<B>(0..count as i64, 1, shape, &first.device());
        B::int_add(B::int_expand(first, shape.into()), steps)
    }

    /// The slots of `count` positions from `offset` after the start on: the positions modulo
    /// `slots`.
    pub fn slots(&self, offset: i64, count: usize, slots: usize) -> IntTensor<B> {
        // Adding a multiple of the slots makes earlier positions non-negative and keeps their
        // slots.
        let shift = offset.min(0).unsigned_abs().div_ceil(slots as u64) * slots as u64;
        let from = B::int_add_scalar(self.start.clone(), (offset + shift as i64).into());
        B::int_remainder_scalar(self.from(from, count), (slots as i64).into())
    }

    /// The rows of `[batch, size, width]` at `indices` (`[batch, count]`): `[batch, count, width]`.
    pub fn at(&self, tensor: FloatTensor<B>, indices: IntTensor<B>) -> FloatTensor<B> {
        let [batch, size, width] = tensor.dims();
        let [_, count] = indices.dims();
        let tensor = reshape::<B>(tensor, [batch * size, width]);
        let found = B::float_select(tensor, 0, flat::<B>(indices, size));
        reshape::<B>(found, [batch, count, width])
    }

    /// `tensor` (`[batch, size, width]`) with `rows` at `indices` (`[batch, count]`). Where the
    /// mask `old` (`[batch, count]`) is true, the row stays as it is.
    pub fn put(
        &self,
        tensor: FloatTensor<B>,
        indices: IntTensor<B>,
        rows: FloatTensor<B>,
        old: BoolTensor<B>,
    ) -> FloatTensor<B> {
        let shape = tensor.shape();
        let [batch, size, width] = dims_of(&shape);
        let [_, count] = indices.dims();
        let held = self.at(tensor.clone(), indices.clone());
        let old = bool_reshape::<B>(old, [batch, count, 1]);
        let rows = B::float_cast(rows, FloatDType::from(tensor.dtype()));
        let rows = B::float_mask_where(rows, B::bool_expand(old, held.shape()), held);
        let rows = reshape::<B>(rows, [batch * count, width]);
        let tensor = reshape::<B>(tensor, [batch * size, width]);
        let indices = flat::<B>(indices, size);
        let tensor = B::float_select_assign(tensor, 0, indices, rows, IndexingUpdateOp::Assign);
        B::float_reshape(tensor, shape)
    }

    /// Stores the newest of `new` (`[batch, count, width]`) in a ring of rows (`[batch, slots,
    /// width]`).
    pub fn put_newest(&self, ring: FloatTensor<B>, new: FloatTensor<B>) -> FloatTensor<B> {
        let [_, slots, _] = ring.dims();
        let [_, count, _] = new.dims();
        let stored = count.min(slots);
        let first = count - stored;
        let indices = self.slots(first as i64, stored, slots);
        let old = B::bool_expand(self.vacant.clone(), [self.batch, stored].into());
        self.put(ring, indices, slice::<B>(new, 1, first..count), old)
    }
}

/// Indices into the rows of all sequences, `size` of each, one sequence after the other.
pub(super) fn flat<B: Backend>(indices: IntTensor<B>, size: usize) -> IntTensor<B> {
    let [batch, count] = indices.dims();
    let sequence = numbers::<B>(0..batch as i64, 0, [batch, count], &indices.device());
    let indices = B::int_add(indices, B::int_mul_scalar(sequence, (size as i64).into()));
    int_reshape::<B>(indices, [batch * count])
}

/// Rounds rows (`[batch, rows, width]`) as they are stored. Their first `unrotated` channels are
/// not rotated. They are rounded in f32, and stay in their dtype.
pub(super) fn round<B: Backend>(
    rows: FloatTensor<B>,
    unrotated: usize,
    rounding: RowRounding,
) -> FloatTensor<B> {
    if rounding == RowRounding::None {
        return rows;
    }
    let (shape, dtype) = (rows.shape(), rows.dtype());
    let [batch, count, width] = dims_of(&shape);
    let rows = reshape::<B>(rows, [batch * count, width]);
    let rows = as_f32::<B>(rows);
    let rows = match rounding {
        RowRounding::Content if unrotated == width => roundtrip::<B>(rows, CONTENT_BLOCK, &E4M3),
        RowRounding::Content if unrotated > 0 => {
            let content = slice::<B>(rows.clone(), 1, 0..unrotated);
            let content = roundtrip::<B>(content, CONTENT_BLOCK, &E4M3);
            B::float_cat(vec![content, slice::<B>(rows, 1, unrotated..width)], 1)
        }
        RowRounding::Index => roundtrip::<B>(hadamard::<B>(rows), FP4_BLOCK, &E2M1),
        RowRounding::Whole => roundtrip::<B>(rows, WHOLE_BLOCK, &E4M3),
        RowRounding::Shared => roundtrip_scaled::<B>(rows, SHARED_BLOCK),
        RowRounding::Key => roundtrip::<B>(rows, FP4_BLOCK, &E2M1),
        RowRounding::Content | RowRounding::None => rows,
    };
    B::float_reshape(B::float_cast(rows, dtype.into()), shape)
}

/// Whether compressed rows, of blocks of `ratio` positions, are hidden from new positions: `[batch,
/// count, rows]`.
pub(super) fn hidden_blocks<B: Backend>(
    positions: &NewPositions<B>,
    count: usize,
    rows: usize,
    ratio: usize,
) -> BoolTensor<B> {
    let batch = positions.batch;
    let shape = Shape::new([batch, count, rows]);
    let row = numbers::<B>(0..rows as i64, 2, shape, &positions.start.device());
    hidden_picks(positions, &row, ratio)
}

/// The same of the rows `picks`, a number for each query: `[batch, count, picks]`.
pub(super) fn hidden_picks<B: Backend>(
    positions: &NewPositions<B>,
    picks: &IntTensor<B>,
    ratio: usize,
) -> BoolTensor<B> {
    let shape = picks.shape();
    let [batch, count, _] = dims_of(&shape);
    let position = positions.from(positions.start.clone(), count);
    let mask_dtype = bool_dtype::<B>(&position.device());
    // A block that is longer than the largest position is never complete.
    let ratio = ratio.min(i32::MAX as usize) as i64;
    let visible = B::int_div_scalar(B::int_add_scalar(position, 1.into()), ratio.into());
    let visible = int_broadcast::<B>(visible, [batch, count, 1], shape.clone());
    let hidden = B::int_greater_equal(picks.clone(), visible, mask_dtype);
    let vacant = bool_broadcast::<B>(positions.vacant.clone(), [batch, 1, 1], shape);
    B::bool_or(hidden, vacant)
}

/// [`MASKED`] where `hidden` is true, 0 elsewhere.
pub(super) fn mask<B: Backend>(hidden: BoolTensor<B>) -> FloatTensor<B> {
    B::float_mul_scalar(B::bool_into_float(hidden, FloatDType::F32), MASKED.into())
}
