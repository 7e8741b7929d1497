//! Compressed rows. All indices that a step needs are computed here, from the starts of the
//! sequences.

use super::pages::located;
use super::positions::{NewPositions, flat, round};
use crate::attention::args::Compression;
use crate::attention::options::RowRounding;
use crate::attention::rows::{RowOps, rotation};
use crate::dims::{Dims, dims_of};
use crate::norm::{NormOps, norm_rows};
use crate::optional::{OptionalFloat, OptionalInt};
use crate::reference::prelude::*;

pub(in crate::attention) fn compress_rows<B: NormOps + RowOps>(
    inputs: Compression<B>,
    raw: FloatTensor<B>,
    rows: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let blocks = inputs.blocks();
    let new = blocks.new_blocks();
    let (raw, pooled) = pool(&inputs, &new, raw);
    (raw, blocks.store_at(&new, rows, pooled))
}

/// Stores raw rows, and returns the normalised rows of the blocks that may be complete: `[batch,
/// blocks, width]`.
pub(in crate::attention) fn pool_blocks<B: NormOps + RowOps>(
    inputs: Compression<B>,
    raw: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let new = inputs.blocks().new_blocks();
    pool(&inputs, &new, raw)
}

fn pool<B: NormOps + RowOps>(
    inputs: &Compression<B>,
    new: &NewBlocks<B>,
    raw: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let step = CompressionStep::new(inputs, new, &raw);
    let [batch, count, raw_width] = inputs.projections.dims();
    let bias = B::float_select(inputs.bias.clone(), 0, step.in_block());
    let bias = reshape::<B>(bias, [batch, count, raw_width]);
    let new = B::float_add(inputs.projections.clone(), bias);
    let pooled = step.pool(step.blocks_of(&raw, new.clone()));
    (step.store_raw(raw, new), step.normalize(pooled))
}

/// New positions of every sequence, and the blocks of them that have a row.
pub(in crate::attention) struct BlockRows<B: Backend> {
    pub angles: FloatTensor<B>,
    pub start: IntTensor<B>,
    pub pages: OptionalInt<B>,
    /// New positions of a sequence.
    pub count: usize,
    /// Positions of a block.
    pub ratio: usize,
    pub rounding: RowRounding,
}

/// What is worked out once for the blocks that a step may complete.
struct NewBlocks<B: Backend> {
    positions: NewPositions<B>,
    /// The first of these blocks: `[batch, 1]`.
    first: IntTensor<B>,
}

impl<B: RowOps> BlockRows<B> {
    fn new_blocks(&self) -> NewBlocks<B> {
        let positions = NewPositions::<B>::new(self.start.clone(), self.angles.shape()[0]);
        let first = B::int_div_scalar(positions.start.clone(), (self.ratio as i64).into());
        NewBlocks { positions, first }
    }

    /// Blocks that may be completed.
    fn blocks(&self) -> usize {
        self.count.div_ceil(self.ratio)
    }

    /// Rotates the rows `new` of these blocks, `[batch, blocks, width]`, rounds them, and stores
    /// those of blocks that are complete.
    pub fn store(&self, rows: FloatTensor<B>, new: FloatTensor<B>) -> FloatTensor<B> {
        self.store_at(&self.new_blocks(), rows, new)
    }

    fn store_at(
        &self,
        at: &NewBlocks<B>,
        rows: FloatTensor<B>,
        new: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let unrotated = new.shape()[2] - self.angles.shape()[1];
        let new = round::<B>(self.rotate(at, new), unrotated, self.rounding);
        self.put_complete(at, rows, new)
    }
}

impl<B: Backend> Compression<B> {
    fn blocks(&self) -> BlockRows<B> {
        BlockRows {
            angles: self.angles.clone(),
            start: self.start.clone(),
            pages: self.pages.clone(),
            count: self.projections.shape()[1],
            ratio: self.ratio,
            rounding: self.rounding,
        }
    }
}

