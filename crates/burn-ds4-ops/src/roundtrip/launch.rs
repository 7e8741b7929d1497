use super::SmallFloat;
use super::kernel::{RoundtripBlueprint, roundtrip_kernel};
use crate::launching::prelude::*;

/// Units of a cube, at most.
const UNITS: u32 = 256;

/// How [`round`] divides rows of `x`. `None` where a block is too long for a cube.
fn blueprint(
    x: &CubeTensor,
    block: usize,
    to: SmallFloat,
    terms: u32,
) -> Option<RoundtripBlueprint> {
    let [_, columns] = x.dims();
    let block = block.min(columns);
    let divides = |size: &usize| block.is_multiple_of(*size) && columns.is_multiple_of(*size);
    let sizes = x.client.io_optimized_vector_sizes(x.elem_size());
    let vector = sizes.filter(divides).max().unwrap_or(1);
    let block_vectors = u32::try_from(block / vector).ok()?;
    let units = UNITS.min(Caps::of(&x.client).cube_units);
    (block_vectors <= units).then(|| RoundtripBlueprint {
        to,
        vector: vector as u32,
        block_vectors,
        blocks: units / block_vectors,
        terms,
    })
}

/// Whether [`round`] takes these blocks of rows `[rows, columns]`.
pub(crate) fn can_round(x: &CubeTensor, block: usize) -> bool {
    is_float(x.dtype) && blueprint(x, block, SmallFloat::Fp8, 1).is_some()
}

/// Rounds rows `[rows, columns]` in blocks of `block` elements.
pub(crate) fn round(x: CubeTensor, block: usize, to: SmallFloat) -> CubeTensor {
    round_terms(x, block, to, 1)
}

/// Rounds the sums of `terms` rows each, `[rows · terms, columns]`: the first of them becomes the
/// rounded sum, and the others zeros.
pub(crate) fn round_terms(x: CubeTensor, block: usize, to: SmallFloat, terms: u32) -> CubeTensor {
    let x = into_contiguous(x);
    let blueprint = blueprint(&x, block, to, terms).expect("checked by can_round");
    let client = x.client.clone();
    let [rows, columns] = x.dims();
    let rounded = output(&x, [rows, columns], x.dtype);
    let (rows, vectors) = (rows / terms as usize, columns / blueprint.vector as usize);
    let blocks = rows * vectors.div_ceil(blueprint.block_vectors as usize);
    // SAFETY: units past the end read the first vector and write nothing.
    unsafe {
        roundtrip_kernel::launch_unchecked(
            &client,
            cube_count(&client, blocks.div_ceil(blueprint.blocks as usize)),
            CubeDim::new_1d(blueprint.units()),
            address_type([&x, &rounded]),
            blueprint.vector as usize,
            x.clone().into_buffer_arg(),
            rounded.clone().into_buffer_arg(),
            rows,
            vectors,
            blueprint,
            dtype_to_storage_type(x.dtype),
        );
    }
    rounded
}
