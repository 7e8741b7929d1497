use cubecl::prelude::*;

use super::blueprint::SmallMBlueprint;
use super::decode::WeightFormat;
use super::groups::Groups;
use super::small_m_tiles::{SharedStorage, TileRange, multiply_tile_range};
use super::weights::{Stack, WeightReader};
use super::x_rows::prefetch_rows;

/// Multiplies a small number of rows of `x` by the rows of their matrices: `x · Wᵀ`, or with
/// `gated` half of the rows as a gate.
///
/// - `x`: rows of vectors; pair `p` has row `p / pairs_per_row`
/// - `ids`: the matrix of every pair; without ids all pairs have the first
/// - `scores`: factors of gated pairs
/// - `words`, `scales`: a stack of matrices
/// - `output`: `[pairs, rows]`; gated, `[pairs, terms, rows / 2]` in `bf16`, in the order of
///   [`permuted_column`](super::input_layout::permuted_column)
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn small_m_kernel<X: Float, I: Int, Y: Float, N: Size, S: Size>(
    x: &[Vector<X, N>],
    ids: ComptimeOption<&[I]>,
    scores: ComptimeOption<&[f32]>,
    words: &[Vector<u32, Const<4>>],
    scales: &[Vector<u32, S>],
    output: &mut [Y],
    pairs: u32,
    pairs_per_row: u32,
    matrices: u32,
    x_vectors: usize,
    stack: Stack,
    limit: f32,
    #[comptime] gated: Option<WeightFormat>,
    #[comptime] blueprint: SmallMBlueprint,
    #[define(X, I, Y)] _dtypes: [ElemType; 3],
) {
    // All cubes wait for `x`, so it is fetched while they group the pairs.
    prefetch_rows(
        x,
        pairs / pairs_per_row,
        stack.columns,
        x_vectors,
        blueprint,
    );
    let weights = WeightReader::<S>::for_small_m(words, scales, stack, blueprint);
    let groups = Groups::new::<I>(&ids, pairs, matrices, blueprint.pairs, blueprint.pairing);
    let range = TileRange {
        index: CUBE_POS_X,
        count: CUBE_COUNT_X,
        pairs_per_row,
    };
    let mut storage = SharedStorage::new(blueprint, blueprint);
    multiply_tile_range::<X, Y, N, S>(
        x,
        &scores,
        weights,
        &groups,
        output,
        range,
        x_vectors,
        limit,
        &mut storage,
        gated,
        blueprint,
    );
}
