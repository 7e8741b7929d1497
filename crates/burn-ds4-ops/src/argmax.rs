//! The best of values that kernels compare: the highest, of equal ones that with the lowest index.

use cubecl::prelude::*;

use crate::intrinsics::has_nan_bits;

/// The [`rank`] of the lowest finite number: what a winner has at least.
pub(crate) const LOWEST_RANK: u32 = 0x0080_0000;

/// An integer in the same order as the floats: zeros of either sign are equal, and NaN comes before
/// everything else.
#[cube]
pub(crate) fn rank(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let magnitude = bits & 0x7fff_ffffu32;
    let rank = select(bits == magnitude, bits | 0x8000_0000u32, !bits);
    let rank = select(magnitude == 0u32, 0x8000_0000u32, rank);
    select(has_nan_bits(x), 0u32, rank)
}

/// Whether a value comes before another one.
#[cube]
pub(crate) fn is_better(rank: u32, index: u32, other_rank: u32, other_index: u32) -> bool {
    rank > other_rank || (rank == other_rank && index < other_index)
}

/// Moves the best of the values to the first place. Each of the cube's `units`, a power of two, has
/// written one, and must call this. The first unit sees the result without waiting.
#[cube]
pub(crate) fn best_of_units(
    ranks: &mut Shared<[u32]>,
    indices: &mut Shared<[u32]>,
    #[comptime] units: u32,
) {
    #[unroll]
    for step in 0..comptime!(units.ilog2()) {
        let distance = comptime!(units >> (step + 1));
        sync_cube();
        if UNIT_POS < distance {
            let (own, other) = (UNIT_POS as usize, (UNIT_POS + distance) as usize);
            let (best, its) = (ranks[own], ranks[other]);
            let (winner, index) = (indices[own], indices[other]);
            if is_better(its, index, best, winner) {
                ranks[own] = its;
                indices[own] = index;
            }
        }
    }
}
