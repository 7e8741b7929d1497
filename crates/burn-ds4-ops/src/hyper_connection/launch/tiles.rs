//! The launch of the projection for many tokens.

use super::streams::{pending_arg, streams_arg};
use crate::hyper_connection::args::PendingOutput;
use crate::hyper_connection::kernel::{
    ProjectTilesBlueprint, STEP_CHANNELS, TILE_TOKENS, project_tiles_kernel,
};
use crate::launching::prelude::*;

/// Tokens from which on tensor cores are faster.
const MIN_TOKENS: usize = 256;
/// The most streams and rows whose sums a lane keeps in registers.
const MAX_STREAMS: usize = 4;
const MAX_ROWS: usize = 24;
/// Channels of a split, the most that fit first, and elements of a vector.
const SPLIT_CHANNELS: [usize; 3] = [128, 64, STEP_CHANNELS];
const VECTOR: usize = 8;
const PLANES: u32 = 4;
/// Cubes that a multiprocessor has at a time, as far as registers go.
const PROCESSOR_CUBES: usize = 3;

/// How the projection is divided, where there is a kernel for these tokens.
pub(super) fn blueprint(
    pending: &PendingOutput<CubeBackend>,
    streams: &CubeTensor,
    function: &CubeTensor,
) -> Option<ProjectTilesBlueprint> {
    let caps = Caps::of(&streams.client);
    let ([tokens, n, d], [rows, _]) = (streams.shape().dims(), function.shape().dims());
    let pending = match pending {
        PendingOutput::None => true,
        PendingOutput::Some { output, .. } => output.dtype == DType::BF16,
    };
    let fits = caps.tensor_cores
        && pending
        && streams.dtype == DType::BF16
        && tokens >= MIN_TOKENS
        && n <= MAX_STREAMS
        && rows <= MAX_ROWS
        && d.is_multiple_of(VECTOR);
    let blueprints = SPLIT_CHANNELS.map(|channels| ProjectTilesBlueprint {
        streams: n as u32,
        rows: rows as u32,
        channels: channels as u32,
        planes: PLANES,
        target: caps.target,
    });
    let found = blueprints
        .into_iter()
        .find(|own| caps.fits_shared(own.shared_bytes()));
    found.filter(|_| fits)
}

/// Launches [`project_tiles_kernel`]. See [`project`](super::project) for the results.
pub(super) fn project(
    pending: PendingOutput<CubeBackend>,
    streams: CubeTensor,
    function: CubeTensor,
    blueprint: ProjectTilesBlueprint,
) -> (CubeTensor, CubeTensor) {
    let client = streams.client.clone();
    let [tokens, n, d] = streams.shape().dims();
    let splits = d.div_ceil(blueprint.channels as usize);
    let function = into_contiguous(function);
    let size = row_vector_size([&function], d).min(4);
    let streams = with_vectors(streams, VECTOR);
    let partials = output(
        &streams,
        [tokens, blueprint.rows as usize + 1, splits],
        DType::F32,
    );
    let pending = match pending {
        PendingOutput::None => None,
        PendingOutput::Some {
            output,
            coefficients,
        } => Some((with_vectors(output, VECTOR), coefficients)),
    };
    let expanded = match pending {
        Some(_) => output(&streams, [tokens, n, d], streams.dtype),
        None => streams.clone(),
    };
    let tiles = tokens.div_ceil(TILE_TOKENS).div_ceil(PLANES as usize);
    let wanted = (PROCESSOR_CUBES * Caps::of(&client).processors as usize).div_ceil(splits);
    let dtypes = [streams.dtype, function.dtype].map(dtype_to_storage_type);
    let own = pending.as_ref().map_or(&streams, |(own, _)| own);
    let address = address_type([own, &streams, &function, &expanded, &partials]);
    let pending = pending
        .map(|(own, coefficients)| pending_arg(own, coefficients, VECTOR))
        .into();
    // SAFETY: vectors past the end repeat others, count as zeros and are not written to `expanded`;
    // only existing tokens and rows are written. With nothing pending, `expanded` is the streams
    // themselves, and not written.
    unsafe {
        project_tiles_kernel::launch_unchecked(
            &client,
            CubeCount::Static(splits as u32, tiles.min(wanted) as u32, 1),
            CubeDim::new_2d(32, PLANES),
            address,
            VECTOR,
            size,
            pending,
            streams_arg(&streams, VECTOR),
            function.into_buffer_arg(),
            expanded.clone().into_buffer_arg(),
            partials.clone().into_buffer_arg(),
            blueprint,
            dtypes,
        );
    }
    (expanded, partials)
}