/// New positions of every sequence.
struct CompressionStep<'a, B: NormOps + RowOps> {
    inputs: &'a Compression<B>,
    first: &'a IntTensor<B>,
    positions: &'a NewPositions<B>,
    batch: usize,
    count: usize,
    width: usize,
    /// Series of channels.
    series: usize,
    /// Slots of a sequence's raw rows.
    slots: usize,
}

impl<'a, B: NormOps + RowOps> CompressionStep<'a, B> {
    fn new(inputs: &'a Compression<B>, new: &'a NewBlocks<B>, raw: &FloatTensor<B>) -> Self {
        let [batch, count, raw_width] = inputs.projections.dims();
        let [_, slots, _] = raw.dims();
        let series = 1 + usize::from(inputs.overlap);
        Self {
            inputs,
            first: &new.first,
            positions: &new.positions,
            batch,
            count,
            width: raw_width / (2 * series),
            series,
            slots,
        }
    }

    /// Blocks that may be completed.
    fn blocks(&self) -> usize {
        self.count.div_ceil(self.inputs.ratio)
    }

    /// The slot within its block of every position: `[batch * count]`.
    fn in_block(&self) -> IntTensor<B> {
        let positions = self
            .positions
            .from(self.positions.start.clone(), self.count);
        let ratio = (self.inputs.ratio as i64).into();
        flat::<B>(B::int_remainder_scalar(positions, ratio), 0)
    }

    /// Raw rows of the blocks that the step may complete, and of the one before where blocks
    /// overlap: `[batch, blocks + series - 1, ratio, raw width]`.
    fn blocks_of(&self, raw: &FloatTensor<B>, new: FloatTensor<B>) -> FloatTensor<B> {
        let ratio = self.inputs.ratio;
        let history = (self.series * ratio - 1).max(1);
        let read = self.positions.slots(-(history as i64), history, self.slots);
        let all = B::float_cat(vec![self.positions.at(raw.clone(), read), new], 1);
        // The first new row is at index `history`.
        let blocks = self.blocks() + self.series - 1;
        let in_block = B::int_remainder_scalar(self.positions.start.clone(), (ratio as i64).into());
        let before = history as i64 - ((self.series - 1) * ratio) as i64;
        let first = B::int_add_scalar(B::int_neg(in_block), before.into());
        let pooled = self.positions.from(first, blocks * ratio);
        let pooled = within::<B>(pooled, history + self.count);
        let raw_width = 2 * self.series * self.width;
        let shape = Shape::new([self.batch, blocks, ratio, raw_width]);
        B::float_reshape(self.positions.at(all, pooled), shape)
    }

    /// `[batch, blocks, width]`.
    fn pool(&self, raw: FloatTensor<B>) -> FloatTensor<B> {
        let (blocks, width) = (self.blocks(), self.width);
        let part = |first: usize, series: usize| {
            let blocks = slice::<B>(raw.clone(), 1, first..first + blocks);
            slice::<B>(blocks, 3, series * width..(series + 1) * width)
        };
        if self.series == 1 {
            return B::pool(part(0, 0), part(0, 1));
        }
        // The first block has no block before it. Whatever the slots of one hold is not read: it
        // may be left of another sequence, and be no number.
        let block = self.positions.from(self.first.clone(), blocks);
        let none = B::int_equal_elem(block, 0.into(), bool_dtype::<B>(&raw.device()));
        let none = bool_reshape::<B>(none, [self.batch, blocks, 1, 1]);
        let previous = |series: usize, without: f32| {
            let part = part(0, series);
            let none = B::bool_expand(none.clone(), part.shape());
            B::float_mask_fill(part, none, without.into())
        };
        let values = B::float_cat(vec![previous(0, 0.0), part(1, 1)], 2);
        let scores = B::float_cat(vec![previous(2, f32::NEG_INFINITY), part(1, 3)], 2);
        B::pool(values, scores)
    }

