use cubecl::prelude::*;

use super::blueprint::FewBlueprint;
use super::decode::Format;
use super::few_rows::prefetch_rows;
use super::few_share::{Room, Share, multiply_share};
use super::groups::Groups;
use super::weights::{Stack, Weights};

/// Time of 16 bytes of FP8 that become `f16`, as a part of that of other weights: cubes that have them are done so much earlier.
const WORK_OF_HALVES: f32 = 0.7;

/// [`few_kernel`](super::few_kernel) with gates for the experts of every pair, and for the shared expert of all tokens, which some of the
/// cubes have, as many as its weights are of all that are read: a cube that had both would begin twice.
///
/// - `x`: rows of vectors, one for each token
/// - `ids`, `scores`: of every pair
/// - `words`, `scales`: a stack of matrices; `shared_words`, `shared_scales`: a stack of one
/// - `hidden`, `shared_hidden`: `[pairs, parts, rows / 2]` and `[tokens, parts, rows / 2]` in `bf16`, see [`place`](super::columns::place)
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn few_mixture_kernel<X: Float, I: Int, Y: Float, N: Size, S: Size, T: Size>(
    x: &[Vector<X, N>],
    ids: &[I],
    scores: ComptimeOption<&[f32]>,
    words: &[Vector<u32, Const<4>>],
    scales: &[Vector<u32, S>],
    shared_words: &[Vector<u32, Const<4>>],
    shared_scales: &[Vector<u32, T>],
    hidden: &mut [Y],
    shared_hidden: &mut [Y],
    tokens: u32,
    slots: u32,
    matrices: u32,
    x_vectors: usize,
    stack: Stack,
    shared_stack: Stack,
    limit: f32,
    shared_limit: f32,
    #[comptime] to: [Format; 2],
    #[comptime] blueprints: [FewBlueprint; 2],
    #[define(X, I, Y)] _dtypes: [ElemType; 3],
) {
    let blueprint = comptime!(blueprints[0]);
    let of_shared = comptime!(blueprints[1]);
    // It will be waited for: it may come while the pairs are grouped.
    prefetch_rows(x, tokens, stack.columns, x_vectors, blueprint);
    let ids = ComptimeOption::new_Some(ids);
    let pairs = tokens * slots;
    let groups = Groups::new::<I>(&ids, pairs, matrices, blueprint.pairs, blueprint.pairing);

    let work = f32::cast_from(groups.count()) * gated_work(&stack, blueprint);
    // Few tokens have an expert in common, but all have this one: it may have to be read more than once.
    let at_once = comptime!(of_shared.pass());
    let times = (tokens + comptime!(at_once - 1)) / at_once;
    let shared_work = f32::cast_from(times) * gated_work(&shared_stack, of_shared);
    let cubes = CUBE_COUNT_X;
    // Every cube comes to the same number.
    let shared_cubes = f32::cast_from(cubes) * shared_work / (work + shared_work);
    let shared_cubes = min(max(u32::cast_from(shared_cubes + 0.5f32), 1u32), cubes - 1);
    let first_shared = cubes - shared_cubes;

    let mut room = Room::new(blueprint, of_shared);
    if CUBE_POS_X < first_shared {
        let weights = Weights::<S>::of_few(words, scales, stack, blueprint);
        let share = Share {
            index: CUBE_POS_X,
            count: first_shared,
            pairs: slots,
        };
        multiply_share::<X, Y, N, S>(
            x,
            &scores,
            weights,
            &groups,
            hidden,
            share,
            x_vectors,
            limit,
            &mut room,
            comptime!(Some(to[0])),
            blueprint,
        );
    } else {
        let weights = Weights::<T>::of_few(shared_words, shared_scales, shared_stack, of_shared);
        let share = Share {
            index: CUBE_POS_X - first_shared,
            count: shared_cubes,
            pairs: 1u32,
        };
        let no_ids = ComptimeOption::<&[I]>::new_None();
        let all = Groups::new::<I>(&no_ids, tokens, 1u32, of_shared.pairs, of_shared.pairing);
        let no_scores = ComptimeOption::<&[f32]>::new_None();
        multiply_share::<X, Y, N, T>(
            x,
            &no_scores,
            weights,
            &all,
            shared_hidden,
            share,
            x_vectors,
            shared_limit,
            &mut room,
            comptime!(Some(to[1])),
            of_shared,
        );
    }
}

/// What it takes to multiply by a matrix, gates and all: by its bytes, of which those that the hardware decodes take less.
#[cube]
fn gated_work(stack: &Stack, #[comptime] blueprint: FewBlueprint) -> f32 {
    let vectors = stack.columns / comptime!(blueprint.columns.format.columns());
    let of_vector = comptime!(if blueprint.columns.halves {
        WORK_OF_HALVES
    } else {
        1.0
    });
    f32::cast_from(stack.rows) * f32::cast_from(vectors) * of_vector
}
