//! Arithmetic that has a form without PTX.

use cubecl::prelude::*;

use crate::caps::Target;

/// `log1p(t) / t` for `t` in 0..=1 as a polynomial, highest power first; relative error 3e-8
/// (minimax, by Remez).
pub(crate) const LOG1P: &[f32] = &[
    0.005_232_69,
    -0.029_505_22,
    0.078_225_92,
    -0.136_632_43,
    0.191_060_05,
    -0.248_429_82,
    0.333_190_97,
    -0.499_994_93,
    0.999_999_97,
];

/// `x % by`. CubeCL 0.11.3 has a rule that makes `x` of `x % 1`, which applies wherever no other
/// rule has made 0 of it before.
#[cube]
pub(crate) fn modulo(x: u32, #[comptime] by: u32) -> u32 {
    if comptime!(by == 1) {
        0u32.runtime()
    } else {
        x % by
    }
}

/// A polynomial. The coefficients are in the order of falling powers.
#[cube]
// Compile-time values must be accessed by index.
#[allow(clippy::needless_range_loop)]
pub(crate) fn polynomial(t: f32, #[comptime] coefficients: &[f32]) -> f32 {
    let mut sum = coefficients[0].runtime();
    #[unroll]
    for i in 1..comptime!(coefficients.len()) {
        sum = fma(sum, t, comptime!(coefficients[i]));
    }
    sum
}

