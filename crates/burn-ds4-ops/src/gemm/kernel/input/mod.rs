//! Rows of `x` as operands.

mod f16;

use cubecl::prelude::*;

use super::weights::WeightFormat;
use crate::intrinsics::modulo;

pub(super) use f16::{
    SCALE_COLUMNS, SCALE_VEC8S, block_factors, larger_magnitudes, scaled_bf16, scaled_vec8,
};

/// How the rows of `x` become operands: pairs of `bf16` in the order in which weights are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct InputLayout {
    /// How the weights are stored.
    pub format: WeightFormat,
    /// Terms in `bf16` of an element of `x`: one for `bf16`, two for `f16`, four (the last is 0)
    /// for `f32`.
    pub terms: u32,
    /// Whether `x` is in that order already, and each of its terms is a row: see
    /// [`permuted_column`].
    pub permuted: bool,
    /// Whether `x` becomes `f16` instead, its columns in their own order, with a scale for every
    /// [`SCALE_COLUMNS`](f16::SCALE_COLUMNS) of them, while the hardware converts FP8
    /// weights to `f16`. Rows are not `permuted` then.
    pub f16_input: bool,
}

impl InputLayout {
    /// Vectors of `x` in a vec8.
    pub const fn vectors(self) -> u32 {
        if self.terms == 4 && !self.permuted {
            2
        } else {
            1
        }
    }
}

/// Term `term` of `value`, in the upper half of a word. The terms add up to `value`.
#[cube]
pub(crate) fn term_of(value: f32, term: u32) -> u32 {
    term_with_digits(value, term, 0xffff_0000u32)
}

/// [`term_of`] with terms of the bits in `digits`. Three such terms hold all bits of an `f32`.
#[cube]
pub(super) fn term_with_digits(value: f32, term: u32, #[comptime] digits: u32) -> u32 {
    let bits = u32::reinterpret(value);
    let magnitude = bits & 0x7fff_ffffu32;
    // The set bits of a NaN's mantissa may all be in the lower half.
    let first = select(magnitude > 0x7f80_0000u32, 0x7fc0_0000u32, bits & digits);
    let rest = select(
        magnitude < 0x7f80_0000u32,
        value - f32::reinterpret(first),
        0.0f32,
    );
    let second = u32::reinterpret(rest) & digits;
    let third = u32::reinterpret(rest - f32::reinterpret(second)) & digits;
    let late = select(term == 2u32, third, 0u32);
    select(term == 0u32, first, select(term == 1u32, second, late))
}

/// Packs the upper 16 bits of two words, which are `bf16` values.
#[cube]
pub(crate) fn bf16_pair(low: u32, high: u32) -> u32 {
    (low >> 16) | (high & 0xffff_0000u32)
}

/// Begins to read a vec8 of a row of `x` into `read`, from index `to` on. `row` is the first vector
/// of the row in `x`, `vec8` counts from the beginning of the row.
#[cube]
pub(crate) fn read_vec8<X: Numeric, N: Size>(
    x: &[Vector<X, N>],
    row: usize,
    vec8: u32,
    read: &mut Array<Vector<u32, Const<4>>>,
    #[comptime] to: u32,
    #[comptime] input: InputLayout,
) {
    #[unroll]
    for v in 0..input.vectors() {
        let at = row + (vec8 * comptime!(input.vectors()) + v) as usize;
        read[comptime!((to + v) as usize)] = Vector::<u32, Const<4>>::reinterpret(x[at]);
    }
}

/// Term `term` of the vec8 that was [read](read_vec8), as four pairs of `bf16` in the order in
/// which weights are decoded.
#[cube]
pub(crate) fn ordered_vec8<X: Numeric, N: Size>(
    read: &Array<Vector<u32, Const<4>>>,
    #[comptime] from: u32,
    term: u32,
    #[comptime] input: InputLayout,
) -> Vector<u32, Const<4>> {
    let order = comptime!(input.format.order());
    let words = read[from as usize];
    let mut pairs = Vector::<u32, Const<4>>::new(0u32);
    if comptime!(input.permuted) {
        pairs = words;
    } else if comptime!(input.terms == 1) {
        #[unroll]
        for i in 0..4usize {
            let (a, b) = comptime!(order[i]);
            let low = words.extract(comptime!(a as usize / 2));
            let high = words.extract(comptime!(b as usize / 2));
            let low = if comptime!(a % 2 == 0) {
                low << 16
            } else {
                low
            };
            let high = if comptime!(b % 2 == 0) {
                high << 16
            } else {
                high
            };
            pairs.insert(i, bf16_pair(low, high));
        }
    } else {
        let mut values = Array::<u32>::new(8usize);
        let vectors = comptime!(input.vectors());
        #[unroll]
        for v in 0..vectors {
            let words = read[comptime!((from + v) as usize)];
            let vector = Vector::<f32, N>::cast_from(Vector::<X, N>::reinterpret(words));
            #[unroll]
            for j in 0..comptime!(8 / vectors as usize) {
                values[comptime!(v as usize * 8 / vectors as usize + j)] =
                    term_of(vector.extract(j), term);
            }
        }
        #[unroll]
        for i in 0..4usize {
            let (a, b) = comptime!(order[i]);
            pairs.insert(
                i,
                bf16_pair(values[comptime!(a as usize)], values[comptime!(b as usize)]),
            );
        }
    }
    pairs
}

/// The position of a vec8 in a row that is in the order in which lanes read it: first the first
/// vec8 of the 16 bytes of each of four lanes, then the second ones.
#[cube]
pub(crate) fn vec8_slot(vec8: u32, #[comptime] format: WeightFormat) -> u32 {
    let vec8s = comptime!(format.vec8s());
    vec8 / (4 * vec8s) * (4 * vec8s) + modulo(vec8, vec8s) * 4 + vec8 / vec8s % 4
}

/// The vec8 at a position: the inverse of [`vec8_slot`].
#[cube]
pub(crate) fn vec8_at(slot: u32, #[comptime] format: WeightFormat) -> u32 {
    let vec8s = comptime!(format.vec8s());
    slot / (4 * vec8s) * (4 * vec8s) + slot % 4 * vec8s + modulo(slot / 4, vec8s)
}

/// The position of a column in such a row, where the columns of a vec8 are in the order in which
/// weights are decoded.
#[cube]
pub(crate) fn permuted_column(column: u32, #[comptime] format: WeightFormat) -> u32 {
    let inside = match comptime!(format) {
        WeightFormat::Fp4(_) => column % 4 * 2 + column / 4 % 2,
        WeightFormat::Fp8 | WeightFormat::Fp8Blocks32 => {
            column / 4 % 2 * 4 + column % 2 * 2 + column / 2 % 2
        }
        WeightFormat::Dense => column % 8,
    };
    vec8_slot(column / 8, format) * 8 + inside
}

/// Columns of such a row with its padding.
#[cube]
pub(crate) fn padded_columns(columns: u32, #[comptime] format: WeightFormat) -> u32 {
    (columns + comptime!(format.k_step() - 1)) / comptime!(format.k_step())
        * comptime!(format.k_step())
}
