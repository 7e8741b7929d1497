//! Kernels of attention. No Burn type enters.

mod append;
mod cached;
mod cached_tiles;
mod compress;
mod heads;
mod index;
mod index_tiles;
mod meeting;
mod pool;
mod rotate;
mod rounding;
mod row;
mod sight;
mod sink;
mod step;

use cubecl::prelude::*;

use crate::intrinsics::{Target, exp};

pub(super) use append::{AppendSizesLaunch, append_kernel};
pub(super) use cached::{CachedBlueprint, cached_kernel};
pub(super) use cached_tiles::{
    CachedTilesBlueprint, PLANE_HEADS, SLICE, TILE_COLUMNS, TILE_HEADS, TILE_PLANES,
    cached_tiles_kernel,
};
pub(super) use compress::{
    CompressBlueprint, CompressSizesLaunch, CompressorLaunch, compress_kernel,
};
pub(super) use heads::CHUNK;
pub(super) use index::{IndexSizesLaunch, SHARES as INDEX_SHARES, index_kernel};
pub(super) use index_tiles::{TILE_ROWS, index_tiles_kernel};
pub(super) use meeting::join_kernel;
use pool::Blocks;
pub(super) use pool::{BlocksLaunch, pool_kernel};
pub(super) use rotate::{TableLaunch, rotate_at_kernel, rotate_kernel};
pub(super) use row::RowBlueprint;
pub(super) use sink::{SinkBlueprint, SizesLaunch, StridesLaunch, sink_kernel};
pub(super) use step::{StepBlueprint, step_kernel};

/// `e^x` for the distance `x` of a logit from the maximum: exactly 1 at 0 and exactly 0 far below, on every device. What is hidden
/// then adds nothing, and a maximum that stays changes nothing, to the last bit.
#[cube]
fn weight(x: f32, #[comptime] target: Target) -> f32 {
    let e = exp(x, target);
    select(x < -100.0f32, 0.0f32, select(x == 0.0f32, 1.0f32, e))
}
