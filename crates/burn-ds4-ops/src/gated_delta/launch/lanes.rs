//! Launches the kernel that runs on any device.

use super::Call;
use crate::gated_delta::args::MAX_TOKENS;
use crate::gated_delta::kernel::{LanesBlueprint, lanes_kernel};
use crate::launching::prelude::*;

/// The fewest elements of a row in a lane where there are enough lanes, and the most.
const MIN_LANE_WIDTH: usize = 16;
const MAX_LANE_WIDTH: usize = 32;
/// Registers in which a lane keeps elements of a state. A small batch uses fewer, so that it
/// spreads over all SMs.
const REGISTERS: usize = 32;
const SMALL_BATCH_REGISTERS: usize = 16;
/// The most rows for each SM of a small batch.
const SMALL_BATCH_ROWS_PER_SM: usize = 128;
/// The fewest planes of a cube, and of one of a small batch. There may be more, so that there are
/// as many units as tokens.
const MIN_CUBE_PLANES: u32 = 2;
const MIN_SMALL_BATCH_PLANES: u32 = 1;

/// Returns the lanes that share a row of `width` elements, and the vectors of `size` in each lane.
/// Returns `None` if a lane would have too much, because the row is long or has few factors of two.
pub(super) fn partition(client: &Client, width: usize, size: usize) -> Option<(usize, usize)> {
    let plane = Caps::of(client).plane()? as usize;
    let vectors = width / size;
    // As many lanes as divide the row, but not so many that a lane has fewer than a few elements.
    let most = plane.min((width / MIN_LANE_WIDTH).max(1));
    let lanes = 1 << vectors.trailing_zeros().min(most.ilog2());
    let lane_vectors = vectors / lanes;
    (lane_vectors * size <= MAX_LANE_WIDTH).then_some((lanes, lane_vectors))
}

pub(super) fn launch(call: Call) {
    let client = call.pool.client.clone();
    let [batch, tokens, heads, channels, width] = call.dims();
    let single_token = tokens == 1;
    let plane = Caps::of(&client).plane().expect("checked by can_run");
    let (lanes, lane_vectors) = partition(&client, width, call.size).expect("checked by can_run");
    let register_dtype = if single_token {
        call.pool.dtype
    } else {
        DType::F32
    };
    let small_batch =
        batch * heads * channels <= SMALL_BATCH_ROWS_PER_SM * Caps::of(&client).processors as usize;
    let (registers, least_planes) = if small_batch && single_token {
        (SMALL_BATCH_REGISTERS, MIN_SMALL_BATCH_PLANES)
    } else {
        (REGISTERS, MIN_CUBE_PLANES)
    };
    let planes = least_planes.max((MAX_TOKENS as u32).div_ceil(plane));
    let groups = planes * (plane / lanes as u32);
    let elements = registers * DType::F32.size() / register_dtype.size();
    let rows = elements / (lane_vectors * call.size);
    let rows = rows.min(channels.div_ceil(groups as usize)).max(1);
    let blueprint = LanesBlueprint {
        lanes: lanes as u32,
        lane_vectors: lane_vectors as u32,
        rows: rows as u32,
        single_token,
        plane,
        planes,
        rule: call.rule,
        target: Caps::of(&client).target,
    };
    let blocks = channels.div_ceil(blueprint.cube_rows() as usize);
    let cubes = batch * heads * blocks;
    let [a, b, dt_bias, read, write, accepted] = call.dtypes();
    let (q, pool) = (call.q.dtype, call.pool.dtype);
    let dtypes = [
        q,
        a,
        b,
        dt_bias,
        pool,
        register_dtype,
        read,
        write,
        accepted,
    ];
    let tensors = [
        &call.q, &call.k, &call.v, &call.a, &call.b, &call.pool, &call.out,
    ];
    let states = call.states.as_ref().unwrap_or(&call.out);
    let address_type = address_type(tensors).max(address_type([states]));
    // SAFETY: slots that do not exist are not used; rows past the end repeat other rows and are not
    // written.
    unsafe {
        lanes_kernel::launch_unchecked(
            &client,
            cube_count(&client, cubes),
            CubeDim::new_2d(plane, planes),
            address_type,
            call.size,
            call.inputs(),
            call.gates(),
            call.slots(),
            call.results(),
            call.shape(),
            blueprint,
            dtypes.map(dtype_to_storage_type),
        );
    }
}
