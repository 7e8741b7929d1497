use cubecl::prelude::*;

use crate::caps::Target;
use crate::intrinsics::{LOG1P, exp, polynomial, sqrt};

/// As [`LOG1P`], with a relative error of 2e-7.
const SHORT_LOG1P: &[f32] = &[
    -0.008_539_198,
    0.044_089_59,
    -0.107_681_65,
    0.177_452_37,
    -0.244_954_61,
    0.332_754_8,
    -0.499_974_05,
    0.999_999_8,
];

/// Added to the sum of the chosen activations, which may underflow to zero.
pub(super) const EPSILON: f32 = 1e-20;

/// `sqrt(softplus(x))` without a logarithm and without a separate case for very negative `x`.
///
/// With `u = exp(-|x| / 2)` and `P(t) = log1p(t) / t`, softplus is `x + u² P(u²)` for positive `x`
/// and `u² P(u²)` otherwise. The root of the latter is `u sqrt(P(u²))`, which underflows with `u`,
/// not with `u²`.
#[cube]
pub(super) fn sqrt_softplus(x: f32, #[comptime] target: Target) -> f32 {
    let u = exp(x.abs() * -0.5f32, target);
    let t = u * u;
    let p = polynomial(t, LOG1P);
    let positive = x > 0.0f32;
    let root = sqrt(select(positive, fma(t, p, x), p), target);
    select(positive, root, root * u)
}

/// `sqrt(softplus(x)) + bias`, for the selection only. Computing it takes longer than the rest of
/// the work on a row, so it is short: a value that underflows below 1e-19 makes no difference next
/// to a bias.
#[cube]
pub(super) fn biased_score(x: f32, bias: f32, #[comptime] target: Target) -> f32 {
    let t = exp(-x.abs(), target);
    let p = polynomial(t, SHORT_LOG1P);
    sqrt(fma(t, p, max(x, 0.0f32)), target) + bias
}

/// The element `index` of `vector`. An index past its size wraps around.
#[cube]
pub(super) fn element<N: Size>(vector: Vector<f32, N>, index: u32) -> f32 {
    let size = N::value() as u32;
    let mut value = vector.extract(0usize);
    #[unroll]
    for i in 1..N::value() {
        value = select(index % size == i as u32, vector.extract(i), value);
    }
    value
}
