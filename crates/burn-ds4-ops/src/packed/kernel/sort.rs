//! Kernels around the many rows' ones: pairs into groups, groups into work, and the sum over a token's slots.

use cubecl::prelude::*;

use crate::intrinsics::{Target, plane_running_sum, plane_value};

/// Most experts whose pairs are counted in shared memory.
pub(crate) const MAX_SORTED: usize = 4096;

/// How [`sort_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SortBlueprint {
    /// Experts, a multiple of a plane's lanes.
    pub experts: u32,
    /// Pairs of one piece of work, at most.
    pub most: u32,
    pub lanes: u32,
    pub planes: u32,
    pub target: Target,
}

/// Brings (token, slot) pairs into groups of one expert, and cuts the groups into pieces of work. One cube.
///
/// - `ids`: an expert for every pair; a pair with none, or one there is not, is in no group
/// - `order`: the pairs of groups, one after the other
/// - `starts`: where each expert's group begins, and where the last one ends
/// - `work`: expert, first place and number of places of each piece; `work[3 * pieces]` is their number. There is room for `pieces`
#[cube(launch_unchecked)]
pub(crate) fn sort_kernel<I: Int>(
    ids: &[I],
    order: &mut [u32],
    starts: &mut [u32],
    work: &mut [u32],
    pairs: u32,
    experts: u32,
    pieces: u32,
    #[comptime] blueprint: SortBlueprint,
    #[define(I)] _dtype: ElemType,
) {
    let counts = Shared::<[Atomic<u32>]>::new_slice(comptime!(blueprint.experts as usize));
    let mut expert = UNIT_POS;
    while expert < blueprint.experts {
        counts[expert as usize].store(0u32);
        expert += CUBE_DIM;
    }
    sync_cube();
    let mut pair = UNIT_POS;
    while pair < pairs {
        let id = ids[pair as usize];
        if id >= I::from_int(0) && id < I::cast_from(experts) {
            counts[u32::cast_from(id) as usize].fetch_add(1u32);
        }
        pair += CUBE_DIM;
    }
    sync_cube();
    if UNIT_POS_Y == 0 {
        let mut start = 0u32;
        let mut piece = 0u32;
        #[unroll(false)]
        for step in 0..comptime!(blueprint.experts / blueprint.lanes) {
            let expert = step * blueprint.lanes + UNIT_POS_X;
            let count = counts[expert as usize].load();
            let after = plane_running_sum(count, blueprint.lanes, blueprint.target);
            let own_pieces = (count + comptime!(blueprint.most - 1)) / blueprint.most;
            let pieces_after = plane_running_sum(own_pieces, blueprint.lanes, blueprint.target);
            let first = start + after - count;
            counts[expert as usize].store(first);
            if expert < experts {
                starts[expert as usize] = first;
            }
            let mut own = 0u32;
            while own < own_pieces {
                let entry = (piece + pieces_after - own_pieces + own) as usize * 3;
                let done = own * blueprint.most;
                work[entry] = expert;
                work[entry + 1] = first + done;
                work[entry + 2] = min(count - done, blueprint.most);
                own += 1;
            }
            let last = comptime!(blueprint.lanes - 1);
            start += plane_value(after, last, blueprint.target);
            piece += plane_value(pieces_after, last, blueprint.target);
        }
        if UNIT_POS_X == 0 {
            starts[experts as usize] = start;
            work[pieces as usize * 3] = piece;
        }
    }
    sync_cube();
    let mut pair = UNIT_POS;
    while pair < pairs {
        let id = ids[pair as usize];
        if id >= I::from_int(0) && id < I::cast_from(experts) {
            // Whatever place a pair has in its group, its result is the same.
            let place = counts[u32::cast_from(id) as usize].fetch_add(1u32);
            order[place as usize] = pair;
        }
        pair += CUBE_DIM;
    }
}

/// Adds up the rows of a token's pairs, slot by slot, without those that have no expert.
///
/// - `rows`: `[tokens * slots, columns]`, in vectors
/// - `ids`: `[tokens * slots]`
/// - `output`: `[tokens, columns]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sum_slots_kernel<I: Int, N: Size>(
    rows: &[Vector<f32, N>],
    ids: &[I],
    output: &mut [Vector<f32, N>],
    tokens: u32,
    slots: u32,
    experts: u32,
    vectors: u32,
    #[define(I)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    let token = at / vectors as usize;
    if token < tokens as usize {
        let vector = at % vectors as usize;
        let mut total = Vector::<f32, N>::new(0.0f32);
        for slot in 0..slots {
            let pair = token * slots as usize + slot as usize;
            let id = ids[pair];
            if id >= I::from_int(0) && id < I::cast_from(experts) {
                total += rows[pair * vectors as usize + vector];
            }
        }
        output[at] = total;
    }
}
