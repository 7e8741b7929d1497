//! The kernel for tensor cores.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::Call;
use crate::gated_delta::backend::Recurrence;
use crate::gated_delta::kernel::{CHUNK, CountsLaunch, TILE, TilesBlueprint, tiles_kernel};
use crate::launching::{fits_shared, has_tensor_cores, processors};

/// Elements of 16 bytes.
pub(super) const VECTOR: usize = 8;
/// Columns that registers hold at most.
const MAX_WIDTH: usize = 256;
/// Columns up to which a plane has two tiles of rows.
const MAX_WIDTH_OF_TWO: usize = 128;
/// Tiles to a processor that are few, and up to which those of a single token are not many.
const FEW_TILES: usize = 4;
const MANY_TILES: usize = 64;
/// Tokens that are few.
const FEW_TOKENS: usize = 4;

/// Whether the kernel is for such a call, and likely to be faster than the one for any device.
pub(super) fn is_for(recurrence: &Recurrence<CubeBackend>, pool: &CubeTensor) -> bool {
    let [_, heads, channels, width] = pool.shape().dims();
    let [batch, tokens, _, _] = recurrence.v.shape().dims();
    let tiles = batch * heads * channels.div_ceil(TILE as usize);
    let least = match tokens {
        1 => MANY_TILES,
        2 => FEW_TILES,
        _ => 0,
    };
    has_tensor_cores(&pool.client)
        && pool.dtype == DType::BF16
        && recurrence.q.dtype == DType::BF16
        && channels.is_multiple_of(TILE as usize)
        && width.is_multiple_of(CHUNK as usize)
        && width <= MAX_WIDTH
        && tiles > least * processors(&pool.client) as usize
}

/// How the work is divided, among `processors`.
fn divide(call: &Call, processors: usize) -> TilesBlueprint {
    let client = &call.pool.client;
    let [batch, tokens, heads, channels, width] = call.dims();
    let tiles_of_state = channels / TILE as usize;
    let tiles = batch * heads * tiles_of_state;
    let every = call.states.is_some();
    let few = tiles <= FEW_TILES * processors;
    // Few tokens leave most of the time to memory, which many small cubes keep busiest, and more tokens to arithmetic, which goes on
    // while the next state is on its way. Where all states are kept, so much is written that nothing else counts.
    let (planes, rows, groups, depth) = match (few, every, tokens) {
        (true, ..) => (1, 1, 1, 1),
        (_, true, 2..=FEW_TOKENS) => (2, 2, 1, 1),
        (_, _, 1) | (_, false, ..=FEW_TOKENS) => (1, 2, 1, 1),
        (_, true, _) => (2, 1, 1, 1),
        (_, false, _) => (4, 2, 2, 2),
    };
    let rows = if width <= MAX_WIDTH_OF_TWO { rows } else { 1 };
    let (planes, rows) = [(planes, rows), (2, rows), (1, rows)]
        .into_iter()
        .find(|(planes, rows)| tiles_of_state.is_multiple_of(planes * rows))
        .unwrap_or((1, 1));
    let blueprint = |(groups, depth)| TilesBlueprint {
        tokens: tokens as u32,
        chunks: (width / CHUNK as usize) as u32,
        tiles: rows as u32,
        planes: planes as u32,
        groups,
        depth,
        rule: call.rule,
    };
    let mut ways = [(groups, depth), (2, 1), (1, 1)].into_iter().map(blueprint);
    let fits = |blueprint: &TilesBlueprint| fits_shared(client, blueprint.shared_bytes());
    ways.find(fits).expect("a part of a state that fits")
}

pub(super) fn launch(call: Call) {
    let client = call.pool.client.clone();
    let [batch, _, heads, channels, _] = call.dims();
    let processors = processors(&client) as usize;
    let blueprint = divide(&call, processors);
    let blocks = channels / blueprint.group_rows() as usize;
    let items = batch * heads * blocks;
    let cubes = if blueprint.groups == 1 {
        items
    } else {
        processors.min(items)
    };
    let counts = CountsLaunch::new(blocks as u32, heads as u32, call.sharing() as u32);
    let [a, b, dt_bias, read, write, accepted] = call.dtypes();
    let dtypes = [call.q.dtype, a, b, dt_bias, read, write, accepted];
    let (sizes, places, numbers) = (call.sizes(), call.places(), call.numbers());
    // SAFETY: slots that are none are not used, rows are whole tiles, tokens past the end are zeros.
    unsafe {
        tiles_kernel::launch_unchecked(
            &client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_2d(32, blueprint.planes * blueprint.groups),
            // Offsets in shared memory that are as wide as addresses are part of the instructions.
            AddressType::U64,
            call.q.into_buffer_arg(),
            call.k.into_buffer_arg(),
            call.v.into_buffer_arg(),
            call.a.into_buffer_arg(),
            call.b.into_buffer_arg(),
            call.a_log.into_buffer_arg(),
            call.dt_bias.into_buffer_arg(),
            call.pool.into_buffer_arg(),
            call.read_slots.into_buffer_arg(),
            call.write_slots.map(CubeTensor::into_buffer_arg).into(),
            call.accepted.map(CubeTensor::into_buffer_arg).into(),
            call.out.into_buffer_arg(),
            call.states.map(CubeTensor::into_buffer_arg).into(),
            sizes,
            counts,
            places,
            numbers,
            blueprint,
            dtypes.map(dtype_to_storage_type),
        );
    }
}
