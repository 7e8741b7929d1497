//! Launches of the indexer's scores.

use super::pages::Pages;
use super::rows::can_rotate_at;
use super::tensors::{Positions, stride};
use crate::attention::args::{BlockVisibility, IndexInputs, QueryRotation};
use crate::attention::kernel::{
    INDEX_PLANES, INDEX_TILE_ROWS, IndexInputsLaunch, IndexSizesLaunch, IndexTilesBlueprint,
    index_kernel, index_tiles_kernel,
};
use crate::launching::prelude::*;

/// Widest row of the kernel: a unit holds all of it.
const MAX_INDEX_WIDTH: usize = 256;
/// Rows of a cube.
const INDEX_UNITS: u32 = 64;
/// Cubes for each SM up to which all of them request everything at once, and rotate all queries:
/// that takes less than a launch of its own as long as they run at the same time.
const MAX_CUBES_AT_ONCE: usize = 4;
/// Channels that four lanes load at a time for tensor cores.
const INDEX_TILE_CHANNELS: usize = 32;

pub(in crate::attention) fn can_score(inputs: &IndexInputs<CubeBackend>) -> bool {
    let (queries, keys) = (&inputs.queries, &inputs.keys);
    let fits = match &inputs.visibility {
        BlockVisibility::All => true,
        BlockVisibility::From { start, ratio } => {
            is_wide_int(start.dtype) && i32::try_from(*ratio).is_ok()
        }
    };
    let [batch, count, heads, width] = queries.dims();
    let rows = keys.count();
    fits && keys.fits()
        && is_float(queries.dtype)
        && width <= MAX_INDEX_WIDTH
        && batch * count <= MAX_CUBES
        && rows.div_ceil(INDEX_TILE_ROWS as usize) <= MAX_CUBES
        && u32::try_from(batch * count * heads).is_ok()
}

pub(in crate::attention) fn index_scores(inputs: IndexInputs<CubeBackend>) -> CubeTensor {
    let IndexInputs {
        queries,
        keys,
        weights,
        scale,
        visibility,
        rotation,
    } = inputs;
    let client = queries.client.clone();
    let [batch, count, heads, width] = queries.dims();
    let (rows, pages) = (keys.count(), Pages::new(&keys.pages, &keys.rows));
    let at_once = is_at_once(&queries, rows);
    let keys = keys.laid_out();
    // The order of a sum must not depend on the layout of the rows.
    let size = row_vector_size([&queries, &keys], width);
    let tiles = has_tiles(&queries, &keys);
    let rotation = match rotation {
        QueryRotation::None => None,
        QueryRotation::At { angles, start } => Some(Positions::new(angles, start)),
    };
    let (queries, keys) = (with_vectors(queries, size), with_vectors(keys, size));
    let result = output(&queries, [batch, count, rows], DType::F32);
    let vectors = |tensor: &CubeTensor, axis: usize| stride(tensor, axis) / size;
    let (start, ratio) = match visibility {
        BlockVisibility::All => (None, 1),
        BlockVisibility::From { start, ratio } => (Some(into_contiguous(start)), ratio),
    };
    let sizes = IndexSizesLaunch::new(
        ratio as u32,
        count as u32,
        count as u32,
        heads as u32,
        rows as u32,
        scale as f32,
        vectors(&queries, 0),
        vectors(&queries, 1),
        vectors(&queries, 2),
        // Pages are of any sequence.
        pages.as_ref().map_or_else(|| vectors(&keys, 0), |_| 0),
        vectors(&keys, 1),
    );
    let tokens = (batch * count) as u32;
    let cubes = |height| CubeCount::Static((rows as u32).div_ceil(height), tokens, 1);
    let starts = start.iter().chain(rotation.as_ref().map(|of| &of.start));
    let start_dtype = starts.map(|start| start.dtype).next().unwrap_or(DType::I32);
    let dtypes = [queries.dtype, start_dtype].map(dtype_to_storage_type);
    let table = rotation.as_ref().map(|of| address_type([&of.angles]));
    let address = address_type([&queries, &keys, &result]).max(table.unwrap_or_default());
    let blueprint = IndexTilesBlueprint {
        steps: (width / INDEX_TILE_CHANNELS) as u32,
        f16_input: queries.dtype == DType::F16,
        at_once,
        unrotated: rotation
            .as_ref()
            .map(|of| ((width - of.angles.shape()[1]) / size) as u32),
        target: Caps::of(&client).target,
    };
    let tensors = [queries, keys, into_contiguous(weights)];
    if tiles {
        // SAFETY: rows and heads past the end are read as the last ones, and not counted.
        unsafe {
            index_tiles_kernel::launch_unchecked(
                &client,
                cubes(INDEX_TILE_ROWS),
                CubeDim::new_2d(32, INDEX_PLANES),
                address,
                inputs_arg(tensors, pages.as_ref(), start, rotation, sizes),
                result.clone().into_buffer_arg(),
                blueprint,
                dtypes,
            );
        }
        return result;
    }
    // SAFETY: rows past the end are read as the last one, and not written.
    unsafe {
        index_kernel::launch_unchecked(
            &client,
            cubes(INDEX_UNITS),
            CubeDim::new_2d(INDEX_UNITS, INDEX_PLANES),
            address,
            size,
            inputs_arg(tensors, pages.as_ref(), start, None, sizes),
            result.clone().into_buffer_arg(),
            (width / size) as u32,
            INDEX_UNITS,
            dtypes,
        );
    }
    result
}

