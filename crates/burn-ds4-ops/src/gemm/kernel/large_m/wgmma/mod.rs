//! Hopper's warpgroup products: tiles of 128 or 192 rows of weights by up to 256 rows of `x`.

mod epilogue;
mod fp8;
mod fragments;
mod order;
mod ring;
mod shared;

use cubecl::prelude::*;

use super::{LargeMPairs, Problem};
use crate::caps::Target;
use crate::gemm::kernel::weights::{MatrixStack, WeightFormat};
use crate::intrinsics::plane_value;
use crate::warpgroup::{WARPGROUP, declare_sums, set_registers};
use epilogue::LaneSums;
use fragments::LaneRows;
use order::column_at;
use ring::Stages;
use shared::multiply_dense;

pub(crate) use fp8::{FP8_TILE, Fp8Blueprint, wgmma_fp8_kernel};
pub(crate) use order::{permute_kernel, quantize_kernel};

/// What the rows of `x` consist of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RowFormat {
    Bf16,
    F16,
}

/// How the operands of [`wgmma_kernel`] are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaOperands {
    /// FP4, for which the columns of `x` are permuted, FP8, or as `x`.
    pub weights: WeightFormat,
    pub x: RowFormat,
}

impl WgmmaOperands {
    /// Columns of `x` and of weights in a stage: 128, or 64.
    pub const fn k_block(self) -> u32 {
        self.row_chunks() * self.weights.columns()
    }

    /// Chunks of 16 bytes of a row of weights in a stage.
    const fn row_chunks(self) -> u32 {
        // As many as a swizzle spans where products read them from shared memory.
        if self.shares_weights() { 8 } else { 4 }
    }

    /// Whether products read weights from shared memory.
    const fn shares_weights(self) -> bool {
        matches!(self.weights, WeightFormat::Dense)
    }

    /// Shared memory of a stage, with its barriers.
    pub const fn stage_bytes(self, groups: u32, columns: u32) -> usize {
        let rows = 64 * groups;
        let x = columns * self.x_tiles() * ROW_BYTES;
        let weights = rows * self.row_chunks() * 16;
        (x + weights + rows * 4 + 24) as usize
    }

    /// Tiles of `x` in a stage, of 128 bytes of a row each.
    const fn x_tiles(self) -> u32 {
        self.k_block() * 2 / ROW_BYTES
    }
}

/// Bytes of a row of a tile of `x`, the span of the swizzle.
const ROW_BYTES: u32 = 128;
/// Rows of tiles that are multiplied at about the same time, so that what they read stays in the
/// cache.
const BAND: u32 = 16;

/// How [`wgmma_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaBlueprint {
    pub operands: WgmmaOperands,
    /// Warpgroups that multiply, 64 rows of weights each: 2, or 3 for tiles of at most 128 rows of
    /// `x`. One more copies.
    pub groups: u32,
    /// Rows of `x` of a tile, which are columns of the product: a multiple of 32, at most 256.
    pub columns: u32,
    /// Stages of [`WgmmaOperands::k_block`] columns of `x` and of weights.
    pub stages: u32,
    /// Half of the rows are a gate, whose activation is multiplied by the other half and by the
    /// score. The result is in the order for weights of this format.
    pub gated: Option<WeightFormat>,
    /// Whether pairs are sorted into groups.
    pub sorted: bool,
    /// Whether `x` has a row for each position in the order of groups.
    pub by_position: bool,
    /// Whether the scales of 128 columns are a word, which those of FP8 always are.
    pub scale_words: bool,
    /// Whether outputs are written eight at a time.
    pub vectors: bool,
    pub target: Target,
}

impl WgmmaBlueprint {
    pub const fn units(self) -> u32 {
        WARPGROUP * (1 + self.groups)
    }

    /// Rows of weights of a tile.
    pub const fn rows(self) -> u32 {
        64 * self.groups
    }

    /// Outputs of a tile.
    pub const fn outputs(self) -> u32 {
        if self.gated.is_some() {
            self.rows() / 2
        } else {
            self.rows()
        }
    }

    /// Registers of a unit that copies, and of one that multiplies. All of a cube's together are no
    /// more than it starts with: 168 for each of 384 units, 128 for each of 512.
    const fn registers(self) -> [u32; 2] {
        match (self.groups, self.gathers()) {
            (2, false) => [40, 232],
            (2, true) => [56, 224],
            (_, false) => [56, 152],
            (_, true) => [80, 144],
        }
    }

    /// Whether units that copy give registers to those that multiply.
    const fn moves_registers(self) -> bool {
        !matches!(self.format(), WeightFormat::Dense) || self.columns > 128
    }

    const fn multiplying_planes(self) -> u32 {
        self.groups * WARPGROUP / 32
    }

    const fn format(self) -> WeightFormat {
        self.operands.weights
    }

