use cubecl::prelude::*;

use super::blueprint::FewBlueprint;
use super::decode::Format;
use super::few_rows::prefetch_rows;
use super::few_share::{Room, Share, multiply_share};
use super::groups::Groups;
use super::weights::{Stack, Weights};

/// Multiplies a few rows of `x` by the rows of their matrices: `x · Wᵀ`, or with `gated` half of the rows as a gate.
///
/// - `x`: rows of vectors; pair `p` has row `p / share`
/// - `ids`: the matrix of every pair, or all have the first; `scores`: by which a gated pair is multiplied
/// - `words`, `scales`: a stack of matrices
/// - `output`: `[pairs, rows]`; gated, `[pairs, parts, rows / 2]` in `bf16`, see [`place`](super::columns::place)
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn few_kernel<X: Float, I: Int, Y: Float, N: Size, S: Size>(
    x: &[Vector<X, N>],
    ids: ComptimeOption<&[I]>,
    scores: ComptimeOption<&[f32]>,
    words: &[Vector<u32, Const<4>>],
    scales: &[Vector<u32, S>],
    output: &mut [Y],
    pairs: u32,
    share: u32,
    matrices: u32,
    x_vectors: usize,
    stack: Stack,
    limit: f32,
    #[comptime] gated: Option<Format>,
    #[comptime] blueprint: FewBlueprint,
    #[define(X, I, Y)] _dtypes: [ElemType; 3],
) {
    // `x` will be waited for: it may come while the pairs are grouped.
    prefetch_rows(x, pairs / share, stack.columns, x_vectors, blueprint);
    let weights = Weights::<S>::of_few(words, scales, stack, blueprint);
    let groups = Groups::new::<I>(&ids, pairs, matrices, blueprint.pairs, blueprint.pairing);
    let share = Share {
        index: CUBE_POS_X,
        count: CUBE_COUNT_X,
        pairs: share,
    };
    let mut room = Room::new(blueprint, blueprint);
    multiply_share::<X, Y, N, S>(
        x, &scores, weights, &groups, output, share, x_vectors, limit, &mut room, gated, blueprint,
    );
}
