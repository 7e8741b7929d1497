//! The launch of the projection: on tensor cores for many tokens, by planes for fewer.

use super::streams::{pending_arg, streams_arg};
use crate::hyper_connection::args::{Mix, PendingOutput};
use crate::hyper_connection::kernel::{
    ProjectBlueprint, ProjectTilesBlueprint, STEP_CHANNELS, SpreadOutputLaunch, TILE_TOKENS,
    expand_project_kernel, project_tiles_kernel,
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

/// Tokens from which on tensor cores are faster.
const TILES_TOKENS: usize = 256;
/// The most streams and rows whose sums a lane keeps in registers.
const TILES_STREAMS: usize = 4;
const TILES_ROWS: usize = 24;
/// Channels of a split on tensor cores, the most that fit first, and elements of a vector.
const TILES_CHANNELS: [usize; 3] = [128, 64, STEP_CHANNELS];
const TILES_VECTOR: usize = 8;
const TILES_PLANES: u32 = 4;
/// Cubes that a multiprocessor has at a time, as far as registers go.
const PROCESSOR_CUBES: usize = 3;

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
    let [tokens, n, d] = mix.streams.dims();
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

/// How the projection is divided on tensor cores, where they take these tokens.
fn tiles_blueprint(
    pending: Option<&CubeTensor>,
    streams: &CubeTensor,
    function: &CubeTensor,
) -> Option<ProjectTilesBlueprint> {
    let caps = Caps::of(&streams.client);
    let ([tokens, n, d], [rows, _]) = (streams.dims(), function.dims());
    let fits = caps.tensor_cores
        && pending.is_none_or(|output| output.dtype == DType::BF16)
        && streams.dtype == DType::BF16
        && tokens >= TILES_TOKENS
        && n <= TILES_STREAMS
        && rows <= TILES_ROWS
        && d.is_multiple_of(TILES_VECTOR);
    let mut blueprints =
        TILES_CHANNELS
            .into_iter()
            .filter(|_| fits)
            .map(|channels| ProjectTilesBlueprint {
                streams: n as u32,
                rows: rows as u32,
                channels: channels as u32,
                planes: TILES_PLANES,
                target: caps.target,
            });
    blueprints.find(|own| caps.fits_shared(own.shared_bytes()))
}

/// Returns the streams with nothing pending, and the partials of their projection:
/// `[tokens, rows + 1, splits]`.
pub(super) fn project(
    pending: PendingOutput<CubeBackend>,
    streams: CubeTensor,
    function: CubeTensor,
) -> (CubeTensor, CubeTensor) {
    let client = streams.client.clone();
    let [tokens, n, d] = streams.dims();
    let [rows, _] = function.dims();
    let pending = match pending {
        PendingOutput::None => None,
        PendingOutput::Some {
            output,
            coefficients,
        } => Some((output, coefficients)),
    };
    let own = pending.as_ref().map(|(own, _)| own);
    let tiles = tiles_blueprint(own, &streams, &function);
    // The vector size depends on dtype and width alone: other vectors would be added up in another
    // order.
    let size = match &tiles {
        Some(_) => TILES_VECTOR,
        None => row_vector_size([&streams, own.unwrap_or(&streams)], d),
    };
    let function = into_contiguous(function);
    let columns = row_vector_size([&function], d).min(MAX_VECTOR).min(size);
    let channels = tiles.map_or(split_channels(n), |tiles| tiles.channels as usize);
    let splits = d.div_ceil(channels);
    let partials = output(&streams, [tokens, rows + 1, splits], DType::F32);
    let streams = with_vectors(streams, size);
    let pending = pending.map(|(own, coefficients)| (with_vectors(own, size), coefficients));
    let is_pending = pending.is_some();
    let result = match is_pending {
        true => output(&streams, [tokens, n, d], streams.dtype),
        false => streams.clone(),
    };
    let own = pending.as_ref().map_or(&streams, |(own, _)| own);
    let [of_streams, of_output, of_function] =
        [streams.dtype, own.dtype, function.dtype].map(dtype_to_storage_type);
    let address = address_type([own, &streams, &function, &result, &partials]);
    let expanded = result.clone().into_buffer_arg();
    let to = partials.clone().into_buffer_arg();
    if let Some(blueprint) = tiles {
        let pending = pending.map(|(own, coefficients)| pending_arg(own, coefficients, size));
        let cubes = tokens.div_ceil(TILE_TOKENS).div_ceil(TILES_PLANES as usize);
        let wanted = (PROCESSOR_CUBES * Caps::of(&client).processors as usize).div_ceil(splits);
        // SAFETY: vectors past the end repeat others, count as zeros and are not written to
        // `expanded`; only existing tokens and rows are written. With nothing pending, `expanded`
        // is the streams themselves, and not written.
        unsafe {
            project_tiles_kernel::launch_unchecked(
                &client,
                CubeCount::Static(splits as u32, cubes.min(wanted) as u32, 1),
                CubeDim::new_2d(32, TILES_PLANES),
                address,
                size,
                columns,
                pending.into(),
                streams_arg(&streams, size),
                function.into_buffer_arg(),
                expanded,
                to,
                blueprint,
                [of_streams, of_function],
            );
        }
        return (result, partials);
    }
    let plane = Caps::of(&client).plane().expect("checked by can_collapse");
    let lanes = LANES_PER_ROW.min(plane);
    let most = PROJECT_UNITS.min(Caps::of(&client).cube_units);
    let planes = ((rows as u32 + 1) * lanes)
        .div_ceil(plane)
        .min(most / plane);
    let cube_tokens = cube_tokens(tokens, splits, &client);
    let blueprint = ProjectBlueprint {
        cube_tokens: cube_tokens as u32,
        streams: n as u32,
        rows: rows as u32,
        channels: channels as u32,
        lanes,
        groups: planes * plane / lanes,
        target: Caps::of(&client).target,
    };
    let spread = SpreadOutputLaunch::new(
        pending
            .map(|(own, coefficients)| pending_arg(own, coefficients, size))
            .into(),
        is_pending.then_some(expanded).into(),
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
            to,
            blueprint,
            [of_streams, of_output, of_function],
        );
    }
    (result, partials)
}
