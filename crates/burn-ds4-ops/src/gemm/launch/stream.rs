use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::division::CubeDivision;
use super::problem::StreamProblem;
use super::work::{Blueprints, CubeWork};
use super::{Grouping, Product};
use crate::caps::Caps;
use crate::gemm::kernel::{InputLayout, Pairing, StreamBlueprint, WeightFormat, stream_kernel};
use crate::gemm::{Matrices, terms};

/// Planes that split K of a tile, at most, and the same in the second product of experts.
pub(super) const SPLIT_K_PLANES: usize = 8;
pub(super) const DOWN_SPLIT_K_PLANES: usize = 4;
/// Rows of `x` of a tile, where each term of a row counts as a row, and tiles that are multiplied
/// at a time.
const X_TILE_ROWS: u32 = 8;
const MAX_X_TILES: u32 = 2;

/// How often a cube reads a row of `x` in registers, at most.
const MAX_X_READS: u32 = 2;

/// Rows of `x` of a problem.
#[derive(Clone, Copy, Debug)]
struct XRows {
    rows: usize,
    /// How their pairs find their matrices.
    pairing: Pairing,
    /// Pairs of each, if ids choose their matrices.
    slots: usize,
    /// Whether they are in the order in which lanes read them.
    permuted: bool,
    /// Whether their columns may come to shared memory in parts, for each of a cube's tiles anew:
    /// where there are few tiles to a cube.
    reloads: bool,
}

impl XRows {
    fn new(rows: usize, pairing: Pairing, slots: usize) -> Self {
        Self {
            rows,
            pairing,
            slots,
            permuted: false,
            reloads: false,
        }
    }
}

/// How a cube divides its shared memory.
#[derive(Clone, Copy, Debug)]
struct Budget {
    /// Planes of a cube, at most. With more than 16, a unit would have fewer than 128 registers.
    planes: usize,
    /// Partials, one for each tile and plane.
    partials: usize,
    /// Whether the pipelines of weights have one stage in place of two.
    one_stage: bool,
}

/// The best first.
const BUDGETS: [Budget; 5] = [
    Budget::new(16, 48),
    Budget::new(16, 16),
    Budget::new(8, 24),
    Budget::new(8, 8),
    Budget::new(4, 4),
];

/// The same where pairs are sorted and problems have more rows: half as much for the weights leaves
/// space for them.
const PROBLEM_BUDGETS: [Budget; 4] = [
    BUDGETS[0],
    Budget {
        one_stage: true,
        ..Budget::new(16, 42)
    },
    BUDGETS[2],
    BUDGETS[3],
];

impl Budget {
    const fn new(planes: usize, partials: usize) -> Self {
        Self {
            planes,
            partials,
            one_stage: false,
        }
    }
}

impl StreamBlueprint {
    /// The blueprint for so many rows of `x` for each of the matrices. `None` for more than
    /// [`SMALL_M_ROWS`](super::SMALL_M_ROWS), or where shared memory is too small for as many.
    pub fn new(x: &CubeTensor, matrices: &Matrices, rows: usize) -> Option<Self> {
        let caps = &Caps::of(&x.client);
        let of = |budget: &Budget, rows| {
            let pairing = match matrices.count {
                1 => Pairing::One,
                _ => Pairing::Every,
            };
            let rows = XRows {
                reloads: true,
                ..XRows::new(rows, pairing, 0)
            };
            let own = Self::of_rows(x.dtype, matrices, rows, (caps, budget));
            own.with_operands(rows.rows, caps).unwrap_or(own).alone()
        };
        let own = Blueprints::by_budget(&BUDGETS, rows, (caps, CubeWork::Either), of);
        own.map(|own| own.first)
    }

