//! Launch of attention over a cache for many queries, by warpgroups.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::cached::{block_tensors, fits_cached};
use super::tensors::AttentionTensors;
use crate::attention::args::{CachedBlocks, Queries};
use crate::attention::kernel::{CachedWgmmaBlueprint, WARPGROUP_HEADS, cached_wgmma_kernel};
use crate::attention::options::DECODE_TOKENS;
use crate::caps::Caps;
use crate::launching::{address_type, fits_i32, output, row_vector_size};

/// Channels that rows are a multiple of, and the widest row.
const WIDTH_STEP: usize = 128;
const MAX_WIDTH: usize = 512;
/// Channels of a vector.
const SIZE: usize = 8;
/// Heads from which on a tile is worth its rows without one.
const MIN_HEADS: usize = WARPGROUP_HEADS as usize / 2;
/// Stages, at least and at most.
const STAGES: std::ops::RangeInclusive<u32> = 2..=4;
/// Bytes by which the alignment of tiles may add to shared memory.
const ALIGNMENT: usize = 2 * 1024;

fn blueprint(queries: &Queries<CubeBackend>) -> Option<CachedWgmmaBlueprint> {
    let (width, rotated) = (queries.x.shape()[3], queries.angles.shape()[1]);
    let caps = Caps::of(&queries.x.client);
    let shape_fits =
        width.is_multiple_of(WIDTH_STEP) && width <= MAX_WIDTH && rotated.is_multiple_of(SIZE);
    if !caps.wgmma || !shape_fits {
        return None;
    }
    let with_stages = |stages| CachedWgmmaBlueprint {
        vectors: (width / SIZE) as u32,
        unrotated: ((width - rotated) / SIZE) as u32,
        stages,
        causal: queries.causal,
        f16_input: queries.x.dtype == DType::F16,
        target: caps.target,
    };
    let fits =
        |blueprint: &CachedWgmmaBlueprint| caps.fits_shared(blueprint.shared_bytes() + ALIGNMENT);
    STAGES.rev().map(with_stages).find(fits)
}

/// Whether warpgroups can attend from many queries.
pub(in crate::attention) fn can_attend_prompt(
    queries: &Queries<CubeBackend>,
    window: &CubeTensor,
    blocks: &CachedBlocks<CubeBackend>,
) -> bool {
    let [batch, count, heads, _] = queries.x.shape().dims();
    let (rows, _, _) = block_tensors(blocks);
    let rows = rows.unwrap_or(window);
    let dtype = queries.x.dtype;
    let tiles = heads.div_ceil(WARPGROUP_HEADS as usize);
    // Copies count vectors in 32 bits.
    let indexed = |tensor: &CubeTensor| {
        let spread = tensor.shape()[0] * tensor.meta.strides()[0];
        u32::try_from(spread.max(tensor.shape().num_elements()) / SIZE).is_ok()
    };
    count > DECODE_TOKENS
        && heads >= MIN_HEADS
        && matches!(dtype, DType::F16 | DType::BF16)
        && [window, rows]
            .into_iter()
            .all(|rows| rows.dtype == dtype && indexed(rows))
        && fits_i32(
            batch
                .checked_mul(count)
                .and_then(|all| all.checked_mul(tiles)),
        )
        && fits_cached(queries, window, blocks)
        && row_vector_size([&queries.x, window, rows], queries.x.shape()[3]) >= SIZE
        && blueprint(queries).is_some()
}

pub(in crate::attention) fn attend_prompt(
    queries: Queries<CubeBackend>,
    window: CubeTensor,
    blocks: CachedBlocks<CubeBackend>,
) -> CubeTensor {
    let blueprint = blueprint(&queries).expect("checked by can_attend_prompt");
    let client = queries.x.client.clone();
    let [batch, count, heads, width] = queries.x.shape().dims();
    let (inputs, cached) = AttentionTensors::of_cache(queries, window, &blocks, SIZE);
    let result = output(
        &inputs.queries,
        [batch, count, heads, width],
        inputs.queries.dtype,
    );
    let picks_dtype = inputs
        .picks
        .as_ref()
        .map_or(DType::I32, |picks| picks.dtype);
    let dtypes =
        [result.dtype, picks_dtype, cached.positions.start.dtype].map(dtype_to_storage_type);
    let tiles = batch * count * heads.div_ceil(WARPGROUP_HEADS as usize);
    let cubes = tiles.min(Caps::of(&client).processors as usize);
    let tensors = [&inputs.queries, &inputs.window, &inputs.rows, &result];
    let address = address_type(tensors);
    // SAFETY: heads past the end are read as the last one and not written; hidden columns are not
    // read; slots are taken modulo their number; angles are within the table.
    unsafe {
        cached_wgmma_kernel::launch_unchecked(
            &client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(blueprint.units()),
            address,
            cached.arg(&inputs),
            result.clone().into_buffer_arg(),
            (batch * count) as u32,
            blueprint,
            dtypes,
        );
    }
    result
}
