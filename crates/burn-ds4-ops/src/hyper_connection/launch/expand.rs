use super::streams::{fits, pending_arg, streams_arg};
use crate::hyper_connection::kernel::expand_kernel;
use crate::launching::prelude::*;

/// Units of a cube that spreads a token's output.
const EXPAND_UNITS: u32 = 128;

pub(in super::super) fn can_expand(y: &CubeTensor, streams: &CubeTensor) -> bool {
    let units = Caps::of(&streams.client).cube_units;
    fits(streams) && is_float(y.dtype) && units >= EXPAND_UNITS
}

pub(in super::super) fn expand(
    y: CubeTensor,
    streams: CubeTensor,
    coefficients: CubeTensor,
) -> CubeTensor {
    let (y, streams) = (with_contiguous_rows(y), with_contiguous_rows(streams));
    let [tokens, n, d] = streams.dims();
    let client = streams.client.clone();
    let expanded = output(&streams, [tokens, n, d], streams.dtype);
    let size = vector_size(&streams, usize::MAX).min(vector_size(&y, usize::MAX));
    let cubes = (d / size).div_ceil(EXPAND_UNITS as usize);
    let dtypes = [streams.dtype, y.dtype].map(dtype_to_storage_type);
    // SAFETY: tokens and vectors past the end are neither read nor written.
    unsafe {
        expand_kernel::launch_unchecked(
            &client,
            cube_count(&client, tokens * cubes),
            CubeDim::new_1d(EXPAND_UNITS),
            address_type([&y, &streams, &expanded]),
            size,
            pending_arg(y, coefficients, size),
            streams_arg(&streams, size),
            expanded.clone().into_buffer_arg(),
            cubes as u32,
            n,
            dtypes,
        );
    }
    expanded
}
