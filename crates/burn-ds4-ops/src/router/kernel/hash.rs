use cubecl::prelude::*;

use super::activation::{EPSILON, element, sqrt_softplus};
use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::{group_sum, modulo, reciprocal};

/// How [`hash_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HashBlueprint {
    /// Entries in each row of the table.
    pub k: u32,
    /// Lanes for each token: the smallest power of two that holds `k`.
    pub lanes: u32,
    /// If not 0, a token has a cube of one plane, and each lane loads this many vectors of its
    /// logits into shared memory while the ids are looked up.
    pub prefetch: u32,
    /// Lanes of a plane.
    pub plane: u32,
    /// Instructions that the kernel may use.
    pub target: Target,
}

/// Sizes, strides and constants of a lookup.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct HashSizes {
    pub tokens: u32,
    /// Rows of the table.
    pub vocabulary: u32,
    pub experts: u32,
    /// Elements from one row of the table to the next.
    pub table_stride: usize,
    /// Vectors from one row of the logits to the next.
    pub row_vectors: usize,
    /// The sum of the weights.
    pub scale: f32,
}

/// Looks the experts of each token up and computes their weights.
///
/// - `logits`: none for equal weights
/// - `weights`, `ids`: `[tokens, k]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn hash_kernel<T: Int, I: Int, F: Float, N: Size>(
    token_ids: &[T],
    table: &[I],
    logits: ComptimeOption<&[Vector<F, N>]>,
    weights: &mut [f32],
    ids: &mut [i32],
    sizes: HashSizes,
    #[comptime] blueprint: HashBlueprint,
    #[define(T, I, F)] _dtypes: [ElemType; 3],
) {
    let lane = modulo(UNIT_POS_X, blueprint.lanes);
    let per_plane = comptime!(if blueprint.prefetch > 0 {
        1
    } else {
        blueprint.plane / blueprint.lanes
    });
    let group = UNIT_POS_X / blueprint.lanes;
    let token = (CUBE_POS as u32 * CUBE_DIM_Y + UNIT_POS_Y) * per_plane + modulo(group, per_plane);
    let writes = token < sizes.tokens && group < per_plane && lane < blueprint.k;
    // Idle lanes repeat the work of others, so that all lanes take part in the sum.
    let token = select(token < sizes.tokens, token, sizes.tokens - 1);
    let slot = select(lane < blueprint.k, lane, 0u32);

    let raw = token_ids[token as usize];
    // A token's logits do not depend on its expert ids, so they are loaded while the ids are looked
    // up.
    let row = token as usize * sizes.row_vectors;
    let vectors = sizes.experts / N::value() as u32;
    let mut prefetched = Array::<Vector<f32, N>>::new(comptime!(blueprint.prefetch as usize));
    #[comptime]
    if let ComptimeOption::Some(logits) = logits {
        #[unroll]
        for i in 0..blueprint.prefetch {
            let vector = i * CUBE_DIM_X + UNIT_POS_X;
            let vector = select(vector < vectors, vector, 0u32);
            prefetched[i as usize] = Vector::cast_from(logits[row + vector as usize]);
        }
    }

    let padded = raw < T::from_int(0);
    let last = T::cast_from(sizes.vocabulary - 1);
    let known = select(padded, T::from_int(0), select(raw > last, last, raw));
    let entry = table[usize::cast_from(known) * sizes.table_stride + slot as usize];
    let last = I::cast_from(sizes.experts - 1);
    let id = select(
        entry < I::from_int(0),
        I::from_int(0),
        select(entry > last, last, entry),
    );
    let id = u32::cast_from(id);
    let vector = (id / N::value() as u32) as usize;

    #[comptime]
    let weight = match logits {
        ComptimeOption::Some(logits) => {
            let value = if comptime!(blueprint.prefetch > 0) {
                let size = comptime!((blueprint.prefetch * blueprint.plane) as usize);
                let mut shared_logits = Shared::<[Vector<f32, N>]>::new_slice(size);
                #[unroll]
                for i in 0..blueprint.prefetch {
                    shared_logits[(i * CUBE_DIM_X + UNIT_POS_X) as usize] = prefetched[i as usize];
                }
                sync_cube();
                element(shared_logits[vector], id)
            } else {
                element(Vector::<f32, N>::cast_from(logits[row + vector]), id)
            };
            let score = sqrt_softplus(value, blueprint.target);
            let counted = select(lane < blueprint.k, score, 0.0f32);
            let sum = group_sum(counted, blueprint.lanes, blueprint.target);
            score * (sizes.scale * reciprocal(sum + EPSILON, blueprint.target))
        }
        ComptimeOption::None => sizes.scale / f32::cast_from(blueprint.k),
    };
    if writes {
        let at = token as usize * blueprint.k as usize + lane as usize;
        weights[at] = select(padded, 0.0f32, weight);
        ids[at] = select(padded, -1i32, id as i32);
    }
}
