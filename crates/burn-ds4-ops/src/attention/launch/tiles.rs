//! Which queries tensor cores can attend from, by planes.

use crate::attention::kernel::{
    HeadTiles, LANES, SLICE_CHANNELS, SinkBlueprint, TILE_HEADS, TILE_PLANES,
};
use crate::launching::prelude::*;

/// Heads of a plane that prepares the queries of a tile.
const PLANE_HEADS: u32 = TILE_HEADS / TILE_PLANES;
/// Widest row of the tensor-core kernels: each plane has a slice of it.
const MAX_TILE_WIDTH: usize = (TILE_PLANES * SLICE_CHANNELS) as usize;

/// Whether tensor cores can multiply queries.
pub(super) fn can_multiply(queries: &CubeTensor) -> bool {
    let width = queries.shape()[3];
    Caps::of(&queries.client).tensor_cores
        && matches!(queries.dtype, DType::F16 | DType::BF16)
        && width.is_multiple_of(SLICE_CHANNELS as usize)
        && width <= MAX_TILE_WIDTH
}

/// How a plane prepares the queries of a tile.
pub(super) fn sink_blueprint(tiles: HeadTiles) -> SinkBlueprint {
    SinkBlueprint {
        heads: PLANE_HEADS,
        planes: TILE_PLANES,
        plane: LANES,
        steps: tiles.vectors.div_ceil(LANES),
        even: tiles.vectors.is_multiple_of(LANES),
        split_columns: tiles.columns,
        multiple_splits: false,
        target: tiles.target,
    }
}
