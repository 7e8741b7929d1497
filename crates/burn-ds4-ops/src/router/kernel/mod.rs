//! The router's kernels. No Burn type enters.

mod activation;
mod dense;
mod hash;
mod select;

pub(super) use dense::{DenseBlueprint, dense_kernel};
pub(super) use hash::{HashBlueprint, hash_kernel};
pub(super) use select::{SelectBlueprint, select_kernel};
