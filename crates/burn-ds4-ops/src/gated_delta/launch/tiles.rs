//! Launches the kernel for tensor cores.

use super::Call;
use crate::gated_delta::args::Recurrence;
use crate::gated_delta::kernel::{
    COLUMN_BLOCK, TILE_ROWS, TilesBlueprint, WorkDivisorsLaunch, tiles_kernel,
};
use crate::launching::prelude::*;

/// Elements of 16 bytes.
pub(super) const VECTOR: usize = 8;
/// The most columns that fit into registers.
const MAX_WIDTH: usize = 256;
/// The most columns with which a plane has two tiles of rows.
const MAX_WIDTH_TWO_TILES: usize = 128;
/// Tiles for each SM of a small batch, and the most for which a single token does not use this
/// kernel.
const SMALL_BATCH_TILES_PER_SM: usize = 4;
const LARGE_BATCH_TILES_PER_SM: usize = 64;
/// The most tokens with which memory is the bound and not arithmetic.
const MEMORY_BOUND_TOKENS: usize = 4;

/// Whether the kernel can run the call, and is likely to be faster than the one for any device.
pub(super) fn is_preferred(recurrence: &Recurrence<CubeBackend>, pool: &CubeTensor) -> bool {
    let [_, heads, channels, width] = pool.dims();
    let [batch, tokens, _, _] = recurrence.v.dims();
    let tiles = batch * heads * channels.div_ceil(TILE_ROWS as usize);
    let least = match tokens {
        1 => LARGE_BATCH_TILES_PER_SM,
        2 => SMALL_BATCH_TILES_PER_SM,
        _ => 0,
    };
    Caps::of(&pool.client).tensor_cores
        && pool.dtype == DType::BF16
        && recurrence.q.dtype == DType::BF16
        && channels.is_multiple_of(TILE_ROWS as usize)
        && width.is_multiple_of(COLUMN_BLOCK as usize)
        && width <= MAX_WIDTH
        && tiles > least * Caps::of(&pool.client).processors as usize
}

/// The blueprint that divides the work of a call among `processors` SMs.
fn blueprint_for(call: &Call, processors: usize) -> TilesBlueprint {
    let client = &call.pool.client;
    let [batch, tokens, heads, channels, width] = call.dims();
    let tiles_of_state = channels / TILE_ROWS as usize;
    let tiles = batch * heads * tiles_of_state;
    let every_state = call.states.is_some();
    let small_batch = tiles <= SMALL_BATCH_TILES_PER_SM * processors;
    // With few tokens, memory takes most of the time, and many small cubes use it best. With more
    // tokens, arithmetic takes most of it, so it overlaps with the copy of the next state. Where
    // all states are stored, so much is written that only memory counts.
    let (planes, rows, groups, depth) = match (small_batch, every_state, tokens) {
        (true, ..) => (1, 1, 1, 1),
        (_, true, 2..=MEMORY_BOUND_TOKENS) => (2, 2, 1, 1),
        (_, _, 1) | (_, false, ..=MEMORY_BOUND_TOKENS) => (1, 2, 1, 1),
        (_, true, _) => (2, 1, 1, 1),
        (_, false, _) => (4, 2, 2, 2),
    };
    let rows = if width <= MAX_WIDTH_TWO_TILES {
        rows
    } else {
        1
    };
    let (planes, rows) = [(planes, rows), (2, rows), (1, rows)]
        .into_iter()
        .find(|(planes, rows)| tiles_of_state.is_multiple_of(planes * rows))
        .unwrap_or((1, 1));
    let blueprint = |(groups, depth)| TilesBlueprint {
        tokens: tokens as u32,
        column_blocks: (width / COLUMN_BLOCK as usize) as u32,
        tiles: rows as u32,
        planes: planes as u32,
        groups,
        depth,
        rule: call.rule,
    };
    let mut candidates = [(groups, depth), (2, 1), (1, 1)].into_iter().map(blueprint);
    let fits = |blueprint: &TilesBlueprint| Caps::of(client).fits_shared(blueprint.shared_bytes());
    candidates.find(fits).expect("a part of a state that fits")
}

pub(super) fn launch(call: Call) {
    let client = call.pool.client.clone();
    let [batch, _, heads, channels, _] = call.dims();
    let processors = Caps::of(&client).processors as usize;
    let blueprint = blueprint_for(&call, processors);
    let blocks = channels / blueprint.group_rows() as usize;
    let items = batch * heads * blocks;
    let cubes = if blueprint.groups == 1 {
        items
    } else {
        processors.min(items)
    };
    let divisors =
        WorkDivisorsLaunch::new(blocks as u32, heads as u32, call.heads_per_key() as u32);
    let [a, b, dt_bias, read, write, accepted] = call.dtypes();
    let dtypes = [call.q.dtype, a, b, dt_bias, read, write, accepted];
    // SAFETY: slots that do not exist are not used; rows are whole tiles; tokens past the end are
    // zeros.
    unsafe {
        tiles_kernel::launch_unchecked(
            &client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_2d(32, blueprint.planes * blueprint.groups),
            // Offsets in shared memory become part of the instructions only if they are as wide as
            // addresses.
            AddressType::U64,
            call.inputs(),
            call.gates(),
            call.slots(),
            call.results(),
            call.shape(),
            divisors,
            blueprint,
            dtypes.map(dtype_to_storage_type),
        );
    }
}
