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
/// Parts of states to a processor up to which none is fetched ahead.
const ROUNDS: usize = 4;

pub(super) fn can_run(recurrence: &Recurrence<CubeBackend>, pool: &CubeTensor) -> bool {
    let [_, _, channels, width] = pool.shape().dims();
    has_tensor_cores(&pool.client)
        && pool.dtype == DType::BF16
        && recurrence.q.dtype == DType::BF16
        && channels.is_multiple_of(TILE as usize)
        && width.is_multiple_of(CHUNK as usize)
        && width <= MAX_WIDTH
}

/// How the work is divided, among `processors`.
fn divide(call: &Call, processors: usize) -> TilesBlueprint {
    let client = &call.pool.client;
    let [batch, tokens, heads, channels, width] = call.dims();
    let tiles_of_state = channels / TILE as usize;
    let tiles = batch * heads * tiles_of_state;
    let every = call.states.is_some();
    // All processors get some rows, and then a cube as many as possible of one state; where all states are kept, more planes that have
    // fewer rows each write more at a time.
    let two = width <= MAX_WIDTH_OF_TWO && !every;
    let ways = [(4, 2), (4, 1), (2, 1), (1, 1)].into_iter();
    let ways = ways.filter(|(planes, rows)| tiles_of_state.is_multiple_of(planes * rows));
    let mut ways = ways.filter(|(_, rows)| *rows == 1 || two);
    let fills = |&(planes, rows): &(usize, usize)| tiles / (planes * rows) >= processors;
    let smallest = ways.clone().next_back();
    let (planes, rows) = ways
        .find(fills)
        .or(smallest)
        .expect("any number is a multiple of one");
    let blueprint = |(groups, depth)| TilesBlueprint {
        tokens: tokens as u32,
        chunks: (width / CHUNK as usize) as u32,
        tiles: rows as u32,
        planes: planes as u32,
        groups,
        depth,
        rule: call.rule,
    };
    let few = tiles / (planes * rows) <= ROUNDS * processors;
    let ways = if every {
        [(3, 1), (2, 1), (1, 1)]
    } else {
        [(2, 2), (2, 1), (1, 1)]
    };
    let ways = [(1, 1)].into_iter().filter(|_| few).chain(ways);
    let fits = |blueprint: &TilesBlueprint| fits_shared(client, blueprint.shared_bytes());
    ways.map(blueprint)
        .find(fits)
        .expect("a part of a state that fits")
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
