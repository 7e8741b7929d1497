//! The schedule for many rows of `x`, which the tensor cores limit.

mod k_block;
mod sort;
mod wgmma;

use cubecl::prelude::*;

use super::epilogue::{Results, add_terms, gated_value, zero_sums};
use super::input::InputLayout;
use super::weights::{MatrixStack, ReaderBlueprint, RowPair, WeightFormat, WeightReader};
use crate::caps::Target;
use crate::intrinsics::modulo;
use k_block::{KBlockWeights, XRows, any_rare, fetch_weights, multiply_k_block, store_x};

pub(crate) use sort::{
    MAX_SORTED, SortBlueprint, SortSizesLaunch, sort_kernel, sum_slots_kernel, sum_splits_kernel,
};
pub(crate) use wgmma::{
    FP8_TILE, Fp8Blueprint, RowFormat, WgmmaBlueprint, WgmmaBoxesLaunch, WgmmaOperands,
    WgmmaRowsLaunch, hidden_block, permute_kernel, quantize_kernel, wgmma_fp8_kernel, wgmma_kernel,
};

/// Columns of weights that a cube multiplies between two barriers.
pub(super) const K_BLOCK: u32 = 128;
/// vec8s of a K-block.
pub(super) const K_BLOCK_VEC8S: u32 = K_BLOCK / 8;
/// vec8s from one row of `x` to the next in shared memory, such that eight lanes that read together
/// have no bank conflict.
pub(super) const ROW_PITCH: u32 = K_BLOCK_VEC8S + 4;
/// Tiles of 16 rows of a plane. Each term of `x` that the plane reads serves both.
pub(super) const ROW_TILES: u32 = 2;

/// How [`large_m_kernel`] is compiled.
///
/// A cube multiplies `8 * x_tiles` columns, which are rows of `x`, by `32 * planes` rows of
/// weights. The planes share `x`, which goes through shared memory one K-block at a time; each
/// plane reads and decodes its own weights in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LargeMBlueprint {
    /// Formats of the weights and of `x`.
    pub input: InputLayout,
    /// Tiles of 8 columns, which are rows of `x`.
    pub x_tiles: u32,
    pub planes: u32,
    /// Half of the rows are a gate, whose activation is multiplied by the other half and by the
    /// score. The result is in the order in which weights of this format are decoded.
    pub gated: Option<WeightFormat>,
    /// Whether K is a multiple of the K-block.
    pub k_aligned: bool,
    pub target: Target,
}

impl LargeMBlueprint {
    const fn reader(self) -> ReaderBlueprint {
        ReaderBlueprint {
            format: self.input.format,
            k_aligned: self.k_aligned,
            scale_vectors: false,
            in_parts: true,
            target: self.target,
        }
    }

    /// Rows of `x` of a cube.
    pub const fn rows(self) -> u32 {
        8 * self.x_tiles / self.input.terms
    }

    /// vec8s that a unit of the cube puts into shared memory for a K-block.
    pub const fn unit_vec8s(self) -> u32 {
        (8 * self.x_tiles * K_BLOCK_VEC8S).div_ceil(self.planes * 32)
    }

    /// Rows of the output of a cube.
    pub const fn outputs(self) -> u32 {
        let rows = 16 * ROW_TILES * self.planes;
        if self.gated.is_some() { rows / 2 } else { rows }
    }
}

/// The problem of a cube: a matrix and rows of `x`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Problem {
    pub matrix: u32,
    /// First position in the order of groups, and number of positions.
    pub start: u32,
    pub count: u32,
}

/// How pairs find their rows of `x` and their matrices.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct LargeMPairs {
    /// The pairs, group by group; without it, each row has a pair with every matrix.
    pub order: ComptimeOption<Box<[u32]>>,
    /// Matrix, first position and number of positions of each problem; behind as many as the table
    /// has capacity for, the number of problems.
    pub problems: ComptimeOption<Box<[u32]>>,
    /// Factors of gated pairs.
    pub scores: ComptimeOption<Box<[f32]>>,
    /// Number of positions; without an order, those of each matrix.
    pub count: u32,
    /// Matrices that each row has a pair with, where there is no order.
    pub groups: u32,
    /// Pairs that have one row of `x`. A permuted `x` has a row for each position and term.
    pub per_row: u32,
    /// The limit of gates.
    pub limit: f32,
}

#[cube]
impl LargeMPairs {
    /// The pair at a position of a problem.
    pub fn at(&self, problem: &Problem, position: u32) -> u32 {
        let mut pair = position * self.groups + problem.matrix;
        #[comptime]
        if let ComptimeOption::Some(order) = &self.order {
            pair = order[position as usize];
        }
        pair
    }

    /// Number of problems, of at most `rows` rows of `x` each.
    pub fn problem_count(&self, capacity: u32, #[comptime] rows: u32) -> u32 {
        let mut count = self.count.div_ceil(rows) * self.groups;
        #[comptime]
        if let ComptimeOption::Some(problems) = &self.problems {
            count = min(problems[capacity as usize * 3], capacity);
        }
        count
    }

    /// A problem; one of no rows past the end.
    pub fn problem(&self, index: u32, capacity: u32, #[comptime] rows: u32) -> Problem {
        let mut matrix = index % self.groups;
        let mut start = index / self.groups * rows;
        let mut count = min(self.count - min(start, self.count), rows);
        #[comptime]
        if let ComptimeOption::Some(problems) = &self.problems {
            let entry = index as usize * 3;
            count = 0u32;
            if index < problems[capacity as usize * 3] {
                matrix = problems[entry];
                start = problems[entry + 1];
                count = problems[entry + 2];
            }
        }
        Problem {
            matrix,
            start,
            count,
        }
    }
}