    const fn dtype(self) -> &'static str {
        match self.operands.x {
            RowFormat::Bf16 => "bf16",
            RowFormat::F16 => "f16",
        }
    }

    /// Whether the rows of `x` of a tile are not next to each other, or its rows of weights are
    /// more than two runs.
    const fn gathers(self) -> bool {
        (self.sorted && !self.by_position) || matches!(self.gated, Some(WeightFormat::Fp4(_)))
    }

    /// Boxes of rows of weights of a stage. With a gate, the gates come first.
    pub const fn weight_boxes(self) -> u32 {
        if self.gated.is_some() && !self.gathers() {
            2
        } else {
            1
        }
    }

    /// The rows of a stage from the lower row of a lane to the upper one.
    const fn row_distance(self) -> u32 {
        if self.weight_boxes() == 2 {
            self.rows() / 2
        } else {
            8
        }
    }

    /// Units that copy to a stage: one has the boxes, and all have scales and rows of `x` that are
    /// gathered.
    const fn copying_units(self) -> u32 {
        if self.scale_words || self.gathers() {
            WARPGROUP
        } else {
            1
        }
    }

    /// Rows of `x` of which a unit copies a chunk of each tile, if they are gathered.
    const fn unit_rows(self) -> u32 {
        self.columns * 8 / WARPGROUP
    }

    /// Rows of weights of which a unit copies a chunk, if rows of `x` are gathered.
    const fn unit_weight_rows(self) -> u32 {
        self.rows() * self.operands.row_chunks() / WARPGROUP
    }

    /// Rows of weights of which a unit copies the scales, at most.
    const fn unit_scales(self) -> u32 {
        self.rows().div_ceil(WARPGROUP)
    }

    /// Parts of 32 columns of a stage, whose products are a group.
    const fn parts(self) -> usize {
        self.operands.k_block() as usize / 32
    }

    /// Words of codes of a lane in a part.
    const fn part_codes(self) -> usize {
        if self.permuted() { 2 } else { 8 }
    }

    /// Rows of `x` of a smaller product, which a group with no more takes.
    const fn few_columns(self) -> u32 {
        self.columns * 3 / 4
    }

    const fn permuted(self) -> bool {
        self.format().is_fp4()
    }
}

/// Both operands in words.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct WgmmaBoxes {
    /// `[rows of each matrix, matrices, words]`, in boxes of the rows of a tile by 128 bytes.
    pub x: TensorMap<u32, Tiled>,
    /// `[rows of all matrices, words]`, in boxes of the rows of a tile, or of half of them.
    pub weights: TensorMap<u32, Tiled>,
}

/// The rows of the other operand.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct WgmmaRows {
    /// Where they are gathered.
    pub words: Box<[Vector<u32, Const<4>>]>,
    /// Vectors from one row to the next.
    pub vectors: u32,
}

/// What a cube multiplies at a time: rows of `x` and rows of weights.
#[derive(CubeType, Clone, Copy)]
struct Tile {
    problem: Problem,
    /// The first output, or its position.
    first: u32,
}

#[cube]
impl Tile {
    /// The output of a row of the tile. With a gate, 16 rows are the gates of eight outputs and
    /// what those are multiplied by.
    fn output_of(&self, row: u32, #[comptime] blueprint: WgmmaBlueprint) -> u32 {
        #[comptime]
        if let Option::Some(format) = blueprint.gated {
            column_at(self.first + row / 16 * 8 + row % 8, format)
        } else {
            self.first + row
        }
    }

    /// The row of the matrix; the last one past the end.
    fn matrix_row(&self, row: u32, rows: u32, #[comptime] blueprint: WgmmaBlueprint) -> u32 {
        let own = self.output_of(row, blueprint);
        if comptime!(blueprint.gated.is_some()) {
            let outputs = rows / 2;
            min(own, outputs - 1) + row / 8 % 2 * outputs
        } else {
            min(own, rows - 1)
        }
    }
}

