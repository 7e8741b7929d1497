//! Rounding to small formats and back in plain tensor operations. `x` is `[rows, columns]` in f32,
//! and no dimension is zero.

use super::{E2M1, E4M3, RoundtripFormat, hadamard_scale, power_of_two};
use crate::dims::Dims;
use crate::reference::prelude::*;

/// Descending sum of 255, which covers every scale exponent; in parts that keep all factors normal.
const SCALE_STEPS: [i32; 9] = [64, 64, 64, 32, 16, 8, 4, 2, 1];

/// In blocks of at most `block` elements of a row, the last of which may be partial.
pub(crate) fn roundtrip<B: Backend>(
    x: FloatTensor<B>,
    block: usize,
    format: &RoundtripFormat,
) -> FloatTensor<B> {
    by_blocks::<B>(x, block, |magnitude, largest| {
        let (scale, inverse) = block_scale::<B>(largest, format);
        let of_block = |factor| B::float_expand(factor, magnitude.shape());
        let scaled = B::float_mul(magnitude.clone(), of_block(inverse));
        B::float_mul(round_magnitude::<B>(scaled, format), of_block(scale))
    })
}

/// Rounds to E2M1 with scales that are themselves rounded to E4M3: a sixth of the largest magnitude
/// of a block. Blocks as in [`roundtrip`].
pub(crate) fn roundtrip_scaled<B: Backend>(x: FloatTensor<B>, block: usize) -> FloatTensor<B> {
    let least = E2M1.max * power_of_two(E4M3.min_exponent - E4M3.mantissa_bits);
    by_blocks::<B>(x, block, |magnitude, largest| {
        let largest = B::float_clamp_min(largest, least.into());
        let scale = B::float_div_scalar(largest, E2M1.max.into());
        let scale = B::float_clamp_max(scale, E4M3.max.into());
        let scale = B::float_expand(round_magnitude::<B>(scale, &E4M3), magnitude.shape());
        let scaled = B::float_div(magnitude, scale.clone());
        let scaled = B::float_clamp_max(scaled, E2M1.max.into());
        B::float_mul(round_magnitude::<B>(scaled, &E2M1), scale)
    })
}

/// Rounds the magnitudes of blocks, `[blocks, block]`, given the largest of each, `[blocks, 1]`.
/// What is not finite stays, and has no part in the largest.
fn by_blocks<B: Backend>(
    x: FloatTensor<B>,
    block: usize,
    round: impl FnOnce(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let device = x.device();
    let mask_dtype = bool_dtype::<B>(&device);
    let [rows, columns] = x.dims();
    let block = block.min(columns);
    let blocks = columns.div_ceil(block);
    let not_finite = B::bool_or(
        B::float_is_nan(x.clone(), mask_dtype),
        B::float_is_inf(x.clone(), mask_dtype),
    );
    let mut magnitude = B::float_mask_fill(B::float_abs(x.clone()), not_finite.clone(), 0.0.into());
    let padding = blocks * block - columns;
    if padding > 0 {
        let zeros = B::float_zeros([rows, padding].into(), &device, FloatDType::F32);
        magnitude = B::float_cat(vec![magnitude, zeros], 1);
    }
    let magnitude = reshape::<B>(magnitude, [rows * blocks, block]);
    let largest = B::float_max_dim(magnitude.clone(), 1);
    let rounded = round(magnitude, largest);
    let rounded = reshape::<B>(rounded, [rows, blocks * block]);
    let rounded = slice::<B>(rounded, 1, 0..columns);
    let negative = B::float_lower_elem(x.clone(), 0.0.into(), mask_dtype);
    let rounded = B::float_mask_where(rounded.clone(), negative, B::float_neg(rounded));
    B::float_mask_where(rounded, not_finite, x)
}

/// The smallest power of two `s >= 2^min_scale_exponent` with `amax <= max * s`, and `1 / s`.
///
/// That is `2^ceil(log2(amax / max))` without a logarithm or a division, which devices round
/// differently. Each step asks whether the exponent is still at least that many doublings away.
fn block_scale<B: Backend>(
    amax: FloatTensor<B>,
    format: &RoundtripFormat,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let lowest = power_of_two(format.min_scale_exponent);
    let mut scale = full_like::<B>(&amax, lowest);
    let mut inverse = full_like::<B>(&amax, power_of_two(-format.min_scale_exponent));
    let mut amax = B::float_clamp_min(amax, format.amax_floor.into());
    let mask_dtype = bool_dtype::<B>(&amax.device());
    for step in SCALE_STEPS {
        let limit = format.max * lowest * power_of_two(step - 1);
        let above = B::float_greater_elem(amax.clone(), limit.into(), mask_dtype);
        let (up, down) = (power_of_two(step), power_of_two(-step));
        amax = times_where::<B>(amax, above.clone(), down);
        scale = times_where::<B>(scale, above.clone(), up);
        inverse = times_where::<B>(inverse, above, down);
    }
    (scale, inverse)
}

/// Nearest value of the format, ties to even; `0 <= x <= max`.
///
/// Moves every normal value into the lowest normal binade, where neighbours lie as far apart as the
/// subnormal values do, so that one rounding to integers serves both.
fn round_magnitude<B: Backend>(x: FloatTensor<B>, format: &RoundtripFormat) -> FloatTensor<B> {
    let spacing = format.min_exponent - format.mantissa_bits;
    let mask_dtype = bool_dtype::<B>(&x.device());
    let mut unit = full_like::<B>(&x, power_of_two(spacing));
    let mut x = x;
    for &step in format.exponent_steps {
        let limit = power_of_two(format.min_exponent + step);
        let above = B::float_greater_equal_elem(x.clone(), limit.into(), mask_dtype);
        x = times_where::<B>(x, above.clone(), power_of_two(-step));
        unit = times_where::<B>(unit, above, power_of_two(step));
    }
    let steps = B::float_round(B::float_mul_scalar(x, power_of_two(-spacing).into()));
    B::float_mul(steps, unit)
}

fn full_like<B: Backend>(x: &FloatTensor<B>, value: f32) -> FloatTensor<B> {
    B::float_full(x.shape(), value.into(), &x.device(), FloatDType::F32)
}

fn times_where<B: Backend>(x: FloatTensor<B>, mask: BoolTensor<B>, factor: f32) -> FloatTensor<B> {
    B::float_mask_where(x.clone(), mask, B::float_mul_scalar(x, factor.into()))
}

/// Butterflies from the innermost stride outwards.
pub(crate) fn hadamard<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let [rows, columns] = x.dims();
    let mut x = x;
    let mut stride = 1;
    while stride < columns {
        let pairs = Shape::new([rows * columns / (2 * stride), 2, stride]);
        let pairs = B::float_reshape(x, pairs);
        let low = slice::<B>(pairs.clone(), 1, 0..1);
        let high = slice::<B>(pairs, 1, 1..2);
        let sums = vec![
            B::float_add(low.clone(), high.clone()),
            B::float_sub(low, high),
        ];
        x = reshape::<B>(B::float_cat(sums, 1), [rows, columns]);
        stride *= 2;
    }
    B::float_mul_scalar(x, hadamard_scale(columns).into())
}
