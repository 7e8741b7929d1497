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
mod inputs;
mod pages;
mod pool;
mod rotate;
mod row;
mod softmax;
mod step;
mod visibility;

pub(super) use append::{AppendSizesLaunch, AppenderLaunch, append_kernel};
pub(super) use cached::{
    CachedBlueprint, CachedInputsLaunch, CachedTilesBlueprint, MasksLaunch, cached_kernel,
};
pub(super) use cached_tiles::{cached_cluster_kernel, cached_tiles_kernel, cached_whole_kernel};
pub(super) use cached_wgmma::{CachedWgmmaBlueprint, WARPGROUP_HEADS, cached_wgmma_kernel};
pub(super) use combine::{OutputRotationLaunch, combine_kernel};
pub(super) use compress::{
    CompressBlueprint, CompressSizesLaunch, CompressorLaunch, compress_kernel,
};
pub(super) use head_tiles::{
    HeadTiles, LANES, SLICE_CHANNELS, SUMMED_COLUMNS, TILE_HEADS, TILE_PLANES,
};
pub(super) use index::{INDEX_PLANES, IndexInputsLaunch, IndexSizesLaunch, index_kernel};
pub(super) use index_tiles::{INDEX_TILE_ROWS, IndexTilesBlueprint, index_tiles_kernel};
pub(super) use inputs::{
    AttentionInputsLaunch, AttentionShapeLaunch, AttentionStridesLaunch, KV_GROUP,
    PartialOutputLaunch, SinkBlueprint,
};
pub(super) use pages::PageTableLaunch;
pub(super) use pool::{PoolSizesLaunch, SlotStridesLaunch, pool_kernel};
pub(super) use rotate::{
    AngleTableLaunch, GivenAnglesLaunch, PositionsLaunch, RotationSizesLaunch, RowAnglesLaunch,
    rotate_kernel,
};
pub(super) use row::{RowBlueprint, RowNormLaunch};
pub(super) use step::{StepBlueprint, StepQueriesLaunch, step_kernel};
pub(super) use visibility::CacheLayoutLaunch;
