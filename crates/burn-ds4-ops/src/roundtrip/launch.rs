use super::SmallFloat;
use super::kernel::{RoundtripBlueprint, roundtrip_kernel};
use crate::launching::prelude::*;

/// Units of a cube, at most.
const UNITS: u32 = 256;

/// Blocks of columns as they lie in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks {
    /// Columns of a block.
    pub columns: usize,
    /// Blocks that lie by turns, and neighbouring columns of each.
    pub turns: [usize; 2],
}

impl Blocks {
    /// One after the other.
    pub fn new(columns: usize) -> Self {
        Self {
            columns,
            turns: [1, columns],
        }
    }
}

/// How [`round`] divides rows of `x`. `None` where a block is too long for a cube.
fn blueprint(
    x: &CubeTensor,
    blocks: Blocks,
    to: SmallFloat,
    terms: u32,
) -> Option<RoundtripBlueprint> {
    let [_, columns] = x.dims();
    let (block, [count, run]) = (blocks.columns.min(columns), blocks.turns);
    let run = run.min(block);
    let divides = |size: &usize| run.is_multiple_of(*size) && columns.is_multiple_of(*size);
    let sizes = x.client.io_optimized_vector_sizes(x.elem_size());
    let vector = sizes.filter(divides).max().unwrap_or(1);
    let block_vectors = u32::try_from(block / vector).ok()?;
    let group = block_vectors.checked_mul(count as u32)?;
    let units = UNITS.min(Caps::of(&x.client).cube_units);
    (group <= units).then(|| RoundtripBlueprint {
        to,
        vector: vector as u32,
        block_vectors,
        turns: [count as u32, (run / vector) as u32],
        blocks: units / group * count as u32,
        terms,
    })
}

/// Whether [`round`] takes these blocks of rows `[rows, columns]`.
pub(crate) fn can_round(x: &CubeTensor, block: usize) -> bool {
    is_float(x.dtype) && blueprint(x, Blocks::new(block), SmallFloat::Fp8, 1).is_some()
}

/// Rounds rows `[rows, columns]` in blocks of `block` elements.
pub(crate) fn round(x: CubeTensor, block: usize, to: SmallFloat) -> CubeTensor {
    round_terms(x, Blocks::new(block), to, 1)
}

/// Rounds the sums of `terms` rows each, `[rows · terms, columns]`: the first of them becomes the
/// rounded sum, and the others zeros.
pub(crate) fn round_terms(x: CubeTensor, blocks: Blocks, to: SmallFloat, terms: u32) -> CubeTensor {
    let x = into_contiguous(x);
    let blueprint = blueprint(&x, blocks, to, terms).expect("checked by can_round");
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

// With fusion, tensors are of another backend.
#[cfg(all(test, not(feature = "fusion")))]
mod tests {
    use burn::tensor::{Tensor, TensorData};
    use burn_cubecl::CubeBackend;

    use super::*;
    use crate::device::DeviceSpec;

    const COLUMNS: usize = 256;

    /// Where columns of rows lie whose blocks of 32 do so by `count`, `run` columns at a time.
    fn place(column: usize, [count, run]: [usize; 2]) -> usize {
        let (group, block) = (column / (32 * count), column / 32 % count);
        let own = column % 32;
        group * 32 * count + own / run * run * count + block * run + own % run
    }

    #[test]
    fn blocks_that_lie_by_turns_are_rounded_as_those_one_after_the_other() {
        let x: Vec<f32> = (0..2 * COLUMNS)
            .map(|at| (at as f32 * 0.7).sin() * [1.0, 90.0, 0.01, 7.0, 300.0][at / 32 % 5])
            .collect();
        for spec in [DeviceSpec::Wgpu, DeviceSpec::Cuda(0)] {
            let Ok(device) = spec.init() else {
                continue;
            };
            let rounded = |x: &[f32], turns| {
                let data = TensorData::new(x.to_vec(), [2, COLUMNS]);
                let x = Tensor::<2>::from_data(data, &device);
                let x = x.try_into_primitive::<CubeBackend>();
                let x = x.expect("a tensor of this backend");
                let blocks = Blocks { columns: 32, turns };
                let rounded = round_terms(x, blocks, SmallFloat::Fp8, 1);
                let rounded = Tensor::<2>::from_primitive::<CubeBackend>(rounded);
                rounded.into_data().iter::<f32>().collect::<Vec<_>>()
            };
            let expected = rounded(&x, [1, 32]);
            assert_ne!(expected, x);
            for turns in [[4, 8], [2, 16], [4, 2]] {
                let places: Vec<usize> = (0..2 * COLUMNS)
                    .map(|at| at / COLUMNS * COLUMNS + place(at % COLUMNS, turns))
                    .collect();
                let mut arranged = vec![0.0; x.len()];
                for (x, &place) in x.iter().zip(&places) {
                    arranged[place] = *x;
                }
                let actual = rounded(&arranged, turns);
                let actual: Vec<f32> = places.iter().map(|&place| actual[place]).collect();
                assert_eq!(actual, expected, "{spec} {turns:?}");
            }
        }
    }
}