    /// The blueprint by a budget, whether or not it fits.
    fn of_rows(
        dtype: DType,
        matrices: &Matrices,
        XRows {
            rows,
            pairing,
            slots,
            permuted,
            reloads,
        }: XRows,
        (caps, budget): (&Caps, &Budget),
    ) -> Self {
        let most = match permuted {
            true => DOWN_SPLIT_K_PLANES,
            false => SPLIT_K_PLANES,
        };
        let mut split = Self::split(dtype, matrices, most, (caps, budget.planes));
        split.input.permuted = permuted;
        split.input.f16_input &= !permuted;
        split.one_stage = budget.one_stage;
        let partial_tiles = budget.partials as u32 / (split.planes * split.concurrent_tiles);
        let with = |x_rows, x_k_blocks| {
            let with = |partial_tiles: u32| Self {
                pairs: small_pairs(rows * slots),
                pairing,
                one_token: pairing == Pairing::Ids && rows == 1,
                x_rows,
                x_k_blocks,
                partial_tiles: partial_tiles.max(1),
                ..split
            };
            let most = with(partial_tiles);
            match most.x_tiles() > 1 && !most.fits(caps) {
                true => with(partial_tiles / most.x_tiles()),
                false => most,
            }
        };
        let least = split.input.terms;
        let most = rows.next_power_of_two() as u32 * least;
        let all = split.plane_k_blocks;
        let parts = if reloads { all } else { 1 };
        // Few pairs have the same expert.
        let tiles = match pairing {
            Pairing::Ids => 1,
            _ => MAX_X_TILES,
        };
        let most = most.min(tiles * X_TILE_ROWS);
        let x_rows = std::iter::successors(Some(most), |rows| Some(rows / 2));
        let x_rows = x_rows.take_while(|&rows| rows >= least);
        let choices = x_rows.flat_map(|x_rows| {
            let parts = (1..=parts).filter(|parts| all % parts == 0);
            parts.map(move |parts| (x_rows, all / parts))
        });
        // All rows if possible, and then all columns.
        let mut choices = choices.map(|(x_rows, x_k_blocks)| with(x_rows, x_k_blocks));
        let fitting = choices.find(|blueprint| blueprint.fits(caps));
        fitting.unwrap_or_else(|| with(least, all))
    }

    /// The blueprint for problems of at most `rows` pairs. `None` where shared memory is too small.
    pub fn of_problems(
        dtype: DType,
        matrices: &Matrices,
        (rows, permuted): (usize, bool),
        caps: &Caps,
    ) -> Option<Self> {
        let x_rows = XRows {
            permuted,
            ..XRows::new(rows, Pairing::Sorted, 0)
        };
        let of = |budget| Self::of_rows(dtype, matrices, x_rows, (caps, budget));
        // All rows at a time: those that are left would read the weights again.
        let fits = |own: &Self| own.x_rows == rows as u32 * own.input.terms && own.fits(caps);
        PROBLEM_BUDGETS.iter().map(of).find(fits)
    }

    /// The same with [`x` in registers](Self::x_in_registers): no barrier waits for `x`, and planes
    /// of as many groups as can be split K of one tile. Only for FP8 that the hardware converts to
    /// `f16`, of which a K-block needs few registers, and for several rows of `bf16`: each plane
    /// converts all rows of a tile, whether or not it has as many. And only where few groups are
    /// left, each of which reads all of `x`.
    fn with_operands(self, rows: usize, caps: &Caps) -> Option<Self> {
        let divides = |groups: &u32| {
            self.concurrent_tiles.is_multiple_of(*groups)
                && self.plane_k_blocks.is_multiple_of(*groups)
        };
        let merged = (1..=self.concurrent_tiles).rev().find(divides)?;
        let possible = rows > 1
            && self.input.f16_input
            && self.input.terms == 1
            && self.k_aligned
            && self.concurrent_tiles / merged <= MAX_X_READS;
        let with = |partial_tiles| Self {
            x_in_registers: true,
            x_rows: (rows as u32)
                .next_multiple_of(X_TILE_ROWS)
                .min(MAX_X_TILES * X_TILE_ROWS),
            x_k_blocks: 1,
            planes: self.planes * merged,
            plane_k_blocks: self.plane_k_blocks / merged,
            concurrent_tiles: self.concurrent_tiles / merged,
            partial_tiles,
            ..self
        };
        let fitting = [4, 2, 1].map(with).into_iter().find(|own| own.fits(caps));
        fitting.filter(|_| possible)
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
        let concurrent_tiles = cube_planes / planes;
        Self {
            input: InputLayout {
                format: matrices.format,
                terms: terms(dtype),
                permuted: false,
                f16_input: matrices.format == WeightFormat::Fp8 && caps.fp8_conversion,
            },
            pairs: 0,
            pairing: Pairing::Ids,
            one_token: false,
            x_rows: 0,
            x_in_registers: false,
            x_k_blocks: plane_k_blocks as u32,
            k_splits: planes as u32,
            planes: planes as u32,
            plane_k_blocks: plane_k_blocks as u32,
            concurrent_tiles: concurrent_tiles as u32,
            cube_planes: (planes * concurrent_tiles) as u32,
            one_stage: false,
            partial_tiles: 0,
            k_aligned: matrices.columns == planes * plane_k_blocks * k_block,
            scale_vectors: matrices.has_scale_vectors(),
            in_parts: matrices.has_blocks_of_parts(),
            gated: None,
            target: caps.target,
        }
    }

