//! The kernel for any device.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::Call;
use crate::gated_delta::MAX_TOKENS;
use crate::gated_delta::kernel::{LanesBlueprint, lanes_kernel};
use crate::intrinsics::Target;
use crate::launching::{address_type, cube_count, plane_size, processors};

/// Elements of a row that a lane has, if there are lanes enough for that, and at most.
const LANE_WIDTH: usize = 16;
const MAX_LANE_WIDTH: usize = 32;
/// Registers in which a lane keeps elements of a state, and for few states, which shall be everywhere.
const REGISTERS: usize = 32;
const FEW_REGISTERS: usize = 16;
/// Rows to a processor that are few.
const FEW_ROWS: usize = 64;
/// Planes of a cube, if its units are as many as there may be tokens.
const PLANES: u32 = 2;

/// Lanes that share a row of `width` elements, and vectors of `size` that each has; `None` if that is too much for a lane, because the
/// row is long or has few factors of two.
pub(super) fn cut(client: &Client, width: usize, size: usize) -> Option<(usize, usize)> {
    let plane = plane_size(client)? as usize;
    let vectors = width / size;
    // As many as divide the row, but no more than leave a lane a few elements.
    let most = plane.min((width / LANE_WIDTH).max(1));
    let lanes = 1 << vectors.trailing_zeros().min(most.ilog2());
    let steps = vectors / lanes;
    (steps * size <= MAX_LANE_WIDTH).then_some((lanes, steps))
}

pub(super) fn launch(call: Call) {
    let client = call.pool.client.clone();
    let [batch, tokens, heads, channels, width] = call.dims();
    let single = tokens == 1;
    let plane = plane_size(&client).expect("checked by can_run");
    let (lanes, steps) = cut(&client, width, call.size).expect("checked by can_run");
    let held = if single { call.pool.dtype } else { DType::F32 };
    let planes = PLANES.max((MAX_TOKENS as u32).div_ceil(plane));
    let groups = planes * (plane / lanes as u32);
    let few = batch * heads * channels <= FEW_ROWS * processors(&client) as usize;
    let registers = if few && single {
        FEW_REGISTERS
    } else {
        REGISTERS
    };
    let elements = registers * DType::F32.size() / held.size();
    let rows = elements / (steps * call.size);
    let rows = rows.min(channels.div_ceil(groups as usize)).max(1);
    let blueprint = LanesBlueprint {
        lanes: lanes as u32,
        steps: steps as u32,
        rows: rows as u32,
        single,
        plane,
        planes,
        rule: call.rule,
        target: Target::of(&client),
    };
    let blocks = channels.div_ceil(blueprint.cube_rows() as usize);
    let cubes = batch * heads * blocks;
    let [a, b, dt_bias, read, write, accepted] = call.dtypes();
    let (q, pool) = (call.q.dtype, call.pool.dtype);
    let dtypes = [q, a, b, dt_bias, pool, held, read, write, accepted];
    let tensors = [
        &call.q, &call.k, &call.v, &call.a, &call.b, &call.pool, &call.out,
    ];
    let states = call.states.as_ref().unwrap_or(&call.out);
    let address_type = address_type(tensors).max(address_type([states]));
    let (sizes, places, numbers) = (call.sizes(), call.places(), call.numbers());
    // SAFETY: slots that are none are not used, rows past the end are read as others and not written.
    unsafe {
        lanes_kernel::launch_unchecked(
            &client,
            cube_count(&client, cubes),
            CubeDim::new_2d(plane, planes),
            address_type,
            call.size,
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
            places,
            numbers,
            blueprint,
            dtypes.map(dtype_to_storage_type),
        );
    }
}
