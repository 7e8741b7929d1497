use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::sink::{compressed_rows, contiguous};
use crate::attention::args::SinkInputs;
use crate::attention::kernel::{
    HeadTiles, SLICE_CHANNELS, SinkTilesBlueprint, TILE_HEADS, TILE_PLANES, sink_tiles_kernel,
};
use crate::caps::Caps;
use crate::launching::{MAX_CUBES, address_type, is_wide_int, output};

/// Tiles of heads, columns and stages of a cube, the best first.
const CANDIDATES: [(u32, u32, u32); 6] = [
    (4, 64, 2),
    (4, 32, 2),
    (2, 64, 2),
    (2, 32, 2),
    (2, 32, 1),
    (1, 64, 1),
];

fn blueprint(queries: &CubeTensor) -> Option<SinkTilesBlueprint> {
    let [_, _, heads, width] = queries.shape().dims();
    let caps = Caps::of(&queries.client);
    let whole_slices = width.is_multiple_of(SLICE_CHANNELS as usize);
    if !caps.tensor_cores || !whole_slices || width > (TILE_PLANES * SLICE_CHANNELS) as usize {
        return None;
    }
    let tiles = heads.div_ceil(TILE_HEADS as usize).next_power_of_two();
    let candidates = CANDIDATES.into_iter();
    let blueprints = candidates.map(|(head_tiles, columns, stages)| SinkTilesBlueprint {
        tiles: HeadTiles {
            head_tiles,
            vectors: (width / 8) as u32,
            columns,
            dot_sums: 1,
            f16_input: queries.dtype == DType::F16,
            target: caps.target,
        },
        stages,
    });
    blueprints
        .filter(|blueprint| blueprint.tiles.head_tiles as usize <= tiles)
        .find(|blueprint| caps.fits_shared(blueprint.tiles.shared_bytes(blueprint.stages)))
}

/// Whether tensor cores can attend from many queries.
pub(in crate::attention) fn can_attend_many(inputs: &SinkInputs<CubeBackend>) -> bool {
    let [batch, count, heads, _] = inputs.queries.shape().dims();
    let (rows, selected, picks) = compressed_rows(inputs);
    let columns = inputs.window.shape()[1];
    let ends = [
        batch.checked_mul(count),
        batch.checked_mul(columns),
        columns.checked_add(selected),
        Some(rows),
    ];
    matches!(inputs.queries.dtype, DType::F16 | DType::BF16)
        && heads <= MAX_CUBES
        && ends
            .into_iter()
            .all(|end| end.is_some_and(|end| i32::try_from(end).is_ok()))
        && picks.is_none_or(|picks| is_wide_int(picks.dtype))
        && blueprint(&inputs.queries).is_some()
}

pub(in crate::attention) fn sink_attention_of_many(inputs: SinkInputs<CubeBackend>) -> CubeTensor {
    let blueprint = blueprint(&inputs.queries).expect("checked by can_attend_many");
    let (inputs, [window_bias, rows_bias]) = contiguous(inputs);
    let inputs = inputs.in_vectors(8);
    let queries = &inputs.queries;
    let client = queries.client.clone();
    let [batch, count, heads, width] = queries.shape().dims();
    let result = output(queries, [batch, count, heads, width], queries.dtype);
    let picks_dtype = inputs
        .picks
        .as_ref()
        .map_or(DType::I32, |picks| picks.dtype);
    let cubes = CubeCount::Static(
        (batch * count) as u32,
        (heads as u32).div_ceil(blueprint.tiles.heads()),
        1,
    );
    let address = address_type([queries, &inputs.window, &inputs.rows, &rows_bias, &result]);
    // SAFETY: heads past the end are read as the last one and not written; columns past the end and
    // picks that are out of range are not read; writes are within the output.
    unsafe {
        sink_tiles_kernel::launch_unchecked(
            &client,
            cubes,
            CubeDim::new_2d(32, TILE_PLANES),
            address,
            inputs.arg(),
            window_bias.into_buffer_arg(),
            rows_bias.into_buffer_arg(),
            result.clone().into_buffer_arg(),
            blueprint,
            [result.dtype, picks_dtype].map(dtype_to_storage_type),
        );
    }
    result
}
