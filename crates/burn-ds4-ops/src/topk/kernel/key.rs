//! Integers in the order of the floats they stand for, and a first, coarse division of them into bins.

use cubecl::prelude::*;

use crate::intrinsics::{Target, half_to_float, ordered_halves};

/// The key of zero. A number's key differs from it by its magnitude's bits.
const ZERO: u32 = 0x8000_0000;
/// The key of `-inf`, and of NaN. Every element has at least this.
pub(crate) const LOWEST: u32 = ZERO - INFINITY;
/// No element.
pub(super) const NONE: u32 = 0;
const INFINITY: u32 = 0x7f80_0000;
const MAGNITUDE: u32 = 0x7fff_ffff;
const SIGN: u32 = !MAGNITUDE;
/// The magnitude of the smallest normal number.
const NORMAL: u32 = 1 << 23;

/// The last column of the longest row.
const MAX_COLUMN: u32 = (1 << 23) - 1;

/// Binary logarithm of the number of bins.
pub(super) const LOG2_BINS: u32 = 11;
pub(super) const BINS: u32 = 1 << LOG2_BINS;
/// Magnitudes from here on, for 32 powers of two, have bins of a 32nd of a power of two each. What is smaller shares a bin, as does
/// what is larger with the last of its sign.
const FIRST: u32 = (127 - 16) << 23;
const LOG2_WIDTH: u32 = 18;
/// Keys of either sign that have bins of that width.
const RANGE: u32 = 32 << 23;
/// The lowest of the negative and of the positive ones.
const NEGATIVE: u32 = ZERO - FIRST - RANGE + 1;
const POSITIVE: u32 = ZERO + FIRST;
/// Of half precision, bits that make no difference to the bin.
const HALF_SHIFT: u32 = 5;
/// The bin of zero, and as many bins further that of infinity.
const HALF_ZERO: u32 = BINS / 2;
const HALF_INFINITY: u32 = 0x7c00 >> HALF_SHIFT;
/// The bits of the lowest magnitude that is not cut to zero.
const HALF_LOWEST: u32 = (127 - 24) << 23;

/// Larger for larger numbers, the same for zeros of either sign.
#[cube]
pub(crate) fn key_of(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let magnitude = bits & MAGNITUDE;
    let signed = select(bits > MAGNITUDE, !magnitude + 1, magnitude);
    // A comparison of floats may take it for granted that there is no NaN.
    select(magnitude > INFINITY, LOWEST, signed + ZERO)
}

/// The float of a key, or the first that is one.
#[cube]
pub(crate) fn float_of(key: u32) -> f32 {
    let key = max(key, LOWEST);
    f32::reinterpret(select(key < ZERO, 0u32 - key, key - ZERO))
}

/// The float of a key from which an element that is not lower is subtracted without a change to the sign: zero is negative, as
/// `-0.0 - 0.0` is, but not `-0.0 - -0.0`.
#[cube]
pub(super) fn lower_bound_of(key: u32) -> f32 {
    f32::reinterpret(select(key == ZERO, SIGN, u32::reinterpret(float_of(key))))
}

/// Whether a comparison of floats finds the same keys to be lower as one of keys, even if it rounds the smallest to zero.
#[cube]
pub(super) fn is_comparable(key: u32) -> bool {
    let magnitude = select(key < ZERO, ZERO - key, key - ZERO);
    magnitude - NORMAL < INFINITY - NORMAL
}

/// In the order of a row, reversed: for a second search among columns whose keys are equal.
#[cube]
pub(super) fn key_of_column(column: u32) -> u32 {
    comptime!(MAX_COLUMN + 1) - column
}

/// The bins of two floats, the first in the lower half: larger or the same for larger floats.
#[cube]
pub(super) fn bins_of(a: f32, b: f32, #[comptime] target: Target) -> u32 {
    if target.ptx {
        // Both halves have to be cut off what they get of the other.
        (ordered_halves(a, b) >> HALF_SHIFT) & comptime!(((BINS - 1) << 16) | (BINS - 1))
    } else {
        bin_of(key_of(a)) | (bin_of(key_of(b)) << 16)
    }
}

#[cube]
fn bin_of(key: u32) -> u32 {
    let negative = clamp(key, NEGATIVE, comptime!(NEGATIVE + RANGE - 1)) - NEGATIVE;
    let positive = clamp(key, POSITIVE, comptime!(POSITIVE + RANGE - 1)) - POSITIVE;
    (negative + positive) >> LOG2_WIDTH
}

/// The lowest key of a bin; of the bin after the last, one more than that of `+inf`.
#[cube]
pub(super) fn first_key(bin: u32, #[comptime] target: Target) -> u32 {
    let after = comptime!(ZERO + INFINITY + 1);
    if target.ptx {
        // A negative bin ends where that of the next magnitude begins.
        let negative = bin < HALF_ZERO;
        let magnitude = select(negative, HALF_ZERO - bin, bin - HALF_ZERO);
        let bits = u32::reinterpret(half_to_float(magnitude << HALF_SHIFT));
        let key = select(negative, comptime!(ZERO + 1) - bits, ZERO + bits);
        let key = select(bin == HALF_ZERO, comptime!(ZERO - HALF_LOWEST + 1), key);
        let infinite = select(negative, comptime!(NONE + 1), after);
        select(magnitude > HALF_INFINITY, infinite, key)
    } else {
        let position = bin << LOG2_WIDTH;
        let negative = NEGATIVE + position;
        let positive = comptime!(POSITIVE - (RANGE - 1)) + position;
        let key = select(position < RANGE, negative, positive);
        let key = select(bin == 0, comptime!(NONE + 1), key);
        select(bin == BINS, after, key)
    }
}
