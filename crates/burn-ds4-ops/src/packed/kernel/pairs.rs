use cubecl::prelude::*;

use super::decode::{
    Format, fp4_factor, fp4_first_factor, fp4_pair, fp4_second_factor, fp8_nan, fp8_pair,
    fp8_pair_with_nan,
};
use crate::intrinsics::{e4m3_to_halves, multiply_pairs};

/// `sum` and a block's sum times its scales, of a lane's two rows.
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

/// A block's sums divided by the scales of the rows of `x` that they are of, which are those of a lane's two columns.
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

/// The pair `i` of the columns of a lane's 16 bytes that are its unit `u`; `halves`, FP8 in `f16`. `scale` is an FP4 code; FP8 weights come
/// without theirs.
#[cube]
pub(super) fn weight_pair(
    words: Vector<u32, Const<4>>,
    scale: u32,
    #[comptime] u: usize,
    #[comptime] i: usize,
    #[comptime] format: Format,
    #[comptime] halves: bool,
    #[comptime] rare: bool,
) -> u32 {
    match comptime!(format) {
        Format::Fp4 => {
            let pair = fp4_pair(words.extract(u), i);
            if comptime!(rare) {
                multiply_pairs(
                    multiply_pairs(pair, fp4_first_factor(scale)),
                    fp4_second_factor(scale),
                )
            } else {
                multiply_pairs(pair, fp4_factor(scale))
            }
        }
        Format::Fp8 => {
            let word = words.extract(comptime!(2 * u + i / 2));
            if comptime!(halves) {
                e4m3_to_halves(word, comptime!(i % 2 == 1))
            } else if comptime!(rare) {
                fp8_pair_with_nan(word, comptime!(i % 2))
            } else {
                multiply_pairs(fp8_pair(word, comptime!(i % 2)), 0x7b80_7b80u32)
            }
        }
        Format::Dense => words.extract(i),
    }
}

/// What is not 0 if `words`, or the scale, need more than the usual.
#[cube]
pub(super) fn rare_bits(
    words: Vector<u32, Const<4>>,
    scale: u32,
    #[comptime] format: Format,
) -> u32 {
    match comptime!(format) {
        Format::Fp4 => scale & 0x80u32,
        Format::Fp8 => {
            fp8_nan(words.extract(0usize))
                | fp8_nan(words.extract(1usize))
                | fp8_nan(words.extract(2usize))
                | fp8_nan(words.extract(3usize))
        }
        Format::Dense => 0u32.runtime(),
    }
}
