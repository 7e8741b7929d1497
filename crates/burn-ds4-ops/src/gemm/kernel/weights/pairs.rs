use cubecl::prelude::*;

use super::decode::{
    WeightFormat, fp4_factor, fp4_first_factor, fp4_pair, fp4_second_factor, fp8_nan, fp8_pair,
    fp8_pair_with_nan,
};
use crate::intrinsics::{e4m3_to_f16, multiply_pairs};

/// Adds a block's sum times its scales, those of a lane's two rows, to `sum`.
#[cube]
pub(in crate::gemm::kernel) fn add_scaled(
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
pub(in crate::gemm::kernel) fn unscaled(
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

/// Decodes pair `i` of vec8 `u` of a lane's 16 bytes, FP8 into `f16` with `f16_input`. `scale` is
/// the code of an FP4 scale; FP8 scales are not applied here.
#[cube]
pub(in crate::gemm::kernel) fn weight_pair(
    words: Vector<u32, Const<4>>,
    scale: u32,
    #[comptime] u: usize,
    #[comptime] i: usize,
    #[comptime] format: WeightFormat,
    #[comptime] f16_input: bool,
    #[comptime] rare: bool,
) -> u32 {
    match comptime!(format) {
        WeightFormat::Fp4 => {
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
        WeightFormat::Fp8 => {
            let word = words.extract(comptime!(2 * u + i / 2));
            if comptime!(f16_input) {
                e4m3_to_f16(word, comptime!(i % 2 == 1))
            } else if comptime!(rare) {
                fp8_pair_with_nan(word, comptime!(i % 2))
            } else {
                multiply_pairs(fp8_pair(word, comptime!(i % 2)), 0x7b80_7b80u32)
            }
        }
        WeightFormat::Dense => words.extract(i),
    }
}

/// A word that is not 0 if decoding `words` takes the slow path: for an FP4 scale above two, or an
/// FP8 code that is NaN.
#[cube]
pub(in crate::gemm::kernel) fn rare_bits(
    words: Vector<u32, Const<4>>,
    scale: u32,
    #[comptime] format: WeightFormat,
) -> u32 {
    match comptime!(format) {
        WeightFormat::Fp4 => scale & 0x80u32,
        WeightFormat::Fp8 => {
            fp8_nan(words.extract(0usize))
                | fp8_nan(words.extract(1usize))
                | fp8_nan(words.extract(2usize))
                | fp8_nan(words.extract(3usize))
        }
        WeightFormat::Dense => 0u32.runtime(),
    }
}
