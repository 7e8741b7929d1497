//! The launch of the projection.

use super::streams::{pending_arg, streams_arg};
use super::tiles;
use crate::hyper_connection::args::{Mix, PendingOutput};
use crate::hyper_connection::kernel::{
    ProjectBlueprint, SpreadOutputLaunch, expand_project_kernel,
};
use crate::launching::prelude::*;

/// Channels of a split of the projection, and the same with more than [`MAX_STREAMS_WIDE_SPLIT`]
/// streams.
const SPLIT_CHANNELS: usize = 64;
const NARROW_SPLIT_CHANNELS: usize = 32;
const MAX_STREAMS_WIDE_SPLIT: usize = 4;
/// Lanes that share a row of the projection: they read 128 bytes at once.
const LANES_PER_ROW: u32 = 8;
/// The most units of a cube that projects.
const PROJECT_UNITS: u32 = 256;
/// The most elements of a vector of the projection.
const MAX_VECTOR: usize = 4;
/// The most tokens of a cube that projects. It reads its part of the projection once for them.
const MAX_CUBE_TOKENS: usize = 16;
/// Cubes for each multiprocessor up to which tokens have as many cubes as can be.
const CUBES_PER_PROCESSOR: usize = 2;

fn split_channels(n: usize) -> usize {
    if n <= MAX_STREAMS_WIDE_SPLIT {
        SPLIT_CHANNELS
    } else {
        NARROW_SPLIT_CHANNELS
    }
}

/// Tokens of a cube: the fewest that leave each multiprocessor of `client` few cubes.
fn cube_tokens(tokens: usize, splits: usize, client: &Client) -> usize {
    let cubes = CUBES_PER_PROCESSOR * Caps::of(client).processors as usize;
    (tokens * splits)
        .div_ceil(cubes.max(1))
        .next_power_of_two()
        .min(MAX_CUBE_TOKENS)
}

/// Whether there are kernels for the number of tokens and for all inputs.
pub(super) fn can_project(pending: &PendingOutput<CubeBackend>, mix: &Mix<CubeBackend>) -> bool {
    let [tokens, n, d] = mix.streams.shape().dims();
    let client = &mix.streams.client;
    let output = match pending {
        PendingOutput::None => true,
        PendingOutput::Some { output, .. } => is_float(output.dtype),
    };
    let splits = d.div_ceil(split_channels(n));
    let shared_bytes = MAX_CUBE_TOKENS * n * split_channels(n) * size_of::<f32>();
    output
        && is_float(mix.function.dtype)
        && i32::try_from(mix.function.shape().num_elements()).is_ok()
        && splits <= MAX_CUBES
        && tokens.div_ceil(cube_tokens(tokens, splits, client)) <= MAX_CUBES
        && Caps::of(client).fits_shared(shared_bytes)
}

/// Returns the streams with nothing pending, and the partials of their projection:
/// `[tokens, rows + 1, splits]`.
pub(super) fn project(
    pending: PendingOutput<CubeBackend>,
    streams: CubeTensor,
    function: CubeTensor,
) -> (CubeTensor, CubeTensor) {
    if let Some(blueprint) = tiles::blueprint(&pending, &streams, &function) {
        return tiles::project(pending, streams, function, blueprint);
    }
    let client = streams.client.clone();
    let [tokens, n, d] = streams.shape().dims();
    let [rows, _] = function.shape().dims();
    let plane = Caps::of(&client).plane().expect("checked by can_collapse");
    let lanes = LANES_PER_ROW.min(plane);
    let most = PROJECT_UNITS.min(Caps::of(&client).cube_units);
    let wanted = (rows as u32 + 1) * lanes;
    let planes = wanted.div_ceil(plane).min(most / plane);
    let splits = d.div_ceil(split_channels(n));
    let cube_tokens = cube_tokens(tokens, splits, &client);
    let blueprint = ProjectBlueprint {
        cube_tokens: cube_tokens as u32,
        streams: n as u32,
        rows: rows as u32,
        channels: split_channels(n) as u32,
        lanes,
        groups: planes * plane / lanes,
        target: Caps::of(&client).target,
    };
    let function = into_contiguous(function);
    let partials = output(&streams, [tokens, rows + 1, splits], DType::F32);
    // The vector size depends on dtype and width alone: other vectors would be added up in another
    // order.
    let size = match &pending {
        PendingOutput::None => row_vector_size([&streams], d),
        PendingOutput::Some { output, .. } => row_vector_size([&streams, output], d),
    };
    let columns = row_vector_size([&function], d).min(MAX_VECTOR).min(size);
    let streams = with_vectors(streams, size);
    let (pending, expanded) = match pending {
        PendingOutput::None => (None, None),
        PendingOutput::Some {
            output: own,
            coefficients,
        } => {
            let expanded = output(&streams, [tokens, n, d], streams.dtype);
            (
                Some((with_vectors(own, size), coefficients)),
                Some(expanded),
            )
        }
    };
    let own = pending.as_ref().map_or(&streams, |(own, _)| own);
    let dtypes = [streams.dtype, own.dtype, function.dtype].map(dtype_to_storage_type);
    let result = expanded.clone().unwrap_or_else(|| streams.clone());
    let address = address_type([own, &streams, &function, &result, &partials]);
    let spread = SpreadOutputLaunch::new(
        pending
            .map(|(own, coefficients)| pending_arg(own, coefficients, size))
            .into(),
        expanded.map(CubeTensor::into_buffer_arg).into(),
    );
    // SAFETY: vectors past the end repeat others, count as zeros and are not written to `expanded`;
    // only existing tokens and rows are written.
    unsafe {
        expand_project_kernel::launch_unchecked(
            &client,
            CubeCount::Static(splits as u32, tokens.div_ceil(cube_tokens) as u32, 1),
            CubeDim::new_2d(plane, planes),
            address,
            size,
            columns,
            spread,
            streams_arg(&streams, size),
            function.into_buffer_arg(),
            partials.clone().into_buffer_arg(),
            blueprint,
            dtypes,
        );
    }
    (result, partials)
}