/// Multiplies many rows of `x` by the rows of their matrices: `x · Wᵀ`, or with a gate.
///
/// - `x`: rows of vectors, `x_vectors` from one to the next
/// - `output`: `[pairs, rows]`; gated, `[positions, terms, rows / 2]` in `bf16`, in the order of
///   [`permuted_column`]
///
/// `R` is the dtype that a gated result is rounded to.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn large_m_kernel<X: Numeric, R: Float, Y: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    pairs: &LargeMPairs,
    matrices: &MatrixStack<Vector<u32, Const<4>>>,
    output: &mut [Y],
    #[comptime] blueprint: LargeMBlueprint,
    #[define(X, R, Y)] _dtypes: [ElemType; 3],
) {
    let row = UNIT_POS_X / 4;
    let quarter = UNIT_POS_X % 4;
    let terms = comptime!(blueprint.input.terms);
    let format = comptime!(blueprint.input.format);
    let gated = comptime!(blueprint.gated.is_some());
    let x_tiles = comptime!(blueprint.x_tiles);
    let (rows, width) = (matrices.layout.rows, matrices.layout.columns);
    let outputs = if comptime!(gated) { rows / 2 } else { rows };

    let problem = pairs.problem(CUBE_POS_Y, CUBE_COUNT_Y, comptime!(blueprint.rows()));
    if problem.count == 0 {
        terminate!();
    }
    let weights = WeightReader::new(matrices, blueprint.reader());
    let tile_outputs = comptime!(if gated { 8u32 } else { 16u32 });
    let first_output =
        (CUBE_POS_X * blueprint.planes + UNIT_POS_Y) * comptime!(ROW_TILES * tile_outputs);
    let mut own_rows = Sequence::<RowPair>::new();
    #[unroll]
    for m in 0..ROW_TILES {
        let own = first_output + m * tile_outputs + row;
        let low = min(own, outputs - 1);
        let high = if comptime!(gated) {
            low + outputs
        } else {
            own + 8
        };
        own_rows.push(weights.row_pair(problem.matrix, low, high));
    }

    let mut stages = Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(
        (2 * 8 * x_tiles * ROW_PITCH) as usize
    ));
    let mut sums = zero_sums(comptime!(ROW_TILES * x_tiles));

    // While a K-block is multiplied, the weights and the `x` of the next one are read into
    // registers.
    let k_blocks = (width + comptime!(K_BLOCK - 1)) / K_BLOCK;
    let mut current = KBlockWeights::new(format);
    let mut next = KBlockWeights::new(format);
    let mut x_vec8s =
        Array::<Vector<u32, Const<4>>>::new(comptime!(blueprint.unit_vec8s() as usize));
    let x_rows = XRows::<X, N>::new(x, x_vectors, pairs, &problem, width, blueprint);
    x_rows.fetch(0u32, &mut x_vec8s);
    fetch_weights(&weights, &own_rows, 0u32, quarter, &mut current);
    store_x(&x_vec8s, 0u32, &mut stages, blueprint);
    sync_cube();
    for block in 0..k_blocks {
        let ahead = min(block + 1, k_blocks - 1);
        x_rows.fetch(ahead, &mut x_vec8s);
        fetch_weights(&weights, &own_rows, ahead * K_BLOCK, quarter, &mut next);
        let stage = block % 2 * comptime!(8 * x_tiles * ROW_PITCH);
        let at = stage + row * ROW_PITCH + quarter;
        if any_rare(&current, format, blueprint.target) {
            multiply_k_block(&current, &stages, at, &mut sums, true, blueprint);
        } else {
            multiply_k_block(&current, &stages, at, &mut sums, false, blueprint);
        }
        store_x(&x_vec8s, (block + 1) % 2, &mut stages, blueprint);
        current.copy_from(&next, format);
        sync_cube();
    }

    #[unroll]
    for m in 0..ROW_TILES {
        let own = first_output + m * tile_outputs + row;
        #[unroll]
        for n in 0..x_tiles {
            let sum = sums[comptime!((m * x_tiles + n) as usize)];
            let sum = add_terms(sum, terms, blueprint.target);
            let lane_columns = comptime!(if terms == 1 { 2u32 } else { 1u32 });
            #[unroll]
            for w in 0..lane_columns {
                let column = (n * 8 + quarter * 2 + w) / terms;
                let low = sum.extract(comptime!(w as usize));
                let high = sum.extract(comptime!(w as usize + 2));
                if modulo(quarter * 2, terms) == 0 && column < problem.count {
                    let at = problem.start + column;
                    let pair = pairs.at(&problem, at);
                    let row = if comptime!(gated) { at } else { pair };
                    let results = Results { row, own, outputs };
                    if comptime!(!gated) {
                        results.write(output, low, high);
                    } else if own < outputs {
                        let (scores, target) = (&pairs.scores, comptime!(blueprint.target));
                        let value = gated_value(low, high, pairs.limit, scores, pair, target);
                        let next = comptime!(blueprint.gated.unwrap());
                        results.write_gated::<R, Y>(output, value, terms, next);
                    }
                }
            }
        }
    }
}
