//! Hopper's warpgroup products: tiles of 128 or 192 rows of weights by up to 256 rows of `x`.

mod blueprint;
mod epilogue;
mod fp8;
mod fragments;
mod order;
mod ring;
mod shared;
mod tile;

use cubecl::prelude::*;

use super::problem::LargeMPairs;
use crate::gemm::kernel::weights::{MatrixStack, WeightFormat};
use crate::intrinsics::plane_value;
use crate::warpgroup::{WARPGROUP, declare_sums, set_registers};
use epilogue::LaneSums;
use fragments::LaneRows;
use ring::Stages;
use shared::multiply_dense;
use tile::{padded, tile_at};

pub(crate) use blueprint::{
    RowFormat, WgmmaBlueprint, WgmmaBoxes, WgmmaBoxesLaunch, WgmmaOperands, WgmmaRows,
    WgmmaRowsLaunch, hidden_block,
};
pub(crate) use fp8::{FP8_TILE, Fp8Blueprint, wgmma_fp8_kernel};
pub(crate) use order::{permute_kernel, quantize_kernel};

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
