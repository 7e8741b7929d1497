//! Kernels of hyper-connections: one cube to a token, which never depends on another.

mod collapse;
mod expand;
mod sinkhorn;
mod token;

pub(super) use collapse::{collapse_kernel, head_kernel};
pub(super) use expand::expand_kernel;
pub(super) use token::{LayoutLaunch, TokenBlueprint};
