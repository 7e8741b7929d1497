use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{into_contiguous, slice};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::stream::SPLIT_K_PLANES;
use super::wgmma::can_multiply_dense;
use crate::caps::Caps;
use crate::dims::Dims;
use crate::gemm::INVARIANT_ROWS;
use crate::gemm::kernel::WeightFormat;
use crate::gemm::kernel::dense::{
    InputBlueprint, InputLocation, MatrixListLaunch, PicksLaunch, RowsBlueprint, TilesBlueprint,
    rows_kernel, tiles_kernel,
};
use crate::launching::{
    MAX_CUBES, address_type, aligned, elements_view, narrow, output, vector_size, with_vectors,
};
use crate::matmul::TensorList;

/// Rows of `x` up to which planes multiply by streamed 16-bit weights faster than the large-M
/// product does, unless that is one of warpgroups.
const MAX_STREAMED_ROWS: usize = 32;
/// Planes that split K of rows of weights without tensor cores, at most.
const ROWS_SPLIT_K_PLANES: usize = 16;
/// Planes of a multiprocessor, given the registers that the kernel for tensor cores needs.
const PROCESSOR_PLANES: u32 = 16;
/// Rows of weights of a cube without tensor cores, if a matrix has `TALL_HEIGHT` rows or more.
const ROWS_HEIGHT: u32 = 4;
const TALL_HEIGHT: usize = 1024;
/// Rows of `x` of a cube without tensor cores, at most.
const ROWS_MAX_X_ROWS: usize = 16;
/// Vectors of a row that a lane multiplies by, at least, before another plane helps.
const MIN_LANE_VECTORS: usize = 4;
/// Vectors of weights that a lane reads at once, and vectors of `x` of all rows, at most.
const MAX_WEIGHT_READS: usize = 16;
const MAX_X_READS: usize = 32;

/// Rows of weights of a tile for tensor cores.
pub(super) const TILE_ROWS: usize = 16;
/// Elements, to a multiple of which the products with a matrix of a group begin: a view of them
/// then begins where vectors may.
const LIST_ALIGNMENT: usize = 256;

/// Matrices `[height, columns]` of one dtype, and where in the output the products of all rows of
/// `x` with each of them begin.
#[derive(Clone, Copy)]
pub(crate) struct MatrixList<'a> {
    pub weights: &'a [CubeTensor],
    pub starts: &'a [usize],
    /// Blocks of rows of the one matrix that every row of `x` has picked for itself, instead of all
    /// rows.
    pub picks: Option<PickedBlocks<'a>>,
}

/// Picked blocks of rows.
#[derive(Clone, Copy)]
pub(crate) struct PickedBlocks<'a> {
    /// `[rows of x, count]`, i32, contiguous.
    pub blocks: &'a CubeTensor,
    /// Rows of a block.
    pub height: usize,
}

/// Memory for the products `[rows, height]` with each matrix of a group, in one allocation.
pub(crate) struct ListOutput {
    pub all: CubeTensor,
    /// Where the products with each begin: at a multiple of [`LIST_ALIGNMENT`].
    starts: Vec<usize>,
    rows: usize,
}

impl ListOutput {
    pub fn new(x: &CubeTensor, weights: &[CubeTensor], dtype: DType) -> Self {
        let [rows, _] = x.dims();
        let mut length = 0;
        let starts = weights.iter().map(|weight| {
            let start = length;
            length += (rows * weight.shape()[0]).next_multiple_of(LIST_ALIGNMENT);
            start
        });
        let starts = starts.collect();
        Self {
            all: output(x, [length], dtype),
            starts,
            rows,
        }
    }

    /// The `weights` whose products these are.
    pub fn list<'a>(&'a self, weights: &'a [CubeTensor]) -> MatrixList<'a> {
        MatrixList {
            weights,
            starts: &self.starts,
            picks: None,
        }
    }

    /// The products with each of the weights, without a copy where a device binds any address.
    pub fn into_products(self, weights: &[CubeTensor]) -> TensorList<CubeBackend> {
        let products = weights.iter().zip(self.starts).map(|(weight, start)| {
            let shape = [self.rows, weight.shape()[0]];
            if Caps::of(&self.all.client).tensor_cores {
                return elements_view(&self.all, start, shape);
            }
            let range = start..start + shape[0] * shape[1];
            let part = slice(self.all.clone(), std::slice::from_ref(&range));
            CubeBackend::float_reshape(part, shape.into())
        });
        TensorList::new(products.collect())
    }
}

impl<'a> MatrixList<'a> {
    /// All rows of one matrix, whose products are the whole output.
    pub fn of(weight: &'a CubeTensor) -> Self {
        Self {
            weights: std::slice::from_ref(weight),
            starts: &[0],
            picks: None,
        }
    }

