use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::intrinsics::Target;
use crate::launching::{
    MAX_CUBES, address_type, aligned, fits_shared, has_tensor_cores, is_float, narrow, plane_size,
    processors, vector_size, with_vectors,
};
use crate::matmul::INVARIANT_ROWS;
use crate::matmul::kernel::{
    PicksLaunch, Place, RowsBlueprint, STRETCH, SourceBlueprint, TilesBlueprint, rows_kernel,
    tiles_kernel,
};

/// Rows of `x` up to which tensor cores multiply by 16-bit weights as they stream by, faster than the product of many rows does.
const STREAMED_ROWS: usize = 32;
/// Planes of a cube that share rows of weights, at most: on tensor cores, and without.
const PLANES: usize = 8;
const ROW_PLANES: usize = 16;
/// Planes of a multiprocessor, with so many registers as the kernel for tensor cores needs.
const PROCESSOR_PLANES: u32 = 16;
/// Rows of weights of a cube without tensor cores, where there are many.
const HEIGHT: u32 = 4;
const MANY_HEIGHTS: usize = 1024;
/// Rows of `x` of a cube without tensor cores, at most.
const TILE: usize = 16;
/// Vectors of a row that a lane multiplies by, at least, before another plane helps.
const LANE_VECTORS: usize = 4;
/// Vectors of weights that a lane has on their way, and vectors of `x` of all rows, at most.
const CHUNK: usize = 16;
const MAX_READS: usize = 32;

/// Matrices `[height, columns]` of one dtype, and where the products of all rows of `x` with each begin in the output.
pub(super) struct Group<'a> {
    pub weights: &'a [CubeTensor],
    pub starts: &'a [usize],
    /// Blocks of rows of the one matrix that every row of `x` has picked for itself, in place of all.
    pub picks: Option<Picks<'a>>,
}

/// Blocks of rows.
#[derive(Clone, Copy)]
pub(super) struct Picks<'a> {
    /// `[rows of x, count]`, i32, contiguous.
    pub blocks: &'a CubeTensor,
    /// Rows of a block.
    pub height: usize,
}

