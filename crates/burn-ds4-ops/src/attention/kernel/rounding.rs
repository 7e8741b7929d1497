//! Rounding to small formats, to the bits of [`fp8_roundtrip`](crate::quant::fp8_roundtrip) and
//! [`fp4_roundtrip`](crate::quant::fp4_roundtrip).

use cubecl::prelude::*;

use crate::quant::roundtrip::RoundtripFormat;

/// The bits of an f32's mantissa, and the bias of its exponent.
const MANTISSA: u32 = 23;
const BIAS: u32 = 127;

/// `2^(exponent - BIAS)`.
#[cube]
fn power_of_two(exponent: u32) -> f32 {
    f32::reinterpret(exponent << MANTISSA)
}

/// The biased exponent of a block's scale: the smallest power of two whose product with the
/// format's largest value is no less than the block's largest magnitude, which is finite.
#[cube]
pub(super) fn scale_of(largest: f32, #[comptime] format: RoundtripFormat) -> u32 {
    let bits = u32::reinterpret(max(largest, comptime!(format.amax_floor)));
    let limit = comptime!(format.max.to_bits());
    let mantissa = comptime!((1u32 << MANTISSA) - 1);
    let above = (bits & mantissa) > comptime!(limit & mantissa);
    let exponent = (bits >> MANTISSA) - comptime!((limit >> MANTISSA) - BIAS);
    exponent + select(above, 1u32, 0u32)
}

/// `x` rounded to the nearest value of the format times the scale, ties to even. An `x` that is not
/// finite stays.
#[cube]
pub(super) fn rounded(x: f32, scale: u32, #[comptime] format: RoundtripFormat) -> f32 {
    let bits = u32::reinterpret(x) & 0x7fff_ffffu32;
    let scaled = f32::reinterpret(bits) * power_of_two(comptime!(2 * BIAS) - scale);
    // Below the normal values, the spacing is that of the smallest normal ones.
    let lowest = comptime!((BIAS as i32 + format.min_exponent) as u32);
    let exponent = max(u32::reinterpret(scaled) >> MANTISSA, lowest);
    let unit = exponent - comptime!(format.mantissa_bits as u32);
    let steps = nearest(scaled * power_of_two(comptime!(2 * BIAS) - unit));
    let magnitude = steps * power_of_two(unit) * power_of_two(scale);
    let value = select(x < 0.0f32, -magnitude, magnitude);
    select(bits < 0x7f80_0000u32, value, x)
}

/// The nearest integer, ties to even, of a small number that is not negative.
#[cube]
fn nearest(x: f32) -> f32 {
    let down = x.floor();
    let rest = x - down;
    let odd = down - 2.0f32 * (down * 0.5f32).floor();
    let up = rest > 0.5f32 || (rest == 0.5f32 && odd == 1.0f32);
    down + select(up, 1.0f32, 0.0f32)
}
