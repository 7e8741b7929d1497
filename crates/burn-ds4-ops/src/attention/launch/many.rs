//! Launches of attention over a cache for many queries: by warpgroups, or else by planes.

use super::tensors::{CachedTensors, fits_cached};
use super::tiles::{can_multiply, sink_blueprint};
use crate::attention::args::{CachedBlocks, Queries};
use crate::attention::kernel::{
    CachedBlueprint, CachedTilesBlueprint, CachedWgmmaBlueprint, HeadTiles, TILE_HEADS,
    WARPGROUP_HEADS, cached_wgmma_kernel, cached_whole_kernel,
};
use crate::attention::options::DECODE_TOKENS;
use crate::launching::prelude::*;

/// Channels that rows of warpgroups are a multiple of, and the widest row.
const WIDTH_STEP: usize = 128;
const MAX_WIDTH: usize = 512;
/// Channels of a vector.
const SIZE: usize = 8;
/// Heads from which on a tile of warpgroups is worth its rows without one.
const MIN_HEADS: usize = WARPGROUP_HEADS as usize / 2;
/// Stages of warpgroups, at least and at most.
const STAGES: std::ops::RangeInclusive<u32> = 2..=4;
/// Bytes by which the alignment of tiles may add to shared memory.
const ALIGNMENT: usize = 2 * 1024;
/// Tiles of heads, columns and stages of a cube of planes, the best first.
const CANDIDATES: [(u32, u32, u32); 6] = [
    (4, 64, 2),
    (4, 32, 2),
    (2, 64, 2),
    (2, 32, 2),
    (2, 32, 1),
    (1, 64, 1),
];

/// The kernel that attends.
pub(super) enum Blueprint {
    Warpgroups(CachedWgmmaBlueprint),
    Planes(CachedTilesBlueprint),
}

impl Blueprint {
    fn new(
        queries: &Queries<CubeBackend>,
        window: &CubeTensor,
        blocks: &CachedBlocks<CubeBackend>,
    ) -> Option<Self> {
        let rows = blocks.parts().0.map_or(window, |rows| &rows.rows);
        let (width, rotated) = (queries.x.shape()[3], queries.angles.shape()[1]);
        let fits = queries.x.shape()[1] > DECODE_TOKENS
            && fits_cached(queries, window, blocks)
            && [window, rows].map(|rows| rows.dtype) == [queries.x.dtype; 2]
            && row_vector_size([&queries.x, window, rows], width) >= SIZE
            && rotated.is_multiple_of(SIZE)
            && can_multiply(&queries.x);
        if !fits {
            return None;
        }
        // Copies of warpgroups count vectors in 32 bits.
        let indexed = |tensor: &CubeTensor| {
            let spread = tensor.shape()[0] * tensor.meta.strides()[0];
            u32::try_from(spread.max(tensor.shape().num_elements()) / SIZE).is_ok()
        };
        let unrotated = unrotated(queries);
        let planes = || planes(&queries.x, unrotated, queries.causal, false);
        let warpgroups = match [window, rows].into_iter().all(indexed) {
            true => warpgroups(queries).map(Self::Warpgroups),
            false => None,
        };
        let blueprint = warpgroups.or_else(|| planes().map(Self::Planes))?;
        let [batch, count, heads, _] = queries.x.dims();
        let tiles = heads.div_ceil(blueprint.heads());
        let all = batch
            .checked_mul(count)
            .and_then(|all| all.checked_mul(tiles));
        fits_i32(all).then_some(blueprint)
    }

    /// Heads of a cube.
    fn heads(&self) -> usize {
        match self {
            Self::Warpgroups(_) => WARPGROUP_HEADS as usize,
            Self::Planes(blueprint) => blueprint.tiles.heads() as usize,
        }
    }
}

