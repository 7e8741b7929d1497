use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::dense::{MatrixList, TILE_ROWS};
use super::division::CubeDivision;
use super::problem::{F16_INPUT_WORK, StreamProblem};
use crate::caps::Caps;
use crate::dims::Dims;
use crate::gemm::kernel::{
    DenseProblemLaunch, LinearGroupBlueprint, StreamBlueprint, linear_group_kernel,
};

/// Rows of `x` of a launch, at most. More of 4096 columns do not fit, and others were not measured.
const MAX_ROWS: usize = 8;
/// Time for 16 bytes of 16-bit weights, by the measure of [`F16_INPUT_WORK`]: nothing is decoded,
/// so that both wait for memory alone.
const DENSE_WORK: f64 = F16_INPUT_WORK;

impl LinearGroupBlueprint {
    /// The blueprint for the rows of `x` and weights of one dtype. `None` where there are too many
    /// rows, the weights alone have another kernel, the two parts need different numbers of planes,
    /// or shared memory is too small for both.
    pub fn new(packed: StreamBlueprint, x: &CubeTensor, weights: &[CubeTensor]) -> Option<Self> {
        let caps = Caps::of(&x.client);
        let [rows, _] = x.dims();
        let list = MatrixList::of(weights.first()?);
        let own = Self {
            packed: StreamBlueprint {
                partial_tiles: 1,
                ..packed
            },
            dense: list
                .tiles_blueprint(x, rows)
                .filter(|_| list.has_tiles(x))?,
        };
        let alike = rows <= MAX_ROWS
            && own.packed.cube_planes == own.dense.cube_planes()
            && own.dense.ring_bytes() <= own.packed.ring_bytes();
        (alike && caps.fits_shared(own.shared_bytes())).then_some(own)
    }

    /// The same with partials of as many as `tiles` packed tiles, if they fit.
    fn with_partials_of(self, tiles: usize, caps: &Caps) -> Self {
        let with = |partial_tiles| Self {
            packed: StreamBlueprint {
                partial_tiles,
                ..self.packed
            },
            ..self
        };
        let fits = |own: &Self| caps.fits_shared(own.shared_bytes());
        let fitting = (1..=tiles as u32).rev().map(with).find(fits);
        fitting.unwrap_or(self)
    }
}

/// How many of `cubes` have the packed matrices: as many as leave the busiest cube the least work.
fn packed_cubes(packed: &[StreamProblem<'_>; 2], dense: &MatrixList<'_>, cubes: usize) -> usize {
    let columns = packed[0].product.matrices.columns;
    let packed_tiles: usize = packed.iter().map(StreamProblem::tiles).sum();
    let packed_work: f64 = packed.iter().map(StreamProblem::work).sum();
    let dense_tiles = dense.tiles(TILE_ROWS);
    let vectors = TILE_ROWS * columns * dense.weights[0].elem_size() / 16;
    let tile_work = [
        packed_work / packed_tiles as f64,
        vectors as f64 * DENSE_WORK,
    ];
    let work = |packed_cubes: usize| {
        let own = packed_tiles.div_ceil(packed_cubes) as f64 * tile_work[0];
        let rest = dense_tiles.div_ceil(cubes - packed_cubes) as f64 * tile_work[1];
        (own.max(rest), own + rest)
    };
    let less = |&a: &usize, &b: &usize| {
        let (a, b) = (work(a), work(b));
        a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
    };
    (packed.len()..cubes).min_by(less).unwrap_or(packed.len())
}

/// Multiplies the same contiguous rows by two packed matrices, without ids and gates, by the
/// blueprint's packed part, and by contiguous dense ones, whose products go to `output`: all in one
/// launch.
pub(crate) fn launch_group(
    packed: &[StreamProblem<'_>; 2],
    dense: &MatrixList<'_>,
    output: &CubeTensor,
    blueprint: LinearGroupBlueprint,
) {
    let [first, second] = packed;
    let x = first.product.x;
    let client = x.client.clone();
    let caps = Caps::of(&client);
    // One for each packed matrix and for the dense ones, whatever the device has.
    let cubes = (caps.processors as usize).max(packed.len() + 1);
    let division = CubeDivision::new(first, Some(second), packed_cubes(packed, dense, cubes));
    let tiles = division.plane_tiles(first, Some(second));
    let blueprint = blueprint.with_partials_of(tiles[0].max(tiles[1]), &caps);
    let cubes = cubes.min(division.cubes + dense.tiles(TILE_ROWS));
    let size = 16 / x.elem_size();
    let dtypes = [x.dtype, output.dtype].map(dtype_to_storage_type);
    // SAFETY: rows and columns past the end are read as others, and not used; writes are within
    // the outputs and `[rows, height]` of each dense matrix.
    unsafe {
        linear_group_kernel::launch_unchecked(
            &client,
            CubeCount::Static(cubes as u32, 1, 1),
            blueprint.packed.cube_dim(),
            // Offsets in shared memory that are as wide as addresses are part of the instructions.
            AddressType::U64,
            size,
            x.clone().into_buffer_arg(),
            x.meta.strides()[0] / size,
            first.arg(),
            Some(second.arg()).into(),
            division.arg(first),
            DenseProblemLaunch::new(dense.arg(TILE_ROWS), output.clone().into_buffer_arg()),
            blueprint,
            dtypes,
        );
    }
}
