//! Integer keys in the order of the floats that they stand for.

use cubecl::prelude::*;

/// The key of zero. The key of a number differs from it by the bits of its magnitude.
pub(crate) const ZERO: u32 = 0x8000_0000;
/// The key of `-inf` and of NaN. No element has a lower one.
pub(crate) const LOWEST: u32 = ZERO - INFINITY;
/// The key of `+inf`.
pub(crate) const HIGHEST: u32 = ZERO + INFINITY;
/// The key of no element.
pub(crate) const NONE: u32 = 0;
/// The bits of `inf`, and those of a magnitude.
pub(crate) const INFINITY: u32 = 0x7f80_0000;
pub(crate) const MAGNITUDE: u32 = 0x7fff_ffff;
/// The sign bit.
pub(crate) const SIGN: u32 = !MAGNITUDE;

/// The key of a float: larger for larger numbers, and the same for zeros of either sign.
#[cube]
pub(crate) fn key_of(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let magnitude = bits & MAGNITUDE;
    let signed = select(bits > MAGNITUDE, !magnitude + 1, magnitude);
    // Comparisons of the bits, as the compiler may assume that floats it compares are not NaN.
    select(magnitude > INFINITY, LOWEST, signed + ZERO)
}

/// The float of a key, or `-inf` if the key is lower than that of any float.
#[cube]
pub(crate) fn float_of(key: u32) -> f32 {
    let key = max(key, LOWEST);
    f32::reinterpret(select(key < ZERO, 0u32 - key, key - ZERO))
}