fn warpgroups(queries: &Queries<CubeBackend>) -> Option<CachedWgmmaBlueprint> {
    let [_, _, heads, width] = queries.x.dims();
    let caps = Caps::of(&queries.x.client);
    let shape_fits = width.is_multiple_of(WIDTH_STEP) && width <= MAX_WIDTH && heads >= MIN_HEADS;
    if !caps.wgmma || !shape_fits {
        return None;
    }
    let with_stages = |stages| CachedWgmmaBlueprint {
        vectors: (width / SIZE) as u32,
        unrotated: unrotated(queries),
        stages,
        causal: queries.causal,
        f16_input: queries.x.dtype == DType::F16,
        target: caps.target,
    };
    let fits =
        |blueprint: &CachedWgmmaBlueprint| caps.fits_shared(blueprint.shared_bytes() + ALIGNMENT);
    STAGES.rev().map(with_stages).find(fits)
}

/// For queries of which `unrotated` vectors are not rotated, or which masks are for.
pub(super) fn planes(
    queries: &CubeTensor,
    unrotated: u32,
    causal: bool,
    masked: bool,
) -> Option<CachedTilesBlueprint> {
    let [_, _, heads, width] = queries.dims();
    let caps = Caps::of(&queries.client);
    let most = heads.div_ceil(TILE_HEADS as usize).next_power_of_two();
    let blueprints = CANDIDATES.map(|(head_tiles, columns, stages)| {
        let tiles = HeadTiles {
            head_tiles,
            vectors: (width / SIZE) as u32,
            columns,
            dot_sums: 1,
            f16_input: queries.dtype == DType::F16,
            target: caps.target,
        };
        CachedTilesBlueprint {
            cached: CachedBlueprint {
                sink: sink_blueprint(tiles),
                unrotated,
                causal,
                masked,
            },
            tiles,
            kv_cubes: 1,
            in_cluster: false,
            stages,
            whole: true,
        }
    });
    blueprints
        .into_iter()
        .filter(|blueprint| blueprint.tiles.head_tiles as usize <= most)
        .find(|blueprint| caps.fits_shared(blueprint.tiles.shared_bytes(blueprint.stages)))
}

/// Vectors in front of a row that are not rotated.
fn unrotated(queries: &Queries<CubeBackend>) -> u32 {
    ((queries.x.shape()[3] - queries.angles.shape()[1]) / SIZE) as u32
}

/// Whether tensor cores can attend from many queries.
pub(in crate::attention) fn can_attend_many(
    queries: &Queries<CubeBackend>,
    window: &CubeTensor,
    blocks: &CachedBlocks<CubeBackend>,
) -> bool {
    Blueprint::new(queries, window, blocks).is_some()
}

pub(in crate::attention) fn attend_many(
    queries: Queries<CubeBackend>,
    window: CubeTensor,
    blocks: CachedBlocks<CubeBackend>,
) -> CubeTensor {
    let blueprint = Blueprint::new(&queries, &window, &blocks);
    let blueprint = blueprint.expect("checked by can_attend_many");
    attend(
        CachedTensors::new(queries, window, &blocks, SIZE),
        blueprint,
    )
}

pub(super) fn attend(inputs: CachedTensors, blueprint: Blueprint) -> CubeTensor {
    let client = inputs.queries.client.clone();
    let shape: [usize; 4] = inputs.queries.dims();
    let [batch, count, heads, _] = shape;
    let result = output(&inputs.queries, shape, inputs.queries.dtype);
    let cubes = batch * count * heads.div_ceil(blueprint.heads());
    let address = address_type([&inputs.queries, &inputs.window, &inputs.rows, &result]);
    // SAFETY: heads past the end are read as the last one and not written; hidden columns are not
    // read; slots are taken modulo their number; angles are within the table.
    unsafe {
        match blueprint {
            Blueprint::Warpgroups(blueprint) => cached_wgmma_kernel::launch_unchecked(
                &client,
                CubeCount::Static(
                    cubes.min(Caps::of(&client).processors as usize) as u32,
                    1,
                    1,
                ),
                CubeDim::new_1d(blueprint.units()),
                address,
                inputs.arg(),
                result.clone().into_buffer_arg(),
                (batch * count) as u32,
                blueprint,
                inputs.dtypes(),
            ),
            Blueprint::Planes(blueprint) => cached_whole_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes as u32, 1, 1),
                CubeDim::new_2d(blueprint.cached.sink.plane, blueprint.cached.sink.planes),
                address,
                inputs.arg(),
                result.clone().into_buffer_arg(),
                blueprint,
                inputs.dtypes(),
            ),
        }
    }
    result
}
