//! The schedule for a small number of rows of `x`: weights are streamed.

mod blueprint;
mod pipeline;
mod sum;
mod tiles;

use cubecl::prelude::*;

use super::groups::{Groups, Pairing};
use super::input::prefetch_rows;
use super::weights::StackLayout;
use tiles::{SharedStorage, StreamProblem, TileRange, multiply_tiles_of};

pub(crate) use blueprint::StreamBlueprint;
pub(crate) use sum::{SumProblemLaunch, SumSizesLaunch, slot_sum_kernel};
pub(crate) use tiles::StreamProblemLaunch;

/// Time for 16 bytes of FP8 that become `f16`, relative to that of other weights: cubes that
/// multiply by them are done that much earlier.
const F16_INPUT_WORK: f32 = 0.7;

/// Multiplies a small number of rows of `x` by matrices: `x · Wᵀ`, or with half of the rows as a
/// gate. With a second problem, each has cubes of its own, in proportion to its part of the
/// weights: a cube with both kinds of work would have to start up twice. The second one has no ids.
///
/// - `x`: rows of vectors; pair `p` has row `p / pairs_per_row`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn stream_kernel<X: Float, I: Int, Y: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    mut first: StreamProblem<I, Y>,
    second: ComptimeOption<StreamProblem<I, Y>>,
    #[comptime] blueprint: StreamBlueprint,
    #[comptime] second_blueprint: Option<StreamBlueprint>,
    #[define(X, I, Y)] _dtypes: [ElemType; 3],
) {
    let layout = &first.matrices.layout;
    // All cubes wait for `x`, so it is fetched while they group the pairs.
    let rows = first.pairs / first.pairs_per_row;
    prefetch_rows(x, rows, layout.columns, x_vectors, blueprint);
    let groups = Groups::new::<I>(
        &first.ids,
        first.pairs,
        layout.count,
        blueprint.pairs,
        blueprint.pairing,
    );
    let other_blueprint = comptime!(second_blueprint.unwrap_or(blueprint));
    let mut storage = SharedStorage::new(blueprint, other_blueprint);
    let mut first_cubes = CUBE_COUNT_X;
    #[comptime]
    if let ComptimeOption::Some(second) = &second {
        // With ids, a matrix has few rows of `x`; without, it has all and may be read repeatedly.
        let reads = if comptime!(blueprint.pairing == Pairing::One) {
            passes_of(first.pairs, blueprint)
        } else {
            groups.count()
        };
        let work = f32::cast_from(reads) * work_of(layout, blueprint);
        let second_reads = passes_of(second.pairs, other_blueprint);
        let second_work =
            f32::cast_from(second_reads) * work_of(&second.matrices.layout, other_blueprint);
        let cubes = CUBE_COUNT_X;
        // Every cube computes the same number.
        let second_cubes = f32::cast_from(cubes) * second_work / (work + second_work);
        let second_cubes = min(max(u32::cast_from(second_cubes + 0.5f32), 1u32), cubes - 1);
        first_cubes = cubes - second_cubes;
    }
    let has_first = if comptime!(second_blueprint.is_some()) {
        CUBE_POS_X < first_cubes
    } else {
        true.runtime()
    };
    if has_first {
        let range = TileRange {
            index: CUBE_POS_X,
            count: first_cubes,
        };
        multiply_tiles_of::<X, I, Y, N>(
            x,
            x_vectors,
            &mut first,
            &groups,
            range,
            &mut storage,
            blueprint,
        );
    } else {
        let mut second = second.unwrap();
        let range = TileRange {
            index: CUBE_POS_X - first_cubes,
            count: CUBE_COUNT_X - first_cubes,
        };
        let all = Groups::new::<I>(
            &second.ids,
            second.pairs,
            1u32,
            other_blueprint.pairs,
            other_blueprint.pairing,
        );
        multiply_tiles_of::<X, I, Y, N>(
            x,
            x_vectors,
            &mut second,
            &all,
            range,
            &mut storage,
            other_blueprint,
        );
    }
}

/// How often a matrix is read for so many pairs.
#[cube]
fn passes_of(pairs: u32, #[comptime] blueprint: StreamBlueprint) -> u32 {
    (pairs + comptime!(blueprint.pass_pairs() - 1)) / comptime!(blueprint.pass_pairs())
}

/// The work of multiplying by a matrix: its bytes, where those that the hardware decodes count
/// less.
#[cube]
fn work_of(layout: &StackLayout, #[comptime] blueprint: StreamBlueprint) -> f32 {
    let vectors = layout.columns / comptime!(blueprint.input.format.columns());
    let vector_work = comptime!(if blueprint.input.f16_input {
        F16_INPUT_WORK
    } else {
        1.0
    });
    f32::cast_from(layout.rows) * f32::cast_from(vectors) * vector_work
}
