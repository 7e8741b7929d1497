//! Launches of attention over a cache for few queries.

use super::splits::{SplitLaunch, attend, blueprint, combine, kv_splits};
use super::tensors::{CachedTensors, fits_cached};
use super::tiles::{can_multiply, sink_blueprint};
use crate::attention::args::{CachedBlocks, Queries};
use crate::attention::kernel::{
    CachedBlueprint, CachedTilesBlueprint, HeadTiles, SUMMED_COLUMNS, SinkBlueprint, TILE_HEADS,
    cached_cluster_kernel, cached_tiles_kernel,
};
use crate::attention::options::DECODE_TOKENS;
use crate::launching::prelude::*;

/// Whether vectors of `size` elements hold whole pairs, and none both rotated and other channels.
fn holds_pairs(size: usize, rotated: usize) -> bool {
    size.is_multiple_of(2) && rotated.is_multiple_of(size)
}

/// Cubes on tensor cores that share the columns of a query: of a window alone, and of compressed
/// rows as well. Nothing else may count, because the order of sums depends on it.
const WINDOW_KV_CUBES: u32 = 2;
const KV_CUBES: u32 = 4;
/// Columns of such a cube whose rows are in shared memory at a time, at most: those of the window
/// of 128 and the 512 picks of the released models, or of the window and the compressed rows of
/// 65,536 positions.
const TILE_COLUMNS: u32 = 160;
/// Columns of a cube come in steps of so many, so that there are few kernels.
const COLUMN_STEP: u32 = 2 * SUMMED_COLUMNS;
/// Tiles of heads of a cube where there are more cubes than multiprocessors.
const MANY_HEAD_TILES: u32 = 2;
/// The architecture from which on cubes can be clusters.
const CLUSTERS_FROM: u32 = 90;

/// Configuration of a kernel, and the number of elements of its vectors.
struct CachedPlan {
    sink: SinkBlueprint,
    size: usize,
    /// The tiles of a cube of the tensor-core kernels.
    tiles: Option<HeadTiles>,
    kv_cubes: u32,
}

impl CachedPlan {
    fn new(
        queries: &Queries<CubeBackend>,
        rows: [&CubeTensor; 2],
        blocks: &CachedBlocks<CubeBackend>,
    ) -> Option<Self> {
        // The plan must be the same whether this call has picks or not.
        let picked = match blocks {
            CachedBlocks::None => false,
            CachedBlocks::All { picking, .. } => *picking,
            CachedBlocks::Picked { .. } => true,
        };
        let width = queries.x.shape()[3];
        let rotated = queries.angles.shape()[1];
        // The channels of a lane must not depend on the layout of the rows.
        let mut size = row_vector_size([&queries.x, rows[0], rows[1]], width);
        while size > 1 && !holds_pairs(size, rotated) {
            size /= 2;
        }
        if size == 8
            && let Some(tiles) = head_tiles(&queries.x)
        {
            return Some(Self {
                sink: sink_blueprint(tiles),
                size,
                tiles: Some(tiles),
                kv_cubes: match blocks {
                    CachedBlocks::None => WINDOW_KV_CUBES,
                    _ => KV_CUBES,
                },
            });
        }
        let (sink, size) = blueprint(&queries.x.client, width, size, 2, picked)?;
        holds_pairs(size, rotated).then_some(Self {
            sink,
            size,
            tiles: None,
            kv_cubes: 1,
        })
    }

    /// The number of KV splits that are combined by another launch.
    fn splits(&self, span: usize, selected: usize) -> usize {
        match self.tiles {
            Some(tiles) if tiles.target.is_at_least(CLUSTERS_FROM) => 1,
            Some(_) => self.kv_cubes as usize,
            None => kv_splits(span, selected, self.sink.split_columns),
        }
    }
}

/// The tiles of a cube, of as many columns as fit, if tensor cores can attend.
fn head_tiles(queries: &CubeTensor) -> Option<HeadTiles> {
    let width = queries.shape()[3];
    let caps = Caps::of(&queries.client);
    let of_columns = |columns| HeadTiles {
        head_tiles: 1,
        vectors: (width / 8) as u32,
        columns,
        dot_sums: 2,
        f16_input: queries.dtype == DType::F16,
        target: caps.target,
    };
    let mut tiles = (1..=TILE_COLUMNS)
        .rev()
        .step_by(COLUMN_STEP as usize)
        .map(of_columns)
        .filter(|_| can_multiply(queries));
    tiles.find(|&tiles| caps.fits_shared(tiles.shared_bytes(1)))
}

