use cubecl::prelude::*;

use super::blueprint::SmallMBlueprint;
use super::decode::WeightFormat;
use super::groups::Groups;
use super::small_m_tiles::{SharedStorage, TileRange, multiply_tile_range};
use super::weights::{Stack, WeightReader};
use super::x_rows::prefetch_rows;

/// Time for 16 bytes of FP8 that become `f16`, relative to that of other weights: cubes that
/// multiply by them are done that much earlier.
const F16_INPUT_WORK: f32 = 0.7;

/// [`small_m_kernel`](super::small_m_kernel) with gates, for the experts of every pair and for the
/// shared expert of all tokens. The shared expert has cubes of its own, in proportion to its part
/// of the weights: a cube with both kinds of work would have to start up twice.
///
/// - `x`: rows of vectors, one for each token
/// - `ids`, `scores`: of every pair
/// - `words`, `scales`: a stack of matrices; `shared_words`, `shared_scales`: a stack of one
/// - `hidden`, `shared_hidden`: `[pairs, terms, rows / 2]` and `[tokens, terms, rows / 2]` in
///   `bf16`, in the order of [`permuted_column`](super::input_layout::permuted_column)
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn small_m_mixture_kernel<X: Float, I: Int, Y: Float, N: Size, S: Size, T: Size>(
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
    #[comptime] to: [WeightFormat; 2],
    #[comptime] blueprints: [SmallMBlueprint; 2],
    #[define(X, I, Y)] _dtypes: [ElemType; 3],
) {
    let blueprint = comptime!(blueprints[0]);
    let shared_blueprint = comptime!(blueprints[1]);
    // All cubes wait for `x`, so it is fetched while they group the pairs.
    prefetch_rows(x, tokens, stack.columns, x_vectors, blueprint);
    let ids = ComptimeOption::new_Some(ids);
    let pairs = tokens * slots;
    let groups = Groups::new::<I>(&ids, pairs, matrices, blueprint.pairs, blueprint.pairing);

    let work = f32::cast_from(groups.count()) * gated_work(&stack, blueprint);
    // A routed expert has few tokens, but the shared expert has all: it may be read more than once.
    let pass_tokens = comptime!(shared_blueprint.pass_pairs());
    let passes = (tokens + comptime!(pass_tokens - 1)) / pass_tokens;
    let shared_work = f32::cast_from(passes) * gated_work(&shared_stack, shared_blueprint);
    let cubes = CUBE_COUNT_X;
    // Every cube computes the same number.
    let shared_cubes = f32::cast_from(cubes) * shared_work / (work + shared_work);
    let shared_cubes = min(max(u32::cast_from(shared_cubes + 0.5f32), 1u32), cubes - 1);
    let first_shared = cubes - shared_cubes;

    let mut storage = SharedStorage::new(blueprint, shared_blueprint);
    if CUBE_POS_X < first_shared {
        let weights = WeightReader::<S>::for_small_m(words, scales, stack, blueprint);
        let range = TileRange {
            index: CUBE_POS_X,
            count: first_shared,
            pairs_per_row: slots,
        };
        multiply_tile_range::<X, Y, N, S>(
            x,
            &scores,
            weights,
            &groups,
            hidden,
            range,
            x_vectors,
            limit,
            &mut storage,
            comptime!(Some(to[0])),
            blueprint,
        );
    } else {
        let weights = WeightReader::<T>::for_small_m(
            shared_words,
            shared_scales,
            shared_stack,
            shared_blueprint,
        );
        let range = TileRange {
            index: CUBE_POS_X - first_shared,
            count: shared_cubes,
            pairs_per_row: 1u32,
        };
        let no_ids = ComptimeOption::<&[I]>::new_None();
        let all = Groups::new::<I>(
            &no_ids,
            tokens,
            1u32,
            shared_blueprint.pairs,
            shared_blueprint.pairing,
        );
        let no_scores = ComptimeOption::<&[f32]>::new_None();
        multiply_tile_range::<X, Y, N, T>(
            x,
            &no_scores,
            weights,
            &all,
            shared_hidden,
            range,
            x_vectors,
            shared_limit,
            &mut storage,
            comptime!(Some(to[1])),
            shared_blueprint,
        );
    }
}

/// The work of multiplying by a matrix, gates included: its bytes, where those that the hardware
/// decodes count less.
#[cube]
fn gated_work(stack: &Stack, #[comptime] blueprint: SmallMBlueprint) -> f32 {
    let vectors = stack.columns / comptime!(blueprint.input.format.columns());
    let vector_work = comptime!(if blueprint.input.f16_input {
        F16_INPUT_WORK
    } else {
        1.0
    });
    f32::cast_from(stack.rows) * f32::cast_from(vectors) * vector_work
}