    fn alone(self) -> Blueprints {
        Blueprints {
            first: self,
            second: None,
        }
    }

    /// Whether a cube can have this work alone.
    pub(super) fn fits(&self, caps: &Caps) -> bool {
        self.alone().fits(caps, CubeWork::Either)
    }

    pub(super) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(32, self.cube_planes)
    }
}

/// How the first launch for so many tokens is compiled, `slots` experts for each and a shared one
/// if there is any, `[gate and up, down]`. `None` where shared memory is too small for any number
/// of tokens up to [`SMALL_M_ROWS`](super::SMALL_M_ROWS).
pub(crate) fn gated_blueprints(
    dtype: DType,
    experts: [&Matrices; 2],
    shared: Option<[&Matrices; 2]>,
    (tokens, slots): (usize, usize),
    caps: &Caps,
) -> Option<Blueprints> {
    Blueprints::by_budget(
        &BUDGETS,
        tokens,
        (caps, CubeWork::Either),
        |budget, rows| {
            let of = |[gate_up, down]: [&Matrices; 2], pairing, slots| {
                let rows = XRows::new(rows, pairing, slots);
                StreamBlueprint {
                    gated: Some(down.format),
                    ..StreamBlueprint::of_rows(dtype, gate_up, rows, (caps, budget))
                }
            };
            let shared = shared.map(|shared| of(shared, Pairing::One, 0));
            Blueprints::new(of(experts, Pairing::Ids, slots), shared)
        },
    )
}

/// The capacity for a number of pairs, of which there are few, so that there are few kernels.
pub(super) fn small_pairs(pairs: usize) -> u32 {
    pairs.next_power_of_two().max(8) as u32
}

impl Product<'_> {
    pub(super) fn launch_streamed(&self, blueprint: StreamBlueprint, output: &CubeTensor) {
        let problem = StreamProblem {
            product: *self,
            output,
            blueprint: StreamBlueprint {
                gated: self.gated,
                ..blueprint
            },
        };
        launch_stream(&problem, None);
    }
}

/// Multiplies a small number of rows of `x` by the matrices of one problem, or of two, in one
/// launch.
pub(crate) fn launch_stream(first: &StreamProblem<'_>, second: Option<&StreamProblem<'_>>) {
    let x = first.product.x;
    let client = x.client.clone();
    let size = 16 / x.elem_size();
    let caps = Caps::of(&client);
    let division = CubeDivision::new(first, second, caps.processors as usize);
    let blueprints = Blueprints {
        first: first.blueprint,
        second: second.map(|second| second.blueprint),
    };
    let blueprints = blueprints.with_partials_of(division.plane_tiles(first, second), &caps);
    let ids_dtype = match first.product.grouping {
        Grouping::Ids(ids) => ids.dtype,
        _ => DType::U32,
    };
    let dtypes = [x.dtype, ids_dtype, first.output.dtype].map(dtype_to_storage_type);
    // SAFETY: rows and columns past the end are read as others, and not used; ids are those of
    // matrices; writes are within the outputs.
    unsafe {
        stream_kernel::launch_unchecked(
            &client,
            CubeCount::Static(division.cubes as u32, 1, 1),
            first.blueprint.cube_dim(),
            // Offsets in shared memory that are as wide as addresses are part of the instructions.
            AddressType::U64,
            size,
            x.clone().into_buffer_arg(),
            x.meta.strides()[0] / size,
            first.arg(),
            second.map(StreamProblem::arg).into(),
            division.arg(first),
            blueprints.first,
            blueprints.second,
            dtypes,
        );
    }
}
