//! Kernels around the large-M kernel: they sort pairs into groups, divide groups into problems, and
//! sum over the slots of a token.

use cubecl::prelude::*;

use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::{plane_running_sum, plane_value};

/// Experts whose pairs are counted in shared memory, at most.
pub(crate) const MAX_SORTED: usize = 4096;

/// How [`sort_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SortBlueprint {
    /// Experts, rounded up to a multiple of a plane's lanes.
    pub experts: u32,
    pub lanes: u32,
    pub planes: u32,
    pub target: Target,
}

/// Numbers of what [`sort_kernel`] sorts and makes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct SortSizes {
    pub pairs: u32,
    pub experts: u32,
    /// Pairs of a problem, at most.
    pub problem_pairs: u32,
    /// Capacity of the table of problems.
    pub max_problems: u32,
}

/// Sorts (token, slot) pairs into groups of one expert, and divides the groups into problems. One
/// cube.
///
/// - `ids`: the expert of every pair; a pair whose id is negative or no expert's is in no group
/// - `order`: the pairs, group by group
/// - `starts`: the position in `order` where each expert's group begins, and the end of the last
///   one
/// - `problems`: expert, first position and number of positions of each problem;
///   `problems[3 * sizes.max_problems]` is the number of problems
#[cube(launch_unchecked)]
pub(crate) fn sort_kernel<I: Int>(
    ids: &[I],
    order: &mut [u32],
    starts: &mut [u32],
    problems: &mut [u32],
    sizes: SortSizes,
    #[comptime] blueprint: SortBlueprint,
    #[define(I)] _dtype: ElemType,
) {
    let SortSizes {
        pairs,
        experts,
        problem_pairs,
        max_problems,
    } = sizes;
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
        let mut problem = 0u32;
        #[unroll(false)]
        for block in 0..comptime!(blueprint.experts / blueprint.lanes) {
            let expert = block * blueprint.lanes + UNIT_POS_X;
            let count = counts[expert as usize].load();
            let after = plane_running_sum(count, blueprint.lanes, blueprint.target);
            let own_problems = (count + problem_pairs - 1) / problem_pairs;
            let problems_after = plane_running_sum(own_problems, blueprint.lanes, blueprint.target);
            let first = start + after - count;
            counts[expert as usize].store(first);
            if expert < experts {
                starts[expert as usize] = first;
            }
            let mut own = 0u32;
            while own < own_problems {
                let entry = (problem + problems_after - own_problems + own) as usize * 3;
                let done = own * problem_pairs;
                problems[entry] = expert;
                problems[entry + 1] = first + done;
                problems[entry + 2] = min(count - done, problem_pairs);
                own += 1;
            }
            start += last_of(after, blueprint);
            problem += last_of(problems_after, blueprint);
        }
        if UNIT_POS_X == 0 {
            starts[experts as usize] = start;
            problems[max_problems as usize * 3] = problem;
        }
    }
    sync_cube();
    let mut pair = UNIT_POS;
    while pair < pairs {
        let id = ids[pair as usize];
        if id >= I::from_int(0) && id < I::cast_from(experts) {
            // The result of a pair does not depend on its position in the group.
            let position = counts[u32::cast_from(id) as usize].fetch_add(1u32);
            order[position as usize] = pair;
        }
        pair += CUBE_DIM;
    }
}

/// Sums the rows of a token's pairs in the order of slots, leaving out pairs without an expert, and
/// then the token's row of `addend`.
///
/// - `rows`: `[tokens * slots, columns]`, in vectors
/// - `ids`: `[tokens * slots]`
/// - `addend`, `output`: `[tokens, columns]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sum_slots_kernel<I: Int, Y: Float, N: Size>(
    rows: &[Vector<f32, N>],
    ids: &[I],
    addend: &ComptimeOption<Box<[Vector<f32, N>]>>,
    output: &mut [Vector<Y, N>],
    tokens: u32,
    slots: u32,
    experts: u32,
    vectors: u32,
    #[define(I, Y)] _dtypes: [ElemType; 2],
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
        #[comptime]
        if let ComptimeOption::Some(addend) = addend {
            total += addend[at];
        }
        output[at] = Vector::cast_from(total);
    }
}

/// Sums K-splits.
///
/// - `partials`: `[splits, count]`, in vectors
/// - `output`: `[count]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sum_splits_kernel<Y: Float, N: Size>(
    partials: &[Vector<f32, N>],
    output: &mut [Vector<Y, N>],
    splits: u32,
    count: usize,
    #[define(Y)] _dtype: ElemType,
) {
    let own = ABSOLUTE_POS;
    if own < count {
        let mut total = partials[own];
        for split in 1..splits {
            total += partials[split as usize * count + own];
        }
        output[own] = Vector::cast_from(total);
    }
}

/// The value of the last lane. A device whose planes have one lane may lack instructions for them.
#[cube]
fn last_of(x: u32, #[comptime] blueprint: SortBlueprint) -> u32 {
    let last = comptime!(blueprint.lanes - 1);
    if comptime!(last == 0) {
        x
    } else {
        plane_value(x, last, blueprint.target)
    }
}
