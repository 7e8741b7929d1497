//! The bins of keys in the first pass of a search, and bounds by them.

use cubecl::prelude::*;

use crate::caps::Target;
use crate::intrinsics::{f16_to_f32, ordered_f16};
use crate::select::key::{HIGHEST, NONE, SIGN, ZERO, float_of, key_of};

/// The last column of the longest row.
const MAX_COLUMN: u32 = (1 << 23) - 1;

/// Binary logarithm of the number of bins.
pub(super) const LOG2_BINS: u32 = 11;
pub(super) const BINS: u32 = 1 << LOG2_BINS;
/// Magnitudes from here on, over 32 powers of two, have bins that are a 32nd of a power of two
/// wide. All smaller ones share a bin; larger ones share the last bin of their sign.
const FIRST: u32 = (127 - 16) << 23;
const LOG2_WIDTH: u32 = 18;
/// Number of keys of either sign that have bins of that width.
const RANGE: u32 = 32 << 23;
/// The lowest such key among the negative numbers and among the positive ones.
const NEGATIVE: u32 = ZERO - FIRST - RANGE + 1;
const POSITIVE: u32 = ZERO + FIRST;
/// Low bits of an f16 that make no difference to the bin.
const F16_SHIFT: u32 = 5;
/// The bin of zero, and the number of bins from there to that of infinity.
const F16_ZERO: u32 = BINS / 2;
const F16_INFINITY: u32 = 0x7c00 >> F16_SHIFT;
/// The bits of the smallest magnitude that is not truncated to zero.
const F16_LOWEST: u32 = (127 - 24) << 23;

/// The float of a key, to be subtracted from elements: the sign bit of the difference is set only
/// if the element is lower. Zero becomes `-0.0`, as the bit is set in `-0.0 - 0.0`, but not in
/// `-0.0 - -0.0`.
#[cube]
pub(super) fn lower_bound_of(key: u32) -> f32 {
    f32::reinterpret(select(key == ZERO, SIGN, u32::reinterpret(float_of(key))))
}

/// A key that is larger for lower columns, for a second search among columns whose elements are
/// equal.
#[cube]
pub(super) fn key_of_column(column: u32) -> u32 {
    comptime!(MAX_COLUMN + 1) - column
}

/// The bins of two floats, the first in the low half of the word. Larger floats have larger bins or
/// the same.
#[cube]
pub(super) fn bins_of(a: f32, b: f32, #[comptime] target: Target) -> u32 {
    if comptime!(target.is_at_least(80)) {
        // Clears the bits that the shift moves from one half of the word into the other.
        (ordered_f16(a, b) >> F16_SHIFT) & comptime!(((BINS - 1) << 16) | (BINS - 1))
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

/// The lowest key of a bin. For the bin after the last, one more than the key of `+inf`.
#[cube]
pub(super) fn first_key(bin: u32, #[comptime] target: Target) -> u32 {
    let after = comptime!(HIGHEST + 1);
    if comptime!(target.is_at_least(80)) {
        // A negative bin ends where that of the next magnitude begins.
        let negative = bin < F16_ZERO;
        let magnitude = select(negative, F16_ZERO - bin, bin - F16_ZERO);
        let bits = u32::reinterpret(f16_to_f32(magnitude << F16_SHIFT));
        let key = select(negative, comptime!(ZERO + 1) - bits, ZERO + bits);
        let key = select(bin == F16_ZERO, comptime!(ZERO - F16_LOWEST + 1), key);
        let infinite = select(negative, comptime!(NONE + 1), after);
        select(magnitude > F16_INFINITY, infinite, key)
    } else {
        let position = bin << LOG2_WIDTH;
        let negative = NEGATIVE + position;
        let positive = comptime!(POSITIVE - (RANGE - 1)) + position;
        let key = select(position < RANGE, negative, positive);
        let key = select(bin == 0, comptime!(NONE + 1), key);
        select(bin == BINS, after, key)
    }
}