/// Multiplies many rows of `x` by the rows of their matrices: `x · Wᵀ`, or with a gate.
///
/// - `x`: rows of 16-bit floats, for FP4 weights as [`permute_kernel`] writes them
/// - `output`: `[pairs, rows]`; gated, `[positions, rows / 2]` in `bf16` with padding as
///   [`padded`] says, in the order for the next weights
/// - `max_problems`: capacity of the table of problems
///
/// The first warpgroup of a cube copies rows of `x` and of weights to a ring of stages. The others
/// decode weights in registers, if they are packed, and multiply them by the rows of `x` in shared
/// memory. Cubes take tile after tile. With several K-splits, one for each cube along `y`, outputs
/// are the partial sums of each: `[splits, pairs, rows]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn wgmma_kernel<Y: Float, N: Size>(
    boxes: &WgmmaBoxes,
    x: &WgmmaRows,
    pairs: &LargeMPairs,
    max_problems: u32,
    matrices: &MatrixStack<Vector<u32, Const<4>>>,
    output: &mut [Vector<Y, N>],
    #[comptime] blueprint: WgmmaBlueprint,
    #[define(Y)] _dtype: ElemType,
) {
    let WgmmaBlueprint {
        columns,
        gated,
        vectors,
        target,
        ..
    } = comptime!(blueprint);
    declare_sums(comptime!(columns / 2));
    let mut stages = Stages::new(blueprint);
    let mut ring = stages.ring();

    let rows = matrices.layout.rows;
    let outputs = if comptime!(gated.is_some()) {
        rows / 2
    } else {
        rows
    };
    let tile_rows = match comptime!(gated) {
        Option::Some(format) => padded(outputs, format),
        Option::None => outputs,
    }
    .div_ceil(comptime!(blueprint.outputs()));
    let problems = pairs.problem_count(max_problems, columns);
    let tiles = tile_rows * problems;
    let [copying, multiplying] = comptime!(blueprint.registers());
    let group = plane_value(UNIT_POS / WARPGROUP, 0u32, target);
    if group == 0 {
        if comptime!(blueprint.moves_registers()) {
            set_registers(copying, false);
        }
        if UNIT_POS < comptime!(blueprint.copying_units()) {
            for index in range_stepped(CUBE_POS_X, tiles, CUBE_COUNT_X) {
                let tile = tile_at(index, tile_rows, problems, pairs, max_problems, blueprint);
                stages.fill(&mut ring, boxes, x, pairs, matrices, &tile);
            }
            if comptime!(blueprint.gathers()) {
                ring.finish();
            }
        }
    } else {
        if comptime!(blueprint.moves_registers()) {
            set_registers(multiplying, true);
        }
        let row = (group - 1) * 64 + UNIT_POS % WARPGROUP / 32 * 16 + UNIT_POS % 32 / 4;
        for index in range_stepped(CUBE_POS_X, tiles, CUBE_COUNT_X) {
            let tile = tile_at(index, tile_rows, problems, pairs, max_problems, blueprint);
            let width = matrices.layout.columns;
            let mut nan = (false.runtime(), false.runtime());
            if comptime!(blueprint.format() == WeightFormat::Dense) {
                multiply_dense(&mut ring, &stages, width, group - 1, blueprint);
            } else {
                let mut lane = LaneRows::new(matrices, &tile, row, blueprint);
                let few = comptime!(blueprint.few_columns());
                if comptime!(!blueprint.sorted) {
                    lane.multiply(&mut ring, &stages, width, columns, blueprint);
                } else if tile.problem.count <= few {
                    lane.multiply(&mut ring, &stages, width, few, blueprint);
                } else {
                    lane.multiply(&mut ring, &stages, width, columns, blueprint);
                }
                nan = lane.nan(blueprint);
            }
            let sums = LaneSums::new(pairs, &tile, row, nan, blueprint);
            if comptime!(gated.is_some()) {
                sums.write_gated(output, outputs);
            } else if comptime!(vectors) {
                sums.write_vectors(output, outputs);
            } else {
                sums.write(output, outputs);
            }
        }
    }
}

/// What the number of columns of a gated result is a multiple of, by the weights that it is for.
pub(crate) const fn hidden_block(weights: WeightFormat) -> u32 {
    let x = RowFormat::Bf16;
    WgmmaOperands { weights, x }.k_block()
}

/// Columns of a gated result with padding, which tiles write, too.
#[cube]
fn padded(columns: u32, #[comptime] format: WeightFormat) -> u32 {
    let block = comptime!(hidden_block(format));
    columns.div_ceil(block) * block
}

/// A tile by its index: those of the same rows of `x` after each other for sorted pairs, or bands
/// of rows of weights.
#[cube]
fn tile_at(
    index: u32,
    tile_rows: u32,
    problems: u32,
    pairs: &LargeMPairs,
    max_problems: u32,
    #[comptime] blueprint: WgmmaBlueprint,
) -> Tile {
    let band = if comptime!(blueprint.sorted) {
        tile_rows
    } else {
        BAND.runtime()
    };
    let (problem, row) = place_at(index, tile_rows, problems, band);
    Tile {
        problem: pairs.problem(problem, max_problems, blueprint.columns),
        first: row * comptime!(blueprint.outputs()),
    }
}

/// The problem and the row of tiles of a tile: `band` rows of tiles of every problem come one after
/// the other.
#[cube]
fn place_at(index: u32, tile_rows: u32, problems: u32, band: u32) -> (u32, u32) {
    let first = index / (band * problems) * band;
    let height = min(tile_rows - first, band);
    let place = index % (band * problems);
    (place / height, first + place % height)
}