fn inputs_arg<F: Float, P: Int, N: Size>(
    [queries, keys, weights]: [CubeTensor; 3],
    pages: Option<&Pages>,
    start: Option<CubeTensor>,
    rotation: Option<Positions>,
    sizes: IndexSizesLaunch,
) -> IndexInputsLaunch<F, P, N> {
    IndexInputsLaunch::new(
        queries.into_buffer_arg(),
        keys.into_buffer_arg(),
        pages.map(Pages::arg).into(),
        weights.into_buffer_arg(),
        start.map(CubeTensor::into_buffer_arg).into(),
        rotation.map(|of| of.arg()).into(),
        sizes,
    )
}

/// Whether all cubes request everything at once.
fn is_at_once(queries: &CubeTensor, rows: usize) -> bool {
    let [batch, count, _, _] = queries.dims();
    let cubes = rows.div_ceil(INDEX_TILE_ROWS as usize) * batch * count;
    cubes <= MAX_CUBES_AT_ONCE * Caps::of(&queries.client).processors as usize
}

/// Whether the launch can rotate queries: both starts have one dtype, and whole vectors are
/// rotated.
pub(in crate::attention) fn rotates(inputs: &IndexInputs<CubeBackend>) -> bool {
    let (queries, keys) = (&inputs.queries, &inputs.keys);
    let QueryRotation::At { angles, start } = &inputs.rotation else {
        return false;
    };
    let alike = match &inputs.visibility {
        BlockVisibility::All => true,
        BlockVisibility::From { start: own, .. } => own.dtype == start.dtype,
    };
    alike
        && has_tiles(queries, &keys.rows)
        && is_at_once(queries, keys.count())
        && can_rotate_at(queries, angles, start)
        && angles.shape()[1].is_multiple_of(8)
}

/// Whether tensor cores can multiply them: floats of 16 bits in vectors of 16 bytes, in equal
/// numbers for each of four lanes.
fn has_tiles(queries: &CubeTensor, keys: &CubeTensor) -> bool {
    let width = queries.shape()[3];
    let dtypes = [queries.dtype, keys.dtype];
    (dtypes == [DType::BF16; 2] || dtypes == [DType::F16; 2])
        && row_vector_size([queries, keys], width) == 8
        && width.is_multiple_of(INDEX_TILE_CHANNELS)
        && Caps::of(&queries.client).tensor_cores
}
