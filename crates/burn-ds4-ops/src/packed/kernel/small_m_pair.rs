use cubecl::prelude::*;

use super::blueprint::SmallMBlueprint;
use super::groups::Groups;
use super::small_m_tiles::{SharedStorage, TileRange, multiply_tile_range};
use super::weights::{Stack, WeightReader};
use super::x_rows::prefetch_rows;

/// [`small_m_kernel`](super::small_m_kernel) of the same rows of `x` by two matrices of one format
/// and number of columns: the first cubes multiply the tiles of one, the rest those of the other.
///
/// - `x`: rows of vectors
/// - `words`, `scales`: a stack of one matrix; `other_words`, `other_scales`: another
/// - `output`, `other_output`: `[x_rows, rows]`, each with the rows of its matrix
/// - `first`: cubes that multiply by the first matrix; fewer than all
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn small_m_pair_kernel<X: Float, N: Size, S: Size>(
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
    #[comptime] blueprint: SmallMBlueprint,
    #[define(X)] _dtype: ElemType,
) {
    prefetch_rows(x, x_rows, stack.columns, x_vectors, blueprint);
    let no_ids = ComptimeOption::<&[u32]>::new_None();
    let no_scores = ComptimeOption::<&[f32]>::new_None();
    let groups = Groups::new::<u32>(&no_ids, x_rows, 1u32, blueprint.pairs, blueprint.pairing);
    let mut storage = SharedStorage::new(blueprint, blueprint);
    if CUBE_POS_X < first {
        let weights = WeightReader::<S>::for_small_m(words, scales, stack, blueprint);
        let range = TileRange {
            index: CUBE_POS_X,
            count: first,
            pairs_per_row: 1u32,
        };
        multiply_tile_range::<X, X, N, S>(
            x,
            &no_scores,
            weights,
            &groups,
            output,
            range,
            x_vectors,
            0.0f32,
            &mut storage,
            comptime!(None),
            blueprint,
        );
    } else {
        let weights =
            WeightReader::<S>::for_small_m(other_words, other_scales, other_stack, blueprint);
        let range = TileRange {
            index: CUBE_POS_X - first,
            count: CUBE_COUNT_X - first,
            pairs_per_row: 1u32,
        };
        multiply_tile_range::<X, X, N, S>(
            x,
            &no_scores,
            weights,
            &groups,
            other_output,
            range,
            x_vectors,
            0.0f32,
            &mut storage,
            comptime!(None),
            blueprint,
        );
    }
}
