//! The router's kernels. No Burn type enters.

mod activation;
mod best;
mod dense;
mod hash;
mod select;

pub(super) use dense::{DenseBlueprint, RouterOperandsLaunch, dense_kernel};
pub(super) use hash::{HashBlueprint, HashSizesLaunch, hash_kernel};
pub(super) use select::{SelectBlueprint, SelectRowsLaunch, SelectionLaunch, select_kernel};
