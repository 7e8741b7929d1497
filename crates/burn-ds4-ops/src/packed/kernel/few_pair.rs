use cubecl::prelude::*;

use super::blueprint::FewBlueprint;
use super::few_rows::prefetch_rows;
use super::few_share::{Room, Share, multiply_share};
use super::groups::Groups;
use super::weights::{Stack, Weights};

/// [`few_kernel`](super::few_kernel) of the same rows of `x` by two matrices of one format and as many columns: the first cubes have the
/// tiles of the one, the others those of the other.
///
/// - `x`: rows of vectors
/// - `words`, `scales`: a stack of one matrix; `other_words`, `other_scales`: another
/// - `output`, `other_output`: `[x_rows, rows]`, each of its own rows
/// - `first`: cubes that have the first matrix; not all
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn few_pair_kernel<X: Float, N: Size, S: Size>(
    x: &[Vector<X, N>],
    words: &[Vector<u32, Const<4>>],
    scales: &[Vector<u32, S>],
    other_words: &[Vector<u32, Const<4>>],
    other_scales: &[Vector<u32, S>],
    output: &mut [X],
    other_output: &mut [X],
    x_rows: u32,
    first: u32,
    x_vectors: usize,
    stack: Stack,
    other_stack: Stack,
    #[comptime] blueprint: FewBlueprint,
    #[define(X)] _dtype: ElemType,
) {
    prefetch_rows(x, x_rows, stack.columns, x_vectors, blueprint);
    let no_ids = ComptimeOption::<&[u32]>::new_None();
    let no_scores = ComptimeOption::<&[f32]>::new_None();
    let groups = Groups::new::<u32>(&no_ids, x_rows, 1u32, blueprint.pairs, blueprint.pairing);
    let mut room = Room::new(blueprint, blueprint);
    if CUBE_POS_X < first {
        let weights = Weights::<S>::of_few(words, scales, stack, blueprint);
        let share = Share {
            index: CUBE_POS_X,
            count: first,
            pairs: 1u32,
        };
        multiply_share::<X, X, N, S>(
            x,
            &no_scores,
            weights,
            &groups,
            output,
            share,
            x_vectors,
            0.0f32,
            &mut room,
            comptime!(None),
            blueprint,
        );
    } else {
        let weights = Weights::<S>::of_few(other_words, other_scales, other_stack, blueprint);
        let share = Share {
            index: CUBE_POS_X - first,
            count: CUBE_COUNT_X - first,
            pairs: 1u32,
        };
        multiply_share::<X, X, N, S>(
            x,
            &no_scores,
            weights,
            &groups,
            other_output,
            share,
            x_vectors,
            0.0f32,
            &mut room,
            comptime!(None),
            blueprint,
        );
    }
}
