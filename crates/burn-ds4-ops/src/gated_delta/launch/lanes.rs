//! The kernel for any device.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::Call;
use crate::gated_delta::kernel::{LanesBlueprint, lanes_kernel};
use crate::intrinsics::Target;
use crate::launching::{address_type, cube_count, plane_size};

/// Elements of a row that a lane has, if there are lanes enough for that, and at most.
const LANE_WIDTH: usize = 8;
const MAX_LANE_WIDTH: usize = 32;
/// Elements of a state that a lane keeps in registers.
const LANE_ELEMENTS: usize = 32;
/// Planes of a cube.
const PLANES: u32 = 4;

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
    let [batch, _, heads, channels, width] = call.dims();
    let plane = plane_size(&client).expect("checked by can_run");
    let (lanes, steps) = cut(&client, width, call.size).expect("checked by can_run");
    let groups = PLANES * (plane / lanes as u32);
    let rows = (LANE_ELEMENTS / (steps * call.size)).min(channels.div_ceil(groups as usize));
    let blueprint = LanesBlueprint {
        lanes: lanes as u32,
        steps: steps as u32,
        rows: rows as u32,
        plane,
        planes: PLANES,
        rule: call.rule,
        target: Target::of(&client),
    };
    let cubes = batch * heads * channels.div_ceil(blueprint.cube_rows() as usize);
    let [a, b, dt_bias, read, write, accepted] = call.dtypes();
    let (q, pool) = (call.q.dtype, call.pool.dtype);
    let dtypes = [q, a, b, dt_bias, pool, read, write, accepted];
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
            CubeDim::new_2d(plane, PLANES),
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
