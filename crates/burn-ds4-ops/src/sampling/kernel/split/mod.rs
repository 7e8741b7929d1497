//! Rows that many cubes work on. The first launch finds the highest logit of each segment of a row.
//! In the second, each cube weighs its segments, by bins of exponents where there is a filter, and
//! the last-arriving cube of a row chooses the token: the bins tell where the bounds of the filters
//! are, and in which segment the token is, so that it reads a few elements only.

mod choose;
mod cube;
mod weigh;

use cubecl::prelude::*;

use super::filter::FilterBounds;
use super::lanes::Lanes;
use super::parts::{COUNTERS, RowParts, SplitRow, SplitShape, total_words};
use super::row::{NONE, SampleBlueprint, SamplingRow};
use super::scan::WideScanner;
use crate::intrinsics::arrival_order;
use crate::select::key::LOWEST;
use cube::DrawCube;

/// What a launch of [`draw_kernel`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DrawStages {
    /// Weighs segments.
    Weigh,
    /// Chooses the tokens, with one cube for each row.
    Choose,
    /// Weighs segments, and the last-arriving cube of a row chooses its token.
    Both,
}

/// How [`draw_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SplitBlueprint {
    pub sample: SampleBlueprint,
    /// Elements of a bin for each unit of a cube that sorts them, at most: a power of two.
    pub unit_candidates: u32,
    pub stages: DrawStages,
}

/// Finds the highest logit of each segment, and clears the sums of rows.
///
/// - `highest`: `[rows, segments, 2]`
/// - `totals`: for each row its bins and its counter
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn highest_kernel<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    highest: &mut [u32],
    totals: &mut [Atomic<u32>],
    shape: SplitShape,
    #[comptime] blueprint: SampleBlueprint,
    #[define(F)] _dtype: ElemType,
) {
    let SampleBlueprint { units, log2_bins } = comptime!(blueprint);
    let row = SamplingRow::<F, N>::new(
        logits,
        CUBE_POS_Y as usize * shape.row.row_vectors,
        shape.row.vectors,
        units.cube,
    );
    let words = total_words(log2_bins);
    let mut at = (CUBE_POS_X * comptime!(units.cube) + UNIT_POS) as usize;
    while at < words {
        totals[CUBE_POS_Y as usize * words + at].store(0u32);
        at += (shape.segments * comptime!(units.cube)) as usize;
    }
    let mut scanner = WideScanner::new(units);
    let first = CUBE_POS_X * shape.segment_vectors;
    let end = min(first + shape.segment_vectors, shape.row.vectors);
    let own = row.highest(first, end, &mut scanner);
    if UNIT_POS == 0 {
        let at = (CUBE_POS_Y as usize * shape.segments as usize + CUBE_POS_X as usize) * 2;
        highest[at] = own.high;
        highest[at + 1] = own.low;
    }
}

/// Chooses a token for each row, whose cubes are those with its index in the second dimension.
///
/// - `tokens`: `[rows]`
/// - `parts`, `totals`: what [`highest_kernel`] has left, and scratch
#[cube(launch_unchecked, address_type = "dynamic")]
// CubeCL tells the condition on the blueprint from the one on the cube by their nesting.
#[allow(clippy::collapsible_if)]
pub(crate) fn draw_kernel<F: Float, I: Int, N: Size>(
    logits: &[Vector<F, N>],
    lanes: &Lanes<I>,
    tokens: &mut [i32],
    parts: &mut RowParts,
    totals: &mut [Atomic<u32>],
    shape: SplitShape,
    #[comptime] blueprint: SplitBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let SampleBlueprint { units, log2_bins } = comptime!(blueprint.sample);
    let stages = comptime!(blueprint.stages);
    let index = CUBE_POS_Y;
    let filter = lanes.tables.filter(index / shape.row.lane_rows);
    let mut scanner = WideScanner::new(units);
    let mut key = 0u32;
    let mut id = u32::MAX.runtime();
    if UNIT_POS < shape.segments {
        let at = (index as usize * shape.segments as usize + UNIT_POS as usize) * 2;
        key = parts.highest[at];
        id = parts.highest[at + 1];
    }
    let highest = scanner.first_highest(key, id);
    if highest.high > LOWEST && filter.rate > 0.0f32 {
        let row = SamplingRow::<F, N>::new(
            logits,
            index as usize * shape.row.row_vectors,
            shape.row.vectors,
            units.cube,
        );
        let mut cube = DrawCube::new(scanner, blueprint.unit_candidates, blueprint.sample);
        let bounds = FilterBounds::new(highest.high, &filter);
        if comptime!(stages != DrawStages::Choose) {
            let first = CUBE_POS_X * shape.cube_segments;
            let end = min(first + shape.cube_segments, shape.segments);
            for segment in first..end {
                if filter.top_k > 0 || filter.top_p > 0 {
                    cube.weigh_bins::<F, N>(
                        &row,
                        &bounds,
                        (index, segment),
                        parts,
                        totals,
                        &shape,
                        filter.top_k > 0,
                    );
                } else {
                    cube.weigh::<F, N>(&row, &bounds, index, segment, parts, &shape);
                }
            }
        }
        let mut chooses = true.runtime();
        if comptime!(stages == DrawStages::Both) {
            let counter = (index as usize + 1) * total_words(log2_bins) - COUNTERS;
            chooses = arrival_order(totals, counter, units.target) == CUBE_COUNT_X - 1;
        }
        if comptime!(stages != DrawStages::Weigh) {
            if chooses {
                let row = SplitRow::<F, N>::new(row, &*parts, index, &shape, log2_bins);
                let drawn = lanes.random_number(index, shape.row.lane_rows);
                let token = cube.choose::<F, N>(&row, &*totals, &highest, &filter, &drawn);
                if UNIT_POS == 0 {
                    tokens[index as usize] = token as i32;
                }
            }
        }
    } else if CUBE_POS_X == 0 && UNIT_POS == 0 {
        tokens[index as usize] = select(highest.high > LOWEST, highest.low as i32, NONE);
    }
}
