use cubecl::prelude::*;

use crate::caps::Target;
use crate::intrinsics::{exp, reciprocal};

/// `silu(min(gate, limit)) · clamp(up, -limit, limit)`; NaN stays NaN.
#[cube]
pub(crate) fn swiglu(gate: f32, up: f32, limit: f32, #[comptime] target: Target) -> f32 {
    let gate = select(gate > limit, limit, gate);
    let up = select(up > limit, limit, select(up < -limit, -limit, up));
    gate * reciprocal(1.0f32 + exp(-gate, target), target) * up
}