impl Group<'_> {
    fn heights(&self) -> impl Iterator<Item = usize> + '_ {
        self.weights.iter().map(|weight| weight.shape()[0])
    }

    fn tiles(&self, height: usize) -> usize {
        match &self.picks {
            None => self.heights().map(|rows| rows.div_ceil(height)).sum(),
            Some(picks) => picks.blocks.shape().num_elements() * picks.height.div_ceil(height),
        }
    }

    fn heights_arg(&self) -> SequenceArg<u32> {
        self.heights().map(|rows| rows as u32).collect()
    }

    fn starts_arg(&self) -> SequenceArg<usize> {
        self.starts.iter().copied().collect()
    }

    fn picks_arg(&self) -> PicksLaunch {
        let Some(picks) = &self.picks else {
            return PicksLaunch::new(SequenceArg::new(), 0, 0, 0, 0);
        };
        let [tokens, count] = picks.blocks.shape().dims();
        let last = self.weights[0].shape()[0] / picks.height - 1;
        let blocks = std::iter::once(picks.blocks.clone().into_buffer_arg());
        PicksLaunch::new(
            blocks.collect(),
            count as u32,
            tokens as u32,
            picks.height as u32,
            last as u32,
        )
    }

    fn words_arg<E: CubePrimitive>(&self) -> SequenceArg<Box<[E]>> {
        let words = self.weights.iter();
        words.map(|words| words.clone().into_buffer_arg()).collect()
    }

    /// Whether [`launch`](Self::launch) is the fastest product with all rows of `x`, though they be more than have to be independent.
    pub fn streams(&self, x: &CubeTensor) -> bool {
        let [rows, _] = x.shape().dims();
        rows <= STREAMED_ROWS && self.has_tiles(x) && self.tiles_blueprint(x, rows).is_some()
    }

    /// Multiplies them by a few rows of `x`, in one launch.
    pub fn launch(&self, x: CubeTensor, result: &CubeTensor) {
        let weights: Vec<_> = self.weights.iter().cloned().map(into_contiguous).collect();
        let group = Group {
            weights: &weights,
            starts: self.starts,
            picks: self.picks,
        };
        let [rows, _] = x.shape().dims();
        if !group.has_tiles(&x) {
            group.launch_rows(x, result);
        } else if let Some(blueprint) = group.tiles_blueprint(&x, rows) {
            group.launch_tiles(aligned(x), blueprint, result);
        } else {
            group.launch_pieces(x, result);
        }
    }

    /// Whether tensor cores multiply: that must not depend on how many rows there are.
    fn has_tiles(&self, x: &CubeTensor) -> bool {
        self.tiles_blueprint(x, INVARIANT_ROWS).is_some()
    }

    /// More rows than shared memory has room for the sums of, some at a time.
    fn launch_pieces(&self, x: CubeTensor, result: &CubeTensor) {
        let [rows, _] = x.shape().dims();
        for first in (0..rows).step_by(INVARIANT_ROWS) {
            let count = INVARIANT_ROWS.min(rows - first);
            let starts = self.starts.iter().zip(self.heights());
            let starts: Vec<_> = starts
                .map(|(start, height)| start + first * height)
                .collect();
            let piece = Group {
                weights: self.weights,
                starts: &starts,
                picks: None,
            };
            let x = aligned(narrow(&x, first, count));
            let blueprint = self.tiles_blueprint(&x, count);
            piece.launch_tiles(x, blueprint.expect("checked by has_tiles"), result);
        }
    }

    fn tiles_blueprint(&self, x: &CubeTensor, rows: usize) -> Option<TilesBlueprint> {
        let client = &x.client;
        let weight = &self.weights[0];
        let [_, columns] = x.shape().dims();
        let target = Target::of(client);
        if !has_tensor_cores(client) || weight.dtype == DType::F32 || !columns.is_multiple_of(8) {
            return None;
        }
        let stretches = columns.div_ceil(STRETCH as usize);
        let direct = x.dtype == weight.dtype;
        let parts = match (x.dtype, direct) {
            (DType::F32, _) => 3,
            (DType::F16, false) => 2,
            _ => 1,
        };
        let halves = weight.dtype == DType::F16;
        let planes = stretches.min(PLANES) as u32;
        let blueprint = |(place, groups, depth)| TilesBlueprint {
            halves,
            weight_parts: if halves && !direct { 2 } else { 1 },
            source: SourceBlueprint {
                parts,
                tiles: rows.div_ceil(8).next_power_of_two() as u32,
                place,
                lines: rows.next_power_of_two() as u32,
                units: (columns / 8) as u32,
                cube: 32 * planes * groups,
                even: columns.is_multiple_of(STRETCH as usize),
            },
            planes,
            groups,
            depth,
            target,
        };
        let groups = (PROCESSOR_PLANES / planes).max(1);
        let half = groups.div_ceil(2);
        // That `x` comes from shared memory matters more than how many planes there are; then, that enough weights are on their way.
        let split = [(Place::Parts, groups, 2), (Place::Parts, half, 2)];
        let ways = [
            (Place::Copy, groups, 2),
            (Place::Copy, half, 3),
            (Place::Copy, half, 2),
            (Place::Memory, groups, 2),
            (Place::Memory, half, 2),
            (Place::Memory, 1, 2),
        ];
        let split = split.into_iter().filter(|_| parts > 1);
        let fits = |blueprint: &TilesBlueprint| fits_shared(client, blueprint.shared_bytes());
        split.chain(ways).map(blueprint).find(fits)
    }

    fn launch_tiles(&self, x: CubeTensor, blueprint: TilesBlueprint, result: &CubeTensor) {
        let client = x.client.clone();
        let [rows, columns] = x.shape().dims();
        let all = self.tiles(16);
        let cubes = processors(&client);
        let size = 16 / x.elem_size();
        let dtypes = [x.dtype, result.dtype].map(dtype_to_storage_type);
        let x_vectors = x.meta.strides()[0] / size;
        // SAFETY: rows and columns past the end are read as others, and not used; writes are within `[rows, height]` of each matrix.
        unsafe {
            tiles_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes.min(all as u32), 1, 1),
                CubeDim::new_2d(32, blueprint.planes * blueprint.groups),
                // Offsets in shared memory that are as wide as addresses are part of the instructions.
                AddressType::U64,
                size,
                x.into_buffer_arg(),
                self.words_arg(),
                result.clone().into_buffer_arg(),
                rows as u32,
                x_vectors,
                columns as u32,
                all as u32,
                self.heights_arg(),
                self.starts_arg(),
                self.picks_arg(),
                blueprint,
                dtypes,
            );
        }
    }

    fn launch_rows(&self, x: CubeTensor, result: &CubeTensor) {
        let client = x.client.clone();
        let weight = &self.weights[0];
        let [rows, columns] = x.shape().dims();
        // The same vectors whatever the distance between the rows of `x`.
        let most = 16 / x.elem_size().max(weight.elem_size());
        let size = vector_size(weight, most);
        let x = with_vectors(x, size);
        let plane = plane_size(&client).expect("checked by can_multiply");
        let target = Target::of(&client);
        let vectors = columns / size;
        let many = self.heights().any(|rows| rows >= MANY_HEIGHTS);
        let height = if many { HEIGHT } else { 1 };
        let most = (client.properties().hardware.max_units_per_cube / plane) as usize;
        let planes = vectors / (plane as usize * LANE_VECTORS);
        let planes = planes.min(most).clamp(1, ROW_PLANES);
        let turns = vectors.div_ceil(plane as usize * planes);
        // A row of `x` has picks of its own.
        let of_cube = if self.picks.is_some() { 1 } else { TILE };
        let tile = rows.min(of_cube).next_power_of_two();
        // Elsewhere, shader compilers take their time for what is unrolled.
        let chunk = if target.ptx {
            CHUNK / height as usize
        } else {
            1
        };
        let blueprint = RowsBlueprint {
            tile: tile as u32,
            height,
            chunk: turns.next_power_of_two().min(chunk).min(MAX_READS / tile) as u32,
            planes: planes as u32,
            plane,
            target,
        };
        let all = self.tiles(blueprint.height as usize);
        let deep = if self.picks.is_some() {
            1
        } else {
            rows.div_ceil(TILE)
        };
        let wide = all.min(MAX_CUBES);
        let high = all.div_ceil(wide);
        let largest = self.weights.iter().max_by_key(|weight| weight.shape()[0]);
        let dtypes = [x.dtype, weight.dtype, result.dtype].map(dtype_to_storage_type);
        let x_vectors = x.meta.strides()[0] / size;
        // SAFETY: as above.
        unsafe {
            rows_kernel::launch_unchecked(
                &client,
                CubeCount::Static(wide as u32, high as u32, deep as u32),
                CubeDim::new_2d(plane, blueprint.planes),
                address_type([&x, largest.expect("a matrix"), result]),
                size,
                x.into_buffer_arg(),
                self.words_arg(),
                result.clone().into_buffer_arg(),
                rows as u32,
                x_vectors,
                vectors as u32,
                all as u32,
                self.heights_arg(),
                self.starts_arg(),
                self.picks_arg(),
                blueprint,
                dtypes,
            );
        }
    }
}

/// Whether there is a kernel for a few rows of `x`.
pub(crate) fn can_multiply(x: &CubeTensor) -> bool {
    is_float(x.dtype) && plane_size(&x.client).is_some()
}
