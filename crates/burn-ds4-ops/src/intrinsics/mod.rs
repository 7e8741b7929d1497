//! Operations that CubeCL does not offer, or lowers to far more than the one instruction that the
//! hardware has.

mod arrival;
mod math;
mod plane;
mod ptx;
mod read;
mod shared;

pub(crate) use arrival::{arrival_order, arrives_last};
pub(crate) use math::*;
pub(crate) use plane::*;
pub(crate) use ptx::*;
pub(crate) use read::*;
pub(crate) use shared::*;
