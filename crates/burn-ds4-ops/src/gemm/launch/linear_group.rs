use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::dense::{MatrixGroup, TILE_ROWS};
use super::division::CubeDivision;
use super::problem::{F16_INPUT_WORK, StreamProblem};
use crate::caps::Caps;
use crate::gemm::kernel::{
    GroupProblemLaunch, LinearGroupBlueprint, StreamBlueprint, linear_group_kernel,
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
    pub fn new(pair: StreamBlueprint, x: &CubeTensor, weights: &[CubeTensor]) -> Option<Self> {
        let caps = Caps::of(&x.client);
        let [rows, _] = x.shape().dims();
        let group = MatrixGroup::of(weights.first()?);
        let own = Self {
            pair: StreamBlueprint {
                partial_tiles: 1,
                ..pair
            },
            group: group
                .tiles_blueprint(x, rows)
                .filter(|_| group.has_tiles(x))?,
        };
        let alike = rows <= MAX_ROWS
            && own.pair.cube_planes == own.group.cube_planes()
            && own.group.ring_bytes() <= own.pair.ring_bytes();
        (alike && caps.fits_shared(own.shared_bytes())).then_some(own)
    }

    /// The same with partials of as many as `tiles` tiles of the pair, if they fit.
    fn with_partials_of(self, tiles: usize, caps: &Caps) -> Self {
        let with = |partial_tiles| Self {
            pair: StreamBlueprint {
                partial_tiles,
                ..self.pair
            },
            ..self
        };
        let fits = |own: &Self| caps.fits_shared(own.shared_bytes());
        let fitting = (1..=tiles as u32).rev().map(with).find(fits);
        fitting.unwrap_or(self)
    }
}

/// A pair of packed matrices and a group of dense ones, which are multiplied by the same rows.
pub(crate) struct LinearGroup<'a> {
    /// Contiguous rows.
    pub x: &'a CubeTensor,
    /// Without ids and gates, by the blueprint's pair.
    pub pair: [StreamProblem<'a>; 2],
    /// Contiguous weights.
    pub group: MatrixGroup<'a>,
    /// The products with the group.
    pub output: &'a CubeTensor,
}

impl LinearGroup<'_> {
    /// How many of `cubes` have the pair: as many as leave the busiest cube the least work.
    fn pair_cubes(&self, cubes: usize) -> usize {
        let [_, columns] = self.x.shape().dims();
        let pair_tiles: usize = self.pair.iter().map(StreamProblem::tiles).sum();
        let pair_work: f64 = self.pair.iter().map(StreamProblem::work).sum();
        let group_tiles = self.group.tiles(TILE_ROWS);
        let vectors = TILE_ROWS * columns * self.group.weights[0].elem_size() / 16;
        let tile_work = [pair_work / pair_tiles as f64, vectors as f64 * DENSE_WORK];
        let least = self.pair.len();
        let work = |pair_cubes: &usize| {
            let own = pair_tiles.div_ceil(*pair_cubes) as f64 * tile_work[0];
            let rest = group_tiles.div_ceil(cubes - pair_cubes) as f64 * tile_work[1];
            (own.max(rest), own + rest)
        };
        let choices = (least..cubes).map(|pair_cubes| (work(&pair_cubes), pair_cubes));
        let (_, best) = choices
            .min_by(|(a, _), (b, _)| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)))
            .unwrap_or(((0.0, 0.0), least));
        best
    }

    /// Multiplies all, in one launch.
    pub fn launch(&self, blueprint: LinearGroupBlueprint) {
        let client = self.x.client.clone();
        let caps = Caps::of(&client);
        // One for each of the pair and for the group, whatever the device has.
        let cubes = (caps.processors as usize).max(self.pair.len() + 1);
        let [first, second] = &self.pair;
        let division = CubeDivision::new(first, Some(second), self.pair_cubes(cubes));
        let tiles = division.plane_tiles(first, Some(second));
        let blueprint = blueprint.with_partials_of(tiles[0].max(tiles[1]), &caps);
        let group_tiles = self.group.tiles(TILE_ROWS);
        let cubes = cubes.min(division.cubes + group_tiles);
        let size = 16 / self.x.elem_size();
        let dtypes = [self.x.dtype, self.output.dtype].map(dtype_to_storage_type);
        // SAFETY: rows and columns past the end are read as others, and not used; writes are within
        // the outputs and `[rows, height]` of each matrix of the group.
        unsafe {
            linear_group_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes as u32, 1, 1),
                blueprint.pair.cube_dim(),
                // Offsets in shared memory that are as wide as addresses are part of the
                // instructions.
                AddressType::U64,
                size,
                self.x.clone().into_buffer_arg(),
                self.x.meta.strides()[0] / size,
                first.arg(),
                Some(second.arg()).into(),
                division.arg(first),
                GroupProblemLaunch::new(
                    self.group.arg(TILE_ROWS),
                    self.output.clone().into_buffer_arg(),
                ),
                blueprint,
                dtypes,
            );
        }
    }
}