/// `e^x` to about `2 + |x|` ulp; results below the normal range may be 0.
#[cube]
pub(crate) fn exp(x: f32, #[comptime] target: Target) -> f32 {
    if target.ptx {
        let y: f32;
        let x = x * std::f32::consts::LOG2_E;
        gpu_asm!("ex2.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) x, options(pure, nomem));
        y
    } else {
        x.exp()
    }
}

/// `sqrt(x)` to about 2 ulp.
#[cube]
pub(crate) fn sqrt(x: f32, #[comptime] target: Target) -> f32 {
    if target.ptx {
        let y: f32;
        // A variable would be passed as its address; a result is not.
        let x = f32::reinterpret(u32::reinterpret(x));
        gpu_asm!("sqrt.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) x, options(pure, nomem));
        y
    } else {
        x.sqrt()
    }
}

/// `1 / x` to about 2 ulp, for an `x` whose reciprocal is in the normal range.
#[cube]
pub(crate) fn reciprocal(x: f32, #[comptime] target: Target) -> f32 {
    if target.ptx {
        let y: f32;
        let x = f32::reinterpret(u32::reinterpret(x));
        gpu_asm!("rcp.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) x, options(pure, nomem));
        y
    } else {
        1.0f32 / x
    }
}

/// `1 / sqrt(sum / count + epsilon)` to about 3 ulp: the factor of an RMS norm, from the sum of
/// squares of `count` numbers. Where reads for what follows are on their way meanwhile, and are not
/// [ordered](super::read_ordered), a division is faster: without its branches, the assembler puts
/// those reads behind the sum.
#[cube]
pub(crate) fn inverse_rms(sum: f32, count: f32, epsilon: f32, #[comptime] target: Target) -> f32 {
    if target.ptx {
        let y: f32;
        let mean = fma(sum, reciprocal(count, target), epsilon);
        gpu_asm!(
            "rsqrt.approx.f32 {y}, {mean};",
            y = out(_) y, mean = in(_) mean, options(pure, nomem)
        );
        y
    } else {
        1.0f32 / (sum / count + epsilon).sqrt()
    }
}

/// `x`, or `other` where `x` is NaN or less. `other` is a number.
#[cube]
pub(crate) fn not_nan(x: f32, other: f32, #[comptime] target: Target) -> f32 {
    if target.ptx {
        // Of a number and NaN, CUDA's maximum is the number.
        max(x, other)
    } else {
        select(x > other, x, other)
    }
}

/// Whether `x` is NaN. It tests bits, because compilers may assume that comparisons of floats see
/// no NaN.
#[cube]
pub(crate) fn has_nan_bits(x: f32) -> bool {
    u32::reinterpret(x) & 0x7fff_ffffu32 > 0x7f80_0000u32
}

/// `bits` shifted up by one, with the lowest bit set if `x` is below `low`, which is not `0.0`, or
/// above `high`, which is not `-0.0`. The bit may be clear although `x` is outside, but is never
/// set if it is not. NaN counts as neither.
#[cube]
pub(crate) fn push_outside(
    bits: u32,
    x: f32,
    low: f32,
    high: f32,
    #[comptime] target: Target,
) -> u32 {
    if target.ptx {
        // Uses the signs of two differences, because comparisons would use the pipe that the rest
        // of the work keeps busy.
        push_sign(bits, i32::reinterpret(x - low) | i32::reinterpret(high - x))
    } else {
        let outside = (x < low || x > high) && !has_nan_bits(x);
        (bits << 1) | select(outside, 1u32, 0u32)
    }
}

/// `bits` shifted up by one, with the lowest bit set if `x` is above `high`, which is not `-0.0`.
/// The bit may be clear for very small numbers although they are above, but is never set if `x` is
/// not. NaN counts as not above.
#[cube]
pub(crate) fn push_above(bits: u32, x: f32, high: f32, #[comptime] target: Target) -> u32 {
    if target.ptx {
        push_sign(bits, i32::reinterpret(high - x))
    } else {
        (bits << 1) | select(x > high && !has_nan_bits(x), 1u32, 0u32)
    }
}

/// `bits` shifted up by one, with the lowest bit set if `x` is below `low`, which is not `0.0`. The
/// bit may be clear for very small numbers although they are below, but is never set if `x` is not.
/// NaN counts as not below.
#[cube]
pub(crate) fn push_below(bits: u32, x: f32, low: f32, #[comptime] target: Target) -> u32 {
    if target.ptx {
        push_sign(bits, i32::reinterpret(x - low))
    } else {
        (bits << 1) | select(x < low && !has_nan_bits(x), 1u32, 0u32)
    }
}

/// `bits` shifted up by one, with the highest bit of `word` in the lowest one. Needs PTX.
#[cube]
fn push_sign(bits: u32, word: i32) -> u32 {
    let y: u32;
    let bits = i32::reinterpret(bits);
    gpu_asm!(
        "shf.l.wrap.b32 {y}, {word}, {bits}, 1;",
        y = out(_) y, word = in(_) word, bits = in(_) bits, options(pure, nomem)
    );
    y
}

// With fusion, tensors are of another backend.
#[cfg(all(test, not(feature = "fusion")))]
mod tests {
    use burn::tensor::{DType, Int, Tensor};
    use burn_cubecl::CubeBackend;

    use super::*;
    use crate::device::DeviceSpec;

    const UNITS: u32 = 32;

    #[cube(launch)]
    fn modulo_kernel(output: &mut [u32], #[comptime] by: u32) {
        output[UNIT_POS as usize] = modulo(UNIT_POS, by);
    }

    #[test]
    fn a_remainder_is_that_of_the_host_and_by_one_it_is_zero() {
        for spec in [DeviceSpec::Wgpu, DeviceSpec::Cuda(0)] {
            let Ok(device) = spec.init() else {
                continue;
            };
            for by in [1, 2, 7] {
                let output = Tensor::<1, Int>::ones([UNITS as usize], (&device, DType::U32));
                let written = output.clone().try_into_primitive::<CubeBackend>();
                let written = written.expect("a tensor of this backend");
                let client = written.client.clone();
                let (count, dim) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(UNITS));
                modulo_kernel::launch(&client, count, dim, written.into_buffer_arg(), by);
                let expected: Vec<u32> = (0..UNITS).map(|x| x % by).collect();
                let actual: Vec<u32> = output.into_data().iter::<u32>().collect();
                assert_eq!(actual, expected, "{spec}, by {by}");
            }
        }
    }
}
