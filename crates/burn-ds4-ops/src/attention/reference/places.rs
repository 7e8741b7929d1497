//! Places of positions among what a cache keeps of sequences.

use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, IndexingUpdateOp, Shape};

use super::INT;
use crate::attention::{CONTENT_BLOCK, RowRounding};
use crate::quant::FP4_BLOCK;
use crate::quant::roundtrip::{E2M1, E4M3, hadamard, roundtrip};
use crate::reference::{bool_dtype, slice};

/// New positions of every sequence, from its start on.
pub(super) struct Places<B: Backend> {
    /// `[batch, 1]`, in range.
    pub start: IntTensor<B>,
    /// `[batch, 1]`: sequences that are not there.
    pub skipped: BoolTensor<B>,
    batch: usize,
}

impl<B: Backend> Places<B> {
    /// With starts that are one of the `known` positions, or of a sequence that is not there.
    pub fn new(given: IntTensor<B>, known: usize) -> Self {
        let [batch] = given.shape().dims();
        // In its own dtype: another may make one that is out of range one that is not.
        let start = B::int_clamp(given.clone(), 0.into(), (known as i64 - 1).into());
        let skipped = B::int_not_equal(start.clone(), given, bool_dtype::<B>(&start.device()));
        let single = Shape::new([batch, 1]);
        Self {
            start: B::int_reshape(B::int_cast(start, INT), single.clone()),
            skipped: B::bool_reshape(skipped, single),
            batch,
        }
    }

    /// `first`, `first + 1`, ... of every sequence: `[batch, count]`.
    pub fn from(&self, first: IntTensor<B>, count: usize) -> IntTensor<B> {
        let shape = Shape::new([self.batch, count]);
        let steps = B::int_arange(0..count as i64, &first.device(), INT);
        let steps = B::int_reshape(steps, Shape::new([1, count]));
        B::int_add(
            B::int_expand(first, shape.clone()),
            B::int_expand(steps, shape),
        )
    }

    /// The slots of the `count` positions from `offset` after the start on, of so many, taken in turns.
    pub fn slots(&self, offset: i64, count: usize, slots: usize) -> IntTensor<B> {
        // Positions before the first are shifted up by whole turns, which leaves their slots as they are.
        let turns = offset.min(0).unsigned_abs().div_ceil(slots as u64) * slots as u64;
        let from = B::int_add_scalar(self.start.clone(), (offset + turns as i64).into());
        B::int_remainder_scalar(self.from(from, count), (slots as i64).into())
    }

    /// The rows of `[batch, size, width]` at `places`: `[batch, places, width]`.
    pub fn at(&self, tensor: FloatTensor<B>, places: IntTensor<B>) -> FloatTensor<B> {
        let [batch, size, width] = tensor.shape().dims();
        let [_, count] = places.shape().dims();
        let tensor = B::float_reshape(tensor, Shape::new([batch * size, width]));
        let found = B::float_select(tensor, 0, flat::<B>(places, size));
        B::float_reshape(found, Shape::new([batch, count, width]))
    }

    /// `tensor` (`[batch, size, width]`) with `rows` at `places`, but where a mask `[batch, places]` says that there is nothing new.
    pub fn put(
        &self,
        tensor: FloatTensor<B>,
        places: IntTensor<B>,
        rows: FloatTensor<B>,
        old: BoolTensor<B>,
    ) -> FloatTensor<B> {
        let shape = tensor.shape();
        let [batch, size, width] = shape.dims();
        let [_, count] = places.shape().dims();
        let held = self.at(tensor.clone(), places.clone());
        let old = B::bool_reshape(old, Shape::new([batch, count, 1]));
        let rows = B::float_cast(rows, FloatDType::from(tensor.dtype()));
        let rows = B::float_mask_where(rows, B::bool_expand(old, held.shape()), held);
        let rows = B::float_reshape(rows, Shape::new([batch * count, width]));
        let tensor = B::float_reshape(tensor, Shape::new([batch * size, width]));
        let places = flat::<B>(places, size);
        let tensor = B::float_select_assign(tensor, 0, places, rows, IndexingUpdateOp::Assign);
        B::float_reshape(tensor, shape)
    }

    /// A ring of rows (`[batch, slots, width]`) with the newest of `new` (`[batch, count, width]`).
    pub fn put_newest(&self, ring: FloatTensor<B>, new: FloatTensor<B>) -> FloatTensor<B> {
        let [_, slots, _] = ring.shape().dims();
        let [_, count, _] = new.shape().dims();
        let kept = count.min(slots);
        let first = count - kept;
        let places = self.slots(first as i64, kept, slots);
        let old = B::bool_expand(self.skipped.clone(), Shape::new([self.batch, kept]));
        self.put(ring, places, slice::<B>(new, 1, first..count), old)
    }
}

/// Indices into what all sequences have `size` of each, one sequence after the other.
pub(super) fn flat<B: Backend>(places: IntTensor<B>, size: usize) -> IntTensor<B> {
    let [batch, count] = places.shape().dims();
    let offsets = B::int_arange(0..batch as i64, &places.device(), INT);
    let offsets = B::int_mul_scalar(offsets, (size as i64).into());
    let offsets = B::int_reshape(offsets, Shape::new([batch, 1]));
    let places = B::int_add(places, B::int_expand(offsets, Shape::new([batch, count])));
    B::int_reshape(places, Shape::new([batch * count]))
}

/// Rows (`[batch, rows, width]`) as they are stored, of which the first `kept` channels do not turn. They are rounded in f32, and stay in their
/// dtype.
pub(super) fn round<B: Backend>(
    rows: FloatTensor<B>,
    kept: usize,
    rounding: RowRounding,
) -> FloatTensor<B> {
    if rounding == RowRounding::None {
        return rows;
    }
    let (shape, dtype) = (rows.shape(), rows.dtype());
    let [batch, count, width] = shape.dims();
    let rows = B::float_reshape(rows, Shape::new([batch * count, width]));
    let rows = B::float_cast(rows, FloatDType::F32);
    let rows = match rounding {
        RowRounding::Content if kept == width => roundtrip::<B>(rows, CONTENT_BLOCK, &E4M3),
        RowRounding::Content if kept > 0 => {
            let content = slice::<B>(rows.clone(), 1, 0..kept);
            let content = roundtrip::<B>(content, CONTENT_BLOCK, &E4M3);
            B::float_cat(vec![content, slice::<B>(rows, 1, kept..width)], 1)
        }
        RowRounding::Index => roundtrip::<B>(hadamard::<B>(rows), FP4_BLOCK, &E2M1),
        RowRounding::Content | RowRounding::None => rows,
    };
    B::float_reshape(B::float_cast(rows, dtype.into()), shape)
}
