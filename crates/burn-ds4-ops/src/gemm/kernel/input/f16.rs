//! Rows of `x` in `f16`, for FP8 weights that the hardware converts to `f16`: one instruction for
//! two of them, where decoding to `bf16` takes six.
//!
//! An `f16` has the digits of a `bf16` but not its range. So [`SCALE_COLUMNS`] neighbouring columns
//! of a row are multiplied by the power of two that takes the largest of them to between 2^14 and
//! 2^15, and their sums of products are divided by it. Numbers of at least 2^-28 of the largest
//! keep all of their digits; smaller ones keep the digits that are no less than 2^-38 of it.

use cubecl::prelude::*;

use super::{InputLayout, term_with_digits};
use crate::caps::Target;
use crate::intrinsics::{larger_bf16_magnitudes, multiply_bf16x2, pack_f16, shuffle_xor};

/// Columns that share a scale: those of an FP8 block.
pub(in crate::gemm::kernel) const SCALE_COLUMNS: u32 = 128;
/// The same in vec8s.
pub(in crate::gemm::kernel) const SCALE_VEC8S: u32 = SCALE_COLUMNS / 8;

/// Sign, exponent and the bits that an `f16` has of an f32's mantissa.
const F16_DIGITS: u32 = 0xffff_e000;

/// Term `term` of the vec8 that was [read](super::read_vec8), in `f16`, and the factor that undoes
/// its scaling in the sums of products. 16 neighbouring lanes hold the columns of one scale. Every
/// lane of the plane must call this.
#[cube]
pub(in crate::gemm::kernel) fn scaled_vec8<X: Numeric, N: Size>(
    read: &Array<Vector<u32, Const<4>>>,
    #[comptime] from: u32,
    inside: bool,
    term: u32,
    #[comptime] input: InputLayout,
    #[comptime] target: Target,
) -> (Vector<u32, Const<4>>, f32) {
    if comptime!(input.terms == 1) {
        let words = select(inside, read[from as usize], Vector::new(0u32));
        let magnitudes = larger_magnitudes(words, 0u32);
        let (factor, inverse) = block_factors(magnitudes, SCALE_VEC8S, target);
        (scaled_bf16(words, factor), inverse)
    } else {
        scaled_terms::<X, N>(read, from, inside, term, input, target)
    }
}

/// [`scaled_vec8`] of rows that are not `bf16`.
#[cube]
fn scaled_terms<X: Numeric, N: Size>(
    read: &Array<Vector<u32, Const<4>>>,
    #[comptime] from: u32,
    inside: bool,
    term: u32,
    #[comptime] input: InputLayout,
    #[comptime] target: Target,
) -> (Vector<u32, Const<4>>, f32) {
    let mut values = Array::<f32>::new(8usize);
    let mut largest = 0u32;
    #[unroll]
    for v in 0..input.vectors() {
        let words = read[comptime!((from + v) as usize)];
        let vector = Vector::<f32, N>::cast_from(Vector::<X, N>::reinterpret(words));
        #[unroll]
        for j in 0..comptime!(8 / input.vectors()) {
            let value = select(inside, vector.extract(comptime!(j as usize)), 0.0f32);
            let value = f32::reinterpret(term_with_digits(value, term, F16_DIGITS));
            values[comptime!((v * 8 / input.vectors() + j) as usize)] = value;
            largest = max(largest, u32::reinterpret(value) & 0x7fff_ffffu32);
        }
    }
    // Exponents are what counts, and a `bf16` has them all.
    let magnitudes = largest & 0xffff_0000u32;
    let (factor, inverse) = block_factors(magnitudes, SCALE_VEC8S, target);
    let mut pairs = Vector::<u32, Const<4>>::new(0u32);
    #[unroll]
    for i in 0..4usize {
        let low = values[comptime!(2 * i)] * factor;
        let high = values[comptime!(2 * i + 1)] * factor;
        pairs.insert(i, pack_f16(low, high));
    }
    (pairs, inverse)
}

/// The larger magnitudes of `so_far` and of the pairs of a vec8 of `bf16`, of its even and of its
/// odd columns, with signs of no meaning. NaN does not count: sums with it are NaN anyway.
#[cube]
pub(in crate::gemm::kernel) fn larger_magnitudes(words: Vector<u32, Const<4>>, so_far: u32) -> u32 {
    let mut magnitudes = so_far;
    #[unroll]
    for i in 0..4usize {
        magnitudes = larger_bf16_magnitudes(magnitudes, words.extract(i));
    }
    magnitudes
}

/// The factor of the columns that `lanes` neighbouring lanes have, by the larger
/// [magnitudes](larger_magnitudes) of each, and its inverse: powers of two that a `bf16` has. Both
/// have the exponents of normal numbers, whatever the largest is. Every lane of the plane must call
/// this.
#[cube]
pub(in crate::gemm::kernel) fn block_factors(
    magnitudes: u32,
    #[comptime] lanes: u32,
    #[comptime] target: Target,
) -> (f32, f32) {
    let mut magnitudes = magnitudes;
    #[unroll]
    for distance in 0..comptime!(lanes.ilog2()) {
        let mask = comptime!(1u32 << distance);
        let other = shuffle_xor(f32::reinterpret(magnitudes), mask, target);
        magnitudes = larger_bf16_magnitudes(magnitudes, u32::reinterpret(other));
    }
    let even = magnitudes >> 7 & 0xffu32;
    let odd = magnitudes >> 23 & 0xffu32;
    let exponent = min(max(max(even, odd), 15u32), 254u32);
    (
        f32::reinterpret((268u32 - exponent) << 23),
        f32::reinterpret((exponent - 14u32) << 23),
    )
}

/// A vec8 of `bf16`, each value times `factor`, a power of two that a `bf16` has, in `f16`. What is
/// too small for a `bf16` then is too small for an `f16` as well.
#[cube]
pub(in crate::gemm::kernel) fn scaled_bf16(
    words: Vector<u32, Const<4>>,
    factor: f32,
) -> Vector<u32, Const<4>> {
    let factor = u32::reinterpret(factor);
    let factors = factor | factor >> 16;
    let mut pairs = Vector::<u32, Const<4>>::new(0u32);
    #[unroll]
    for i in 0..4usize {
        let pair = multiply_bf16x2(words.extract(i), factors);
        // A `bf16` is the upper half of an f32.
        let low = f32::reinterpret(pair << 16);
        let high = f32::reinterpret(pair & 0xffff_0000u32);
        pairs.insert(i, pack_f16(low, high));
    }
    pairs
}
