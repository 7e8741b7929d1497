//! What becomes of a lane's sums of a tile.

use cubecl::prelude::*;

use super::input::{padded_columns, permuted_column, term_of};
use super::weights::WeightFormat;
use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::{exp, modulo, reciprocal, shuffle_xor};

/// `silu(min(gate, limit)) · clamp(up, -limit, limit)`; NaN stays NaN.
#[cube]
pub(super) fn swiglu(gate: f32, up: f32, limit: f32, #[comptime] target: Target) -> f32 {
    let gate = select(gate > limit, limit, gate);
    let up = select(up > limit, limit, select(up < -limit, -limit, up));
    gate * reciprocal(1.0f32 + exp(-gate, target), target) * up
}

/// The result of a gate, times the score of the pair if there are scores.
#[cube]
pub(super) fn gated_value(
    gate: f32,
    up: f32,
    limit: f32,
    scores: &ComptimeOption<Box<[f32]>>,
    pair: u32,
    #[comptime] target: Target,
) -> f32 {
    let mut score = 1.0f32;
    #[comptime]
    if let ComptimeOption::Some(scores) = scores {
        score = scores[pair as usize];
    }
    swiglu(gate, up, limit, target) * score
}

/// Results of a row: `own`, and `own + 8` without a gate, of `outputs`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Results {
    pub row: u32,
    pub own: u32,
    pub outputs: u32,
}

#[cube]
impl Results {
    /// Writes a gated result to `[rows, terms, outputs]`, in the order of [`permuted_column`] for
    /// weights of `next`. A value rounded to `R`, the dtype of `x`, has as many terms as `x`.
    pub fn write_gated<R: Float, Y: Float>(
        &self,
        output: &mut [Y],
        value: f32,
        #[comptime] terms: u32,
        #[comptime] next: WeightFormat,
    ) {
        let value = f32::cast_from(R::cast_from(value));
        let width = padded_columns(self.outputs, next) as usize;
        #[unroll]
        for term in 0..terms {
            let row_start = (self.row * terms + term) as usize * width;
            output[row_start + permuted_column(self.own, next) as usize] =
                Y::cast_from(f32::reinterpret(term_of(value, term)));
        }
    }

    /// Writes both results to `[rows, outputs]`, where there are such.
    pub fn write<Y: Float>(&self, output: &mut [Y], low: f32, high: f32) {
        let row_start = self.row as usize * self.outputs as usize;
        if self.own < self.outputs {
            output[row_start + self.own as usize] = Y::cast_from(low);
        }
        if self.own + 8 < self.outputs {
            output[row_start + self.own as usize + 8] = Y::cast_from(high);
        }
    }
}

/// `count` accumulators of a lane.
#[cube]
pub(super) fn zero_sums(#[comptime] count: u32) -> Array<Vector<f32, Const<4>>> {
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(count as usize));
    #[unroll]
    for i in 0..comptime!(count as usize) {
        sums[i] = Vector::new(0.0f32);
    }
    sums
}

/// Reduces the sums of the terms of `x`, which are neighbouring columns of a tile. A lane has the
/// sums of two columns in its lower row and in its upper one. One term: they stay as they are. Two
/// terms: the first of each row becomes the sum of both. Four terms: it becomes the sum of both and
/// of the neighbour's. Every lane of the plane must call this.
#[cube]
pub(super) fn add_terms(
    sums: Vector<f32, Const<4>>,
    #[comptime] terms: u32,
    #[comptime] target: Target,
) -> Vector<f32, Const<4>> {
    let mut added = sums;
    if comptime!(terms > 1) {
        #[unroll]
        for i in 0..2usize {
            let mut sum = sums.extract(comptime!(2 * i)) + sums.extract(comptime!(2 * i + 1));
            if comptime!(terms == 4) {
                sum += shuffle_xor(sum, 1u32, target);
            }
            added.insert(comptime!(2 * i), sum);
        }
    }
    added
}

/// Rows of `x` of which a lane has sums, where a row has so many terms.
pub(super) const fn lane_rows(terms: u32) -> u32 {
    if terms == 1 { 2 } else { 1 }
}

/// A lane's sums of one row of `x`, of a tile whose [terms are added](add_terms).
#[derive(CubeType, Clone, Copy)]
pub(super) struct RowSums {
    /// The row, among those of the tile.
    pub x_row: u32,
    /// Whether it is this lane that has the sums of all its terms.
    pub is_own: bool,
    /// Of the lane's lower row of weights, and of its upper one.
    pub low: f32,
    pub high: f32,
}

#[cube]
impl RowSums {
    /// Those of row `index` of the lane's [`lane_rows`].
    pub fn new(
        sums: Vector<f32, Const<4>>,
        #[comptime] index: u32,
        #[comptime] terms: u32,
    ) -> RowSums {
        let column = UNIT_POS_X % 4 * 2;
        RowSums {
            x_row: (column + index) / terms,
            is_own: modulo(column, terms) == 0,
            low: sums.extract(comptime!(index as usize)),
            high: sums.extract(comptime!(index as usize + 2)),
        }
    }

    /// Stores both: a tile's upper rows of weights are eight after its lower ones.
    pub fn store(&self, partials: &mut Shared<[f32]>, slot: u32) {
        partials[slot as usize] = self.low;
        partials[slot as usize + 8] = self.high;
    }
}

/// Adds a block's sum times its scales, those of a lane's two rows, to `sum`.
#[cube]
pub(super) fn add_scaled(
    sum: Vector<f32, Const<4>>,
    block: Vector<f32, Const<4>>,
    low: f32,
    high: f32,
) -> Vector<f32, Const<4>> {
    let mut total = sum;
    #[unroll]
    for i in 0..4usize {
        let scale = if comptime!(i < 2) { low } else { high };
        total.insert(i, sum.extract(i) + block.extract(i) * scale);
    }
    total
}

/// Undoes the scaling of `x` in a block's sums: multiplies those of a lane's two columns by the
/// factors of their rows of `x`.
#[cube]
pub(super) fn unscaled(
    block: Vector<f32, Const<4>>,
    first: f32,
    second: f32,
) -> Vector<f32, Const<4>> {
    let mut sums = block;
    #[unroll]
    for i in 0..4usize {
        let scale = if comptime!(i % 2 == 0) { first } else { second };
        sums.insert(i, block.extract(i) * scale);
    }
    sums
}