pub(in crate::attention) fn can_attend_cached(
    queries: &Queries<CubeBackend>,
    window: &CubeTensor,
    blocks: &CachedBlocks<CubeBackend>,
) -> bool {
    let [batch, count, heads, _] = queries.x.dims();
    let rows = blocks.parts().0.map_or(window, |rows| &rows.rows);
    // The output of KV splits grows with the queries: for many of a sequence, it would not fit.
    count <= DECODE_TOKENS
        && batch * count <= MAX_CUBES
        && heads <= MAX_CUBES
        && is_float(queries.x.dtype)
        && fits_cached(queries, window, blocks)
        && CachedPlan::new(queries, [window, rows], blocks)
            .is_some_and(|plan| plan.splits(queries.columns(), blocks.counts()[1]) <= MAX_CUBES)
}

impl SplitLaunch {
    /// The tiles of a cube for this call: of no more columns than there are, and more heads where
    /// there are more cubes than multiprocessors. No bit depends on it.
    fn tiles(&self, tiles: HeadTiles, kv_cubes: u32) -> HeadTiles {
        let caps = Caps::of(&self.result.client);
        let [batch, count, heads, _] = self.result.dims();
        let columns = kv_splits(self.inputs.span, self.inputs.selected, SUMMED_COLUMNS);
        let of_cube = columns.div_ceil(kv_cubes as usize) as u32 * SUMMED_COLUMNS;
        let tiles = HeadTiles {
            columns: of_cube.next_multiple_of(COLUMN_STEP).min(tiles.columns),
            ..tiles
        };
        let cubes = heads.div_ceil(TILE_HEADS as usize) * batch * count * kv_cubes as usize;
        let heads = MANY_HEAD_TILES * TILE_HEADS;
        let more = HeadTiles {
            head_tiles: MANY_HEAD_TILES,
            columns: tiles.columns.max(2 * heads),
            ..tiles
        };
        match cubes > caps.processors as usize && caps.fits_shared(more.shared_bytes(1)) {
            true => more,
            false => tiles,
        }
    }
}

pub(in crate::attention) fn cached_attention(
    queries: Queries<CubeBackend>,
    window: CubeTensor,
    blocks: CachedBlocks<CubeBackend>,
) -> CubeTensor {
    let rows = blocks.parts().0.map_or(&window, |rows| &rows.rows);
    let plan = CachedPlan::new(&queries, [&window, rows], &blocks);
    let plan = plan.expect("checked by can_attend_cached");
    let CachedPlan {
        sink, size, tiles, ..
    } = plan;
    let client = queries.x.client.clone();
    let causal = queries.causal;
    let inputs = CachedTensors::new(queries, window, &blocks, size);
    let splits = plan.splits(inputs.span, inputs.selected);
    let launch = SplitLaunch::new(inputs, sink, splits);
    let Some(tiles) = tiles else {
        return attend(launch, causal);
    };
    let blueprint = CachedTilesBlueprint {
        cached: CachedBlueprint {
            sink: launch.blueprint,
            unrotated: launch.inputs.vectors()[1],
            causal,
            masked: false,
        },
        tiles: launch.tiles(tiles, plan.kv_cubes),
        kv_cubes: plan.kv_cubes,
        in_cluster: splits == 1,
        stages: 1,
        whole: false,
    };
    let cubes = launch.cubes(blueprint.tiles.heads(), plan.kv_cubes);
    // Offsets in shared memory that are as wide as addresses are part of the instructions.
    let wide = AddressType::U64;
    // SAFETY: heads and vectors past the end are read as others; slots are taken modulo their
    // number; a row that is out of range or hidden is not read; angles are within the table; writes
    // are within the output. Cubes of a cluster read no more of each other than they have, while
    // all of them are there.
    unsafe {
        match blueprint.in_cluster {
            true => cached_cluster_kernel::launch_unchecked(
                &client,
                cubes,
                launch.dim(),
                wide,
                launch.inputs.arg(),
                launch.result.clone().into_buffer_arg(),
                blueprint,
                launch.inputs.dtypes(),
            ),
            false => cached_tiles_kernel::launch_unchecked(
                &client,
                cubes,
                launch.dim(),
                wide,
                launch.inputs.arg(),
                launch.partials(),
                blueprint,
                launch.dtypes(),
            ),
        }
    }
    combine(launch)
}
