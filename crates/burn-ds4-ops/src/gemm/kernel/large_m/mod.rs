//! The schedule for many rows of `x`, which the tensor cores limit.

mod blueprint;
mod k_block;
mod problem;
mod sort;
mod wgmma;

use cubecl::prelude::*;

use super::epilogue::{Results, add_terms, gated_value, zero_sums};
use super::weights::{MatrixStack, TwoRows, WeightReader};
use crate::intrinsics::modulo;
use blueprint::{K_BLOCK, ROW_PITCH, ROW_TILES};
use k_block::{KBlockWeights, XRows, any_rare, fetch_weights, multiply_k_block, store_x};
use problem::LargeMPairs;

pub(crate) use blueprint::LargeMBlueprint;
pub(crate) use problem::LargeMPairsLaunch;
pub(crate) use sort::{
    MAX_SORTED, SortBlueprint, SortSizesLaunch, sort_kernel, sum_slots_kernel, sum_splits_kernel,
};
pub(crate) use wgmma::{
    FP8_TILE, Fp8Blueprint, RowFormat, WgmmaBlueprint, WgmmaBoxesLaunch, WgmmaOperands,
    WgmmaRowsLaunch, hidden_block, permute_kernel, quantize_kernel, wgmma_fp8_kernel, wgmma_kernel,
};

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
    let mut own_rows = Sequence::<TwoRows>::new();
    #[unroll]
    for m in 0..ROW_TILES {
        let own = first_output + m * tile_outputs + row;
        let low = min(own, outputs - 1);
        let high = if comptime!(gated) {
            low + outputs
        } else {
            own + 8
        };
        own_rows.push(weights.two_rows(problem.matrix, low, high));
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