    fn heights(&self) -> impl Iterator<Item = usize> + '_ {
        self.weights.iter().map(|weight| weight.shape()[0])
    }

    pub(super) fn tiles(&self, height: usize) -> usize {
        match &self.picks {
            None => self.heights().map(|rows| rows.div_ceil(height)).sum(),
            Some(picks) => picks.blocks.shape().num_elements() * picks.height.div_ceil(height),
        }
    }

    fn picks_arg(&self) -> PicksLaunch {
        let Some(picks) = &self.picks else {
            return PicksLaunch::new(SequenceArg::new(), 0, 0, 0, 0);
        };
        let [tokens, count] = picks.blocks.dims();
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

    /// The group as a kernel argument, in elements of `W` and tiles of `height` rows.
    pub(super) fn arg<W: CubePrimitive>(&self, height: usize) -> MatrixListLaunch<W> {
        let words = self.weights.iter();
        MatrixListLaunch::new(
            words.map(|words| words.clone().into_buffer_arg()).collect(),
            self.heights().map(|rows| rows as u32).collect(),
            self.starts.iter().copied().collect(),
            self.picks_arg(),
            self.tiles(height) as u32,
        )
    }

    /// Whether [`launch`](Self::launch) is the fastest product with all rows of `x`, even if they
    /// are more than have to be row-invariant.
    pub fn streams(&self, x: &CubeTensor) -> bool {
        let [rows, _] = x.dims();
        let by_warpgroups = |weight| can_multiply_dense(x, weight);
        rows <= MAX_STREAMED_ROWS
            && self.has_tiles(x)
            && self.tiles_blueprint(x, rows).is_some()
            && !self.weights.iter().all(by_warpgroups)
    }

    /// Multiplies the matrices by a small number of rows of `x`, in one launch.
    pub fn launch(&self, x: CubeTensor, result: &CubeTensor) {
        let weights: Vec<_> = self.weights.iter().cloned().map(into_contiguous).collect();
        let group = MatrixList {
            weights: &weights,
            ..*self
        };
        let [rows, _] = x.dims();
        if !group.has_tiles(&x) {
            group.launch_rows(x, result);
        } else if let Some(blueprint) = group.tiles_blueprint(&x, rows) {
            group.launch_tiles(aligned(x), blueprint, result);
        } else {
            group.launch_micro_batches(x, result);
        }
    }

    /// Whether tensor cores multiply: that must not depend on the number of rows.
    pub(super) fn has_tiles(&self, x: &CubeTensor) -> bool {
        self.tiles_blueprint(x, INVARIANT_ROWS).is_some()
    }

    /// Multiplies some rows at a time, where shared memory lacks the capacity for the partials of
    /// all.
    fn launch_micro_batches(&self, x: CubeTensor, result: &CubeTensor) {
        let [rows, _] = x.dims();
        for first in (0..rows).step_by(INVARIANT_ROWS) {
            let count = INVARIANT_ROWS.min(rows - first);
            let starts = self.starts.iter().zip(self.heights());
            let starts: Vec<_> = starts
                .map(|(start, height)| start + first * height)
                .collect();
            // The rows of `x` of a part have picks of their own.
            assert!(self.picks.is_none(), "picks are multiplied at once");
            let group = MatrixList {
                starts: &starts,
                ..*self
            };
            let x = aligned(narrow(&x, first, count));
            let blueprint = self.tiles_blueprint(&x, count);
            group.launch_tiles(x, blueprint.expect("checked by has_tiles"), result);
        }
    }

    pub(super) fn tiles_blueprint(&self, x: &CubeTensor, rows: usize) -> Option<TilesBlueprint> {
        let caps = Caps::of(&x.client);
        let weight = &self.weights[0];
        let [_, columns] = x.dims();
        if !caps.tensor_cores || weight.dtype == DType::F32 || !columns.is_multiple_of(8) {
            return None;
        }
        let k_block = WeightFormat::Dense.k_block() as usize;
        let k_blocks = columns.div_ceil(k_block);
        let direct = x.dtype == weight.dtype;
        let terms = match (x.dtype, direct) {
            (DType::F32, _) => 3,
            (DType::F16, false) => 2,
            _ => 1,
        };
        let f16_weights = weight.dtype == DType::F16;
        let planes = k_blocks.min(SPLIT_K_PLANES) as u32;
        let blueprint = |(location, concurrent_tiles, stages)| TilesBlueprint {
            f16_weights,
            weight_terms: if f16_weights && !direct { 2 } else { 1 },
            input: InputBlueprint {
                terms,
                x_tiles: rows.div_ceil(8).next_power_of_two() as u32,
                location,
                shared_rows: rows.next_power_of_two() as u32,
                row_vec8s: (columns / 8) as u32,
                cube_units: 32 * planes * concurrent_tiles,
                k_aligned: columns.is_multiple_of(k_block),
            },
            planes,
            concurrent_tiles,
            stages,
            target: caps.target,
        };
        let concurrent_tiles = (PROCESSOR_PLANES / planes).max(1);
        let half = concurrent_tiles.div_ceil(2);
        // That `x` comes from shared memory matters most; then, that enough weights are in flight;
        // then, the number of planes.
        let terms_shared = [
            (InputLocation::SharedTerms, concurrent_tiles, 2),
            (InputLocation::SharedTerms, half, 2),
        ];
        let preferences = [
            (InputLocation::Shared, concurrent_tiles, 2),
            (InputLocation::Shared, half, 3),
            (InputLocation::Shared, half, 2),
            (InputLocation::Global, concurrent_tiles, 2),
            (InputLocation::Global, half, 2),
            (InputLocation::Global, 1, 2),
        ];
        let terms_shared = terms_shared.into_iter().filter(|_| terms > 1);
        let fits = |blueprint: &TilesBlueprint| caps.fits_shared(blueprint.shared_bytes());
        terms_shared.chain(preferences).map(blueprint).find(fits)
    }

    fn launch_tiles(&self, x: CubeTensor, blueprint: TilesBlueprint, result: &CubeTensor) {
        let client = x.client.clone();
        let [rows, columns] = x.dims();
        let tiles = self.tiles(TILE_ROWS);
        let cubes = Caps::of(&client).processors;
        let size = 16 / x.elem_size();
        let dtypes = [x.dtype, result.dtype].map(dtype_to_storage_type);
        let x_vectors = x.meta.strides()[0] / size;
        // SAFETY: rows and columns past the end are read as others, and not used; writes are within
        // `[rows, height]` of each matrix.
        unsafe {
            tiles_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes.min(tiles as u32), 1, 1),
                CubeDim::new_2d(32, blueprint.cube_planes()),
                // Offsets in shared memory that are as wide as addresses are part of the
                // instructions.
                AddressType::U64,
                size,
                x.into_buffer_arg(),
                x_vectors,
                rows as u32,
                columns as u32,
                self.arg(TILE_ROWS),
                result.clone().into_buffer_arg(),
                blueprint,
                dtypes,
            );
        }
    }

    fn launch_rows(&self, x: CubeTensor, result: &CubeTensor) {
        let client = x.client.clone();
        let weight = &self.weights[0];
        let [rows, columns] = x.dims();
        // The same vectors whatever the distance between the rows of `x`.
        let most = 16 / x.elem_size().max(weight.elem_size());
        let size = vector_size(weight, most);
        let x = with_vectors(x, size);
        let caps = Caps::of(&client);
        let (plane, target) = (caps.lanes(), caps.target);
        let vectors = columns / size;
        let tall = self.heights().any(|rows| rows >= TALL_HEIGHT);
        let height = if tall { ROWS_HEIGHT } else { 1 };
        let most = (caps.cube_units / plane) as usize;
        let planes = vectors / (plane as usize * MIN_LANE_VECTORS);
        let planes = planes.min(most).clamp(1, ROWS_SPLIT_K_PLANES);
        let iterations = vectors.div_ceil(plane as usize * planes);
        // With picks, every row of `x` has tiles of its own.
        let rows_at_once = if self.picks.is_some() { 1 } else { rows };
        let x_rows = rows_at_once.min(ROWS_MAX_X_ROWS).next_power_of_two();
        // Other shader compilers take long for unrolled code.
        let reads = if target.ptx {
            MAX_WEIGHT_READS / height as usize
        } else {
            1
        };
        let blueprint = RowsBlueprint {
            x_rows: x_rows as u32,
            height,
            reads: iterations
                .next_power_of_two()
                .min(reads)
                .min(MAX_X_READS / x_rows) as u32,
            planes: planes as u32,
            plane,
            target,
        };
        let tiles = self.tiles(blueprint.height as usize);
        let deep = rows_at_once.div_ceil(ROWS_MAX_X_ROWS);
        let wide = tiles.min(MAX_CUBES);
        let high = tiles.div_ceil(wide);
        let largest = self.weights.iter().max_by_key(|weight| weight.shape()[0]);
        let dtypes = [x.dtype, weight.dtype, result.dtype].map(dtype_to_storage_type);
        let x_vectors = x.meta.strides()[0] / size;
        // SAFETY: rows past the end are read as the last one and not written, vectors past the end
        // as the first and not counted; tiles past the last are none; writes are within
        // `[rows, height]` of each matrix.
        unsafe {
            rows_kernel::launch_unchecked(
                &client,
                CubeCount::Static(wide as u32, high as u32, deep as u32),
                CubeDim::new_2d(plane, blueprint.planes),
                address_type([&x, largest.expect("a matrix"), result]),
                size,
                x.into_buffer_arg(),
                x_vectors,
                rows as u32,
                vectors as u32,
                self.arg(blueprint.height as usize),
                result.clone().into_buffer_arg(),
                blueprint,
                dtypes,
            );
        }
    }
}

/// The products of each row of `x` with the blocks of `height` rows of `weight` that the row has
/// picked: `[rows, count * height]` in f32, with the bits of the products with all rows. `picks` is
/// `[rows, count]`, i32; a block out of range counts as the last.
pub(crate) fn product_of_picks(
    x: CubeTensor,
    weight: CubeTensor,
    picks: CubeTensor,
    height: usize,
) -> CubeTensor {
    let [rows, count] = picks.dims();
    let blocks = into_contiguous(picks);
    let result = output(&x, [rows, count * height], DType::F32);
    let blocks = &blocks;
    let group = MatrixList {
        picks: Some(PickedBlocks { blocks, height }),
        ..MatrixList::of(&weight)
    };
    group.launch(x, &result);
    result
}
