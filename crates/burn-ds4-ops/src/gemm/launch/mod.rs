//! The host side: which schedule, and how the work is divided.

pub(crate) mod dense;
mod division;
mod large_m;
pub(crate) mod library;
mod linear_group;
mod portable;
mod problem;
mod product;
mod sort;
mod stream;
mod sum;
mod wgmma;
mod work;

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::kernel::{MAX_SORTED, PORTABLE_PLANES};
use super::{INVARIANT_ROWS, Matrices};
use crate::caps::Caps;
use crate::launching::MAX_CUBES;

pub(crate) use super::kernel::{LinearGroupBlueprint, StreamBlueprint};
pub(crate) use large_m::Schedule;
pub(crate) use linear_group::launch_group;
pub(crate) use portable::can_sum_pairs;
pub(crate) use problem::StreamProblem;
pub(crate) use product::{Grouping, Product};
pub(crate) use sort::{SortedPairs, sort, sum_slots};
pub(crate) use stream::{gated_blueprints, launch_stream};
pub(crate) use sum::{launch_sum, sum_blueprints};
pub(crate) use wgmma::quantize;
pub(crate) use work::Blueprints;

/// Rows of `x` up to which reading the weights is the limit, and a row's result does not depend on
/// the others.
pub(crate) const SMALL_M_ROWS: usize = INVARIANT_ROWS;
/// Pairs that a cube groups for itself, at most.
pub(crate) const SMALL_M_PAIRS: usize = 128;

pub(crate) fn has_tiles<const N: usize>(x: &CubeTensor, matrices: [&Matrices; N]) -> bool {
    Caps::of(&x.client).tensor_cores && matrices.iter().all(|matrices| matrices.has_tiles())
}

/// Whether there is a kernel for a product with these matrices.
pub(crate) fn can_multiply<const N: usize>(x: &CubeTensor, matrices: [&Matrices; N]) -> bool {
    let caps = Caps::of(&x.client);
    let fits = |matrices: &Matrices| {
        matrices.rows.div_ceil(PORTABLE_PLANES as usize) <= MAX_CUBES
            && matrices.count <= MAX_SORTED
    };
    caps.counters && matrices.into_iter().all(fits)
}

/// An optional argument of a kernel.
fn optional<T: From<Option<BufferArg>>>(tensor: Option<&CubeTensor>) -> T {
    tensor.map(|tensor| tensor.clone().into_buffer_arg()).into()
}
