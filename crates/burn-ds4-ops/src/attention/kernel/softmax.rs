//! Weights of a softmax with a sink.

use cubecl::prelude::*;

use crate::attention::options::{MASKED, TINY};
use crate::caps::Target;
use crate::intrinsics::exp;

/// Computes `e^x` for the distance `x` of a logit from the maximum: exactly 1 at 0 and exactly 0
/// far below, on every device. So a hidden column adds nothing, and a maximum that stays changes
/// nothing, to the last bit.
#[cube]
pub(super) fn softmax_weight(x: f32, #[comptime] target: Target) -> f32 {
    let e = exp(x, target);
    select(x < -100.0f32, 0.0f32, select(x == 0.0f32, 1.0f32, e))
}

/// The sum of all exponentials relative to `maximum`, that of the sink included.
#[cube]
pub(super) fn with_sink(total: f32, sink: f32, maximum: f32, #[comptime] target: Target) -> f32 {
    max(
        total + softmax_weight(max(sink, MASKED) - maximum, target),
        TINY,
    )
}
