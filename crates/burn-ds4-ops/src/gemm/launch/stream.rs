use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{SMALL_M_ROWS, optional};
use crate::caps::Caps;
use crate::gemm::kernel::{
    CubeSplitLaunch, InputLayout, PairSizesLaunch, Pairing, StreamBlueprint, StreamProblemLaunch,
    WeightFormat, stream_kernel,
};
use crate::gemm::{Matrices, terms};

/// Planes that split K of a tile, at most.
const SPLIT_K_PLANES: usize = 8;
/// Time for 16 bytes of FP8 that become `f16`, relative to that of other weights: cubes that
/// multiply by them are done that much earlier.
const F16_INPUT_WORK: f64 = 0.65;
/// Bytes of `x` in shared memory, at most.
pub(super) const MAX_X_BYTES: usize = 70 << 10;

/// How a cube divides its shared memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    /// Planes of a cube, at most. With more than 16, a unit would have fewer than 128 registers.
    pub planes: usize,
    /// Partials, one for each tile and plane.
    partials: usize,
}

/// The best first. The choice depends on the device and the weights alone, because it decides how K
/// is split.
pub(super) const BUDGETS: [Budget; 5] = [
    Budget::new(16, 48),
    Budget::new(16, 16),
    Budget::new(8, 24),
    Budget::new(8, 8),
    Budget::new(4, 4),
];

impl Budget {
    const fn new(planes: usize, partials: usize) -> Self {
        Self { planes, partials }
    }
}

impl StreamBlueprint {
    /// The blueprint for at most [`SMALL_M_ROWS`] rows of `x` in `dtype`, each with so many pairs.
    /// `None` where shared memory is too small for any number of such rows.
    pub fn new(
        dtype: DType,
        matrices: &Matrices,
        rows: usize,
        slots: usize,
        caps: &Caps,
    ) -> Option<Self> {
        let fits = |budget: &&Budget| {
            let most = Self::of_rows(dtype, matrices, SMALL_M_ROWS, slots, (caps, budget));
            most.fits(caps)
        };
        let budget = BUDGETS.iter().find(fits)?;
        Some(Self::of_rows(dtype, matrices, rows, slots, (caps, budget)))
    }

    /// The blueprint by a budget, whether or not it fits.
    pub(super) fn of_rows(
        dtype: DType,
        matrices: &Matrices,
        rows: usize,
        slots: usize,
        (caps, budget): (&Caps, &Budget),
    ) -> Self {
        let split = Self::split(dtype, matrices, SPLIT_K_PLANES, (caps, budget.planes));
        let planes = (split.planes * split.plane_groups) as usize;
        let with_rows = |x_rows| Self {
            pairs: small_pairs(rows * slots),
            x_rows,
            partial_tiles: (budget.partials / planes).max(1) as u32,
            ..split
        };
        let least = split.input.terms;
        let mut x_rows = (rows.next_power_of_two() as u32 * least).min(8);
        while x_rows > least && !with_rows(x_rows).fits(caps) {
            x_rows /= 2;
        }
        with_rows(x_rows)
    }

    /// Planes of a cube that has at most `cube_planes`, of which at most `most` split K of a tile.
    /// No row of `x` is in shared memory.
    pub(super) fn split(
        dtype: DType,
        matrices: &Matrices,
        most: usize,
        (caps, cube_planes): (&Caps, usize),
    ) -> Self {
        let k_block = matrices.format.k_block() as usize;
        let k_blocks = matrices.columns.div_ceil(k_block);
        let plane_k_blocks = k_blocks.div_ceil(most.min(cube_planes));
        let planes = k_blocks.div_ceil(plane_k_blocks);
        let plane_groups = cube_planes / planes;
        Self {
            input: InputLayout {
                format: matrices.format,
                terms: terms(dtype),
                permuted: false,
                f16_input: matrices.format == WeightFormat::Fp8 && caps.fp8_conversion,
            },
            pairs: 0,
            pairing: Pairing::Ids,
            x_rows: 0,
            planes: planes as u32,
            plane_k_blocks: plane_k_blocks as u32,
            plane_groups: plane_groups as u32,
            cube_planes: (planes * plane_groups) as u32,
            partial_tiles: 0,
            k_aligned: matrices.columns == planes * plane_k_blocks * k_block,
            scale_vectors: matrices.has_scale_vectors(),
            in_parts: matrices.has_blocks_of_parts(),
            gated: None,
            target: caps.target,
        }
    }

    /// Whether shared memory is large enough.
    pub(super) fn fits(&self, caps: &Caps) -> bool {
        self.x_bytes() <= MAX_X_BYTES && self.shared_bytes() <= caps.shared_bytes
    }

    pub(super) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(32, self.cube_planes)
    }

    /// For pairs that find their matrices in this way.
    pub fn paired(self, pairing: Pairing) -> Self {
        let pairs = if pairing == Pairing::Ids {
            self.pairs
        } else {
            small_pairs(0)
        };
        Self {
            pairs,
            pairing,
            ..self
        }
    }

    /// With half of the rows as a gate; the result is multiplied by weights of `next`.
    pub fn gated(self, next: WeightFormat) -> Self {
        Self {
            gated: Some(next),
            ..self
        }
    }
}

/// How one launch is compiled for the routed experts and, if there is any, the shared one.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertBlueprints {
    pub experts: StreamBlueprint,
    pub shared: Option<StreamBlueprint>,
}

