use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{Matrices, optional, parts};
use crate::intrinsics::Target;
use crate::launching::{address_type, cube_count, output, plane_size, processors, vector_size};
use crate::packed::kernel::{
    Columns, Format, ManyBlueprint, SortBlueprint, many_kernel, sort_kernel, sum_slots_kernel,
};

/// Planes of a cube of the many rows' kernel; where there would be fewer cubes than multiprocessors, half as many.
const MANY_PLANES: u32 = 8;
/// Tiles of 8 columns of the many rows' kernel at most.
const MANY_TILES: usize = 8;
/// Units of the cubes that add up rows.
const SUM_UNITS: u32 = 256;

/// Tiles of 8 columns to a cube for so many columns to a matrix.
pub(crate) fn many_tiles(columns: usize) -> usize {
    columns.div_ceil(8).next_power_of_two().clamp(2, MANY_TILES)
}

/// Pairs in groups of one expert.
pub(crate) struct Sorted {
    pub order: CubeTensor,
    pub starts: CubeTensor,
    work: CubeTensor,
    /// Room for pieces of work.
    pieces: usize,
}

/// Groups pairs, and cuts the groups into pieces of no more than `most`.
pub(crate) fn sort(ids: &CubeTensor, experts: usize, most: usize) -> Sorted {
    let client = ids.client.clone();
    let pairs = ids.shape().num_elements();
    let pieces = pairs.min(pairs.div_ceil(most) + experts);
    let sorted = Sorted {
        order: output(ids, [1, pairs], DType::U32),
        starts: output(ids, [1, experts + 1], DType::U32),
        work: output(ids, [1, 3 * pieces + 1], DType::U32),
        pieces,
    };
    let lanes = plane_size(&client).expect("checked by can_multiply");
    let units = client.properties().hardware.max_units_per_cube;
    let planes = (units.min(1024) / lanes)
        .min(pairs.div_ceil(lanes as usize) as u32)
        .max(1);
    let blueprint = SortBlueprint {
        experts: (experts as u32).next_multiple_of(lanes),
        most: most as u32,
        lanes,
        planes,
        target: Target::of(&client),
    };
    // SAFETY: ids that are no experts' are left out; there are no more pieces than there is room for.
    unsafe {
        sort_kernel::launch_unchecked(
            &client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_2d(lanes, planes),
            ids.clone().into_buffer_arg(),
            sorted.order.clone().into_buffer_arg(),
            sorted.starts.clone().into_buffer_arg(),
            sorted.work.clone().into_buffer_arg(),
            pairs as u32,
            experts as u32,
            pieces as u32,
            blueprint,
            dtype_to_storage_type(ids.dtype),
        );
    }
    sorted
}

/// A launch of [`many_kernel`].
pub(crate) struct Many<'a> {
    pub x: &'a CubeTensor,
    pub sorted: Option<&'a Sorted>,
    pub scores: Option<&'a CubeTensor>,
    pub matrices: &'a Matrices,
    pub gated: Option<Format>,
    pub ordered: bool,
    pub pairs: usize,
    pub share: usize,
    /// Tiles of columns of a cube.
    pub columns: usize,
    /// Of the rows of `x`, which gated results are rounded to; what is ordered is made of parts of it.
    pub dtype: DType,
    pub limit: f64,
}

impl Many<'_> {
    pub(crate) fn launch(self, result: &CubeTensor) {
        let matrices = self.matrices;
        let client = self.x.client.clone();
        let parts = parts(self.dtype);
        let (size, element) = if self.ordered {
            (4, DType::U32)
        } else {
            (16 / self.x.elem_size(), self.x.dtype)
        };
        // What is ordered is read in words.
        let stride = self.x.meta.strides()[0] * self.x.elem_size() / 16;
        let outputs = if self.gated.is_some() {
            matrices.rows / 2
        } else {
            matrices.rows
        };
        let mut blueprint = ManyBlueprint {
            columns: Columns {
                format: matrices.format,
                parts,
                ordered: self.ordered,
                halves: false,
            },
            tiles: self.columns as u32,
            planes: MANY_PLANES,
            gated: self.gated,
            even: matrices.columns.is_multiple_of(128),
            target: Target::of(&client),
        };
        let pieces = match self.sorted {
            Some(sorted) => sorted.pieces,
            None => self.pairs.div_ceil(blueprint.rows() as usize),
        };
        let cubes = outputs.div_ceil(blueprint.outputs() as usize) * pieces;
        if cubes < processors(&client) as usize {
            blueprint.planes /= 2;
        }
        let dtypes = [element, self.dtype, result.dtype].map(dtype_to_storage_type);
        // SAFETY: rows and columns past the end are read as the last, or as the first column; writes are within the output.
        unsafe {
            many_kernel::launch_unchecked(
                &client,
                CubeCount::Static(
                    outputs.div_ceil(blueprint.outputs() as usize) as u32,
                    pieces as u32,
                    1,
                ),
                CubeDim::new_2d(32, blueprint.planes),
                address_type([self.x, &matrices.words, result]),
                size,
                self.x.clone().into_buffer_arg(),
                optional(self.sorted.map(|sorted| &sorted.order)),
                optional(self.sorted.map(|sorted| &sorted.work)),
                optional(self.scores),
                matrices.words_arg(),
                matrices.scales_arg(),
                result.clone().into_buffer_arg(),
                self.pairs as u32,
                self.share as u32,
                stride,
                matrices.stack(),
                self.limit as f32,
                blueprint,
                dtypes,
            );
        }
    }
}

/// Adds up the rows of each token's pairs.
pub(crate) fn sum_slots(rows: CubeTensor, ids: &CubeTensor, experts: usize) -> CubeTensor {
    let client = rows.client.clone();
    let ([tokens, slots], [_, columns]) = (ids.shape().dims(), rows.shape().dims());
    let sums = output(&rows, [tokens, columns], DType::F32);
    let size = vector_size(&rows, 4);
    let vectors = columns / size;
    // SAFETY: reads are within `[pairs, columns]`, writes within `[tokens, columns]`.
    unsafe {
        sum_slots_kernel::launch_unchecked(
            &client,
            cube_count(&client, (tokens * vectors).div_ceil(SUM_UNITS as usize)),
            CubeDim::new_1d(SUM_UNITS),
            address_type([&rows, &sums]),
            size,
            rows.into_buffer_arg(),
            ids.clone().into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            tokens as u32,
            slots as u32,
            experts as u32,
            vectors as u32,
            dtype_to_storage_type(ids.dtype),
        );
    }
    sums
}