    fn normalize(&self, rows: FloatTensor<B>) -> FloatTensor<B> {
        let weight = OptionalFloat::Some(self.inputs.norm.clone());
        norm_rows::<B>(rows, weight, self.inputs.epsilon)
    }

    /// Stores the newest of the new raw rows.
    fn store_raw(&self, raw: FloatTensor<B>, new: FloatTensor<B>) -> FloatTensor<B> {
        self.positions.put_newest(raw, new)
    }
}

impl<B: RowOps> BlockRows<B> {
    /// Rotates each row by the first position of its block.
    fn rotate(&self, at: &NewBlocks<B>, rows: FloatTensor<B>) -> FloatTensor<B> {
        let [known, rotated] = self.angles.dims();
        if rotated == 0 {
            return rows;
        }
        let block = at.positions.from(at.first.clone(), self.blocks());
        let positions = B::int_mul_scalar(block, (self.ratio as i64).into());
        let positions = B::int_clamp_max(positions, (known as i64 - 1).into());
        let (cos, sin) = rotation::<B>(self.angles.clone(), positions, false);
        let [batch, blocks, width] = rows.dims();
        let rows = reshape::<B>(rows, [batch, blocks, 1, width]);
        let rows = B::rotate(rows, cos, sin);
        reshape::<B>(rows, [batch, blocks, width])
    }

    /// Stores the rows of the blocks that are complete.
    fn put_complete(
        &self,
        NewBlocks { positions, first }: &NewBlocks<B>,
        mut rows: FloatTensor<B>,
        compressed: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let device = rows.device();
        let mask_dtype = bool_dtype::<B>(&device);
        let pages = self.pages.as_ref().map_or(1, |pages| pages.shape()[1]);
        let available = pages * rows.shape()[1];
        let end = B::int_add_scalar(positions.start.clone(), (self.count as i64).into());
        let ratio = self.ratio as i64;
        let complete = B::int_div_scalar(end, ratio.into());
        // As many blocks at a time as there are rows, so that those that are out of range, whose
        // rows stay as they are, share none with the others.
        let blocks = self.blocks();
        for from in (0..blocks).step_by(available) {
            let count = available.min(blocks - from);
            let first = B::int_add_scalar(first.clone(), (from as i64).into());
            let number = positions.from(first, count);
            let index = B::int_remainder_scalar(number.clone(), (available as i64).into());
            let out = B::int_not_equal(index.clone(), number.clone(), mask_dtype);
            let vacant = positions.vacant.clone();
            let vacant = B::bool_expand(vacant, number.shape());
            let complete = B::int_expand(complete.clone(), number.shape());
            let partial = B::int_lower_equal(complete, number, mask_dtype);
            let old = B::bool_or(B::bool_or(out, partial), vacant);
            let row = slice::<B>(compressed.clone(), 1, from..from + count);
            rows = self.put(positions, rows, index, row, old);
        }
        rows
    }

    /// [`NewPositions::put`], in pages where there are some.
    fn put(
        &self,
        positions: &NewPositions<B>,
        rows: FloatTensor<B>,
        numbers: IntTensor<B>,
        row: FloatTensor<B>,
        old: BoolTensor<B>,
    ) -> FloatTensor<B> {
        let Some(pages) = self.pages.as_ref() else {
            return positions.put(rows, numbers, row, old);
        };
        let shape = rows.shape();
        let [all, of_page, width] = dims_of(&shape);
        let [batch, count] = numbers.dims();
        let at = located::<B>(pages.clone(), of_page, numbers);
        // As of one sequence.
        let rows = positions.put(
            reshape::<B>(rows, [1, all * of_page, width]),
            int_reshape::<B>(at, [1, batch * count]),
            reshape::<B>(row, [1, batch * count, width]),
            bool_reshape::<B>(old, [1, batch * count]),
        );
        B::float_reshape(rows, shape)
    }
}