impl ExpertBlueprints {
    /// Cubes have the larger of both numbers of planes.
    pub fn new(experts: StreamBlueprint, shared: Option<StreamBlueprint>) -> Self {
        let cube_planes = shared
            .map_or(0, |shared| shared.cube_planes)
            .max(experts.cube_planes);
        let with_planes = |blueprint| StreamBlueprint {
            cube_planes,
            ..blueprint
        };
        Self {
            experts: with_planes(experts),
            shared: shared.map(with_planes),
        }
    }

    pub fn both(&self) -> impl Iterator<Item = &StreamBlueprint> {
        std::iter::once(&self.experts).chain(&self.shared)
    }
}

/// The capacity for a number of pairs, of which there are few, so that there are few kernels.
pub(super) fn small_pairs(pairs: usize) -> u32 {
    pairs.next_power_of_two().max(8) as u32
}

/// Rows of `x`, the matrices of a stack that they are multiplied by, and where the products go.
pub(crate) struct StreamProblem<'a> {
    /// The matrix of every pair, for [`Pairing::Ids`].
    pub ids: Option<&'a CubeTensor>,
    /// Factors of gated pairs.
    pub scores: Option<&'a CubeTensor>,
    pub matrices: &'a Matrices,
    pub output: &'a CubeTensor,
    pub tokens: usize,
    /// Pairs of a token; one without ids and groups.
    pub slots: usize,
    /// The limit of gates.
    pub limit: f64,
    pub blueprint: StreamBlueprint,
}

impl<'a> StreamProblem<'a> {
    /// Without ids and gates: rows of `x` by one matrix, or `tokens` rows by each.
    pub fn of_rows(
        matrices: &'a Matrices,
        output: &'a CubeTensor,
        tokens: usize,
        blueprint: StreamBlueprint,
    ) -> Self {
        Self {
            ids: None,
            scores: None,
            matrices,
            output,
            tokens,
            slots: matrices.count,
            limit: 0.0,
            blueprint,
        }
    }

    /// Tiles of a matrix.
    fn matrix_tiles(&self) -> usize {
        let rows = match self.blueprint.gated {
            Some(_) => self.matrices.rows / 2,
            None => self.matrices.rows,
        };
        rows.div_ceil(self.blueprint.tile_outputs() as usize)
    }

    /// Tiles of all matrices that can be in use.
    fn tiles(&self) -> usize {
        let count = self.matrices.count;
        let groups = match self.blueprint.pairing {
            Pairing::Ids => (self.tokens * self.slots).min(count),
            Pairing::One => 1,
            Pairing::Every => count,
        };
        self.matrix_tiles() * groups
    }

    /// The work of reading a matrix: its bytes, where those that the hardware decodes count less;
    /// without ids, as often as all rows of `x` take.
    fn work(&self) -> f64 {
        let vectors = self.matrices.rows * self.matrices.columns
            / self.blueprint.input.format.columns() as usize;
        let reads = match self.blueprint.pairing {
            Pairing::Ids => 1,
            _ => self.tokens.div_ceil(self.blueprint.pass_pairs() as usize),
        };
        let work = match self.blueprint.input.f16_input {
            true => F16_INPUT_WORK,
            false => 1.0,
        };
        (vectors * reads) as f64 * work
    }

    fn arg<I: Int, Y: Float>(&self) -> StreamProblemLaunch<I, Y> {
        StreamProblemLaunch::new(
            optional(self.ids),
            optional(self.scores),
            self.matrices.arg(),
            self.output.clone().into_buffer_arg(),
            PairSizesLaunch::new(self.tokens as u32, self.slots as u32),
            self.slots as u32,
            self.matrix_tiles() as u32,
            self.limit as f32,
        )
    }
}

/// Multiplies a small number of rows of `x` by the matrices of one problem, or of two, in one
/// launch.
pub(crate) fn launch_stream(
    x: &CubeTensor,
    first: &StreamProblem<'_>,
    second: Option<&StreamProblem<'_>>,
) {
    let client = x.client.clone();
    let size = 16 / x.elem_size();
    let tiles = first.tiles() + second.map_or(0, StreamProblem::tiles);
    // At least one cube for each problem.
    let least = 1 + usize::from(second.is_some());
    let cubes = (Caps::of(&client).processors as usize)
        .min(tiles)
        .max(least);
    let ids_dtype = first.ids.map_or(DType::U32, |ids| ids.dtype);
    let dtypes = [x.dtype, ids_dtype, first.output.dtype].map(dtype_to_storage_type);
    // SAFETY: rows and columns past the end are read as others, and not used; ids are those of
    // matrices; writes are within the outputs.
    unsafe {
        stream_kernel::launch_unchecked(
            &client,
            CubeCount::Static(cubes as u32, 1, 1),
            first.blueprint.cube_dim(),
            // Offsets in shared memory that are as wide as addresses are part of the instructions.
            AddressType::U64,
            size,
            x.clone().into_buffer_arg(),
            x.meta.strides()[0] / size,
            first.arg(),
            second.map(StreamProblem::arg).into(),
            CubeSplitLaunch::new(
                cubes as u32,
                second.map_or(0.0, |second| second.work() / first.work()) as f32,
            ),
            first.blueprint,
            second.map(|second| second.blueprint),
            dtypes,
        );
    }
}
