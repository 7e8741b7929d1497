//! Kernels of attention. They use no type of Burn.

mod angles;
mod append;
mod cached;
mod cached_rows;
mod cached_tiles;
mod cached_wgmma;
mod combine;
mod compress;
mod head_tiles;
mod heads;
mod index;
mod index_tiles;
mod pool;
mod rotate;
mod row;
mod sink;
mod sink_tiles;
mod step;
mod visibility;

use cubecl::prelude::*;

use crate::caps::Target;
use crate::intrinsics::exp;

pub(super) use append::{AppendSizesLaunch, AppenderLaunch, append_kernel};
pub(super) use cached::{CachedBlueprint, CachedInputsLaunch, cached_kernel};
pub(super) use cached_tiles::{CachedTilesBlueprint, cached_cluster_kernel, cached_tiles_kernel};
pub(super) use cached_wgmma::{CachedWgmmaBlueprint, WARPGROUP_HEADS, cached_wgmma_kernel};
pub(super) use combine::{OutputRotationLaunch, combine_kernel};
pub(super) use compress::{
    CompressBlueprint, CompressSizesLaunch, CompressorLaunch, compress_kernel,
};
pub(super) use head_tiles::{
    HeadTiles, LANES, SLICE_CHANNELS, SUMMED_COLUMNS, TILE_HEADS, TILE_PLANES,
};
pub(super) use heads::KV_GROUP;
pub(super) use index::{INDEX_PLANES, IndexInputsLaunch, IndexSizesLaunch, index_kernel};
pub(super) use index_tiles::{INDEX_TILE_ROWS, IndexTilesBlueprint, index_tiles_kernel};
use pool::SlotStrides;
pub(super) use pool::{PoolSizesLaunch, SlotStridesLaunch, pool_kernel};
pub(super) use rotate::{
    AngleTableLaunch, PositionsLaunch, RotationSizesLaunch, rotate_at_kernel, rotate_kernel,
};
pub(super) use row::{RowBlueprint, RowNormLaunch};
pub(super) use sink::{
    AttentionInputsLaunch, AttentionShapeLaunch, AttentionStridesLaunch, PartialOutputLaunch,
    SinkBlueprint, sink_kernel,
};
pub(super) use sink_tiles::{SinkTilesBlueprint, sink_tiles_kernel};
pub(super) use step::{StepBlueprint, StepQueriesLaunch, step_kernel};
pub(super) use visibility::CacheLayoutLaunch;

/// Computes `e^x` for the distance `x` of a logit from the maximum: exactly 1 at 0 and exactly 0
/// far below, on every device. So a hidden column adds nothing, and a maximum that stays changes
/// nothing, to the last bit.
#[cube]
fn softmax_weight(x: f32, #[comptime] target: Target) -> f32 {
    let e = exp(x, target);
    select(x < -100.0f32, 0.0f32, select(x == 0.0f32, 1.0f32, e))
}
