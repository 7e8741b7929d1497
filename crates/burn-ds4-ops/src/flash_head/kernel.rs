//! What becomes of the logits of candidates. No Burn type enters.

use cubecl::prelude::*;

use crate::intrinsics::{Target, arrives_last, has_nan_bits};

/// Of padding.
const NONE: i32 = -1;
/// The bits of `-inf`, which shader languages have no literal for.
const NONE_BITS: u32 = 0xff80_0000;

/// How many candidates there are.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Sizes {
    pub tokens: u32,
    /// Clusters of a token, and rows of each.
    pub probes: u32,
    pub capacity: u32,
    /// Special tokens.
    pub special: u32,
}

/// Special tokens: their rows of the weight, `[special]`, and their logits, `[tokens, special]`.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Special {
    rows: Sequence<Box<[i32]>>,
    logits: Sequence<Box<[f32]>>,
}

/// An integer in the order of the floats: zeros of either sign are equal, and NaN comes before all.
#[cube]
fn rank(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let magnitude = bits & 0x7fff_ffffu32;
    let rank = select(bits == magnitude, bits | 0x8000_0000u32, !bits);
    let rank = select(magnitude == 0u32, 0x8000_0000u32, rank);
    select(has_nan_bits(x), 0u32, rank)
}

/// Index `candidate` of token `token`'s rows of the weight, of its clusters' only.
#[cube]
fn row_of(chosen: &[i32], token: u32, candidate: u32, sizes: &Sizes) -> u32 {
    let probe = token * sizes.probes + candidate / sizes.capacity;
    u32::cast_from(chosen[probe as usize]) * sizes.capacity + candidate % sizes.capacity
}

/// How [`argmax_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ArgmaxBlueprint {
    /// Units of a cube, and candidates that each of them reads at once.
    pub units: u32,
    pub each: u32,
    /// Whether a token has several cubes, whose winners the last cube of all compares.
    pub split: bool,
    pub target: Target,
}

/// The candidate of every token that wins by (logit descending, id ascending), by one cube or some cubes for each.
///
/// - `logits`: of the clusters' rows, `[tokens, probes, capacity]`
/// - `chosen`: clusters, `[tokens, probes]`
/// - `ids`: of all rows of the weight
/// - `partial`: `[2, tokens, cubes]`, ranks and ids of the cubes' winners
/// - `counter`: 0 before and after
#[cube(launch_unchecked, address_type = "dynamic")]
// What is known at compile time is asked by itself, so that the rest is left out.
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
pub(crate) fn argmax_kernel(
    logits: &[f32],
    chosen: &[i32],
    ids: &[i32],
    special: Special,
    partial: &mut [u32],
    counter: &mut [Atomic<u32>],
    output: &mut [i32],
    sizes: Sizes,
    #[comptime] blueprint: ArgmaxBlueprint,
) {
    let ArgmaxBlueprint {
        units,
        each,
        split,
        target,
    } = comptime!(blueprint);
    let token = CUBE_POS_Y;
    let all_units = CUBE_COUNT_X * units;
    let own = CUBE_POS_X * units + UNIT_POS;
    let mut ranks = Shared::<[u32]>::new_slice(units as usize);
    let mut winners = Shared::<[u32]>::new_slice(units as usize);
    let mut best = 0u32;
    let mut winner = u32::MAX.runtime();
    let count = sizes.probes * sizes.capacity;
    let mut first = own;
    while first < count {
        // All of them are read before any is compared: a read waits for the one that tells where.
        let mut rows = Array::<u32>::new(each as usize);
        let mut ranks = Array::<u32>::new(each as usize);
        let mut names = Array::<i32>::new(each as usize);
        #[unroll]
        for i in 0..each {
            // The last one may come again, which changes nothing.
            let at = min(first + i * all_units, count - 1);
            rows[i as usize] = row_of(chosen, token, at, &sizes);
            ranks[i as usize] = rank(logits[(token * count + at) as usize]);
        }
        #[unroll]
        for i in 0..comptime!(each as usize) {
            names[i] = ids[rows[i] as usize];
        }
        #[unroll]
        for i in 0..comptime!(each as usize) {
            // Padding is a large number.
            let (own, id) = (ranks[i], u32::cast_from(names[i]));
            let wins = id < 0x8000_0000u32 && (own > best || (own == best && id < winner));
            best = select(wins, own, best);
            winner = select(wins, id, winner);
        }
        first += each * all_units;
    }
    if comptime!(special.rows.len() == 1) {
        let rows = special.rows.index(0usize);
        let logits = special.logits.index(0usize);
        let mut at = own;
        while at < sizes.special {
            let id = u32::cast_from(ids[rows[at as usize] as usize]);
            let own = rank(logits[(token * sizes.special + at) as usize]);
            let wins = own > best || (own == best && id < winner);
            best = select(wins, own, best);
            winner = select(wins, id, winner);
            at += all_units;
        }
    }
    ranks[UNIT_POS as usize] = best;
    winners[UNIT_POS as usize] = winner;
    #[unroll]
    for step in 0..comptime!(units.ilog2()) {
        let distance = comptime!(units >> (step + 1));
        sync_cube();
        if UNIT_POS < distance {
            let (own, other) = (UNIT_POS as usize, (UNIT_POS + distance) as usize);
            let (best, its) = (ranks[own], ranks[other]);
            let (winner, id) = (winners[own], winners[other]);
            if its > best || (its == best && id < winner) {
                ranks[own] = its;
                winners[own] = id;
            }
        }
    }
    if comptime!(!split) {
        if UNIT_POS == 0 {
            output[token as usize] = i32::cast_from(winners[0]);
        }
    } else {
        let cubes = sizes.tokens * CUBE_COUNT_X;
        if UNIT_POS == 0 {
            let at = token * CUBE_COUNT_X + CUBE_POS_X;
            partial[at as usize] = ranks[0];
            partial[(cubes + at) as usize] = winners[0];
        }
        if arrives_last(counter, cubes, target) {
            let mut token = UNIT_POS;
            while token < sizes.tokens {
                let mut best = 0u32;
                let mut winner = u32::MAX.runtime();
                for cube in 0..CUBE_COUNT_X {
                    let at = token * CUBE_COUNT_X + cube;
                    let (own, id) = (partial[at as usize], partial[(cubes + at) as usize]);
                    let wins = own > best || (own == best && id < winner);
                    best = select(wins, own, best);
                    winner = select(wins, id, winner);
                }
                output[token as usize] = i32::cast_from(winner);
                token += units;
            }
            if UNIT_POS == 0 {
                counter[0].store(0u32);
            }
        }
    }
}

/// Ids and logits of all candidates, a unit for each: padding has -1 and `-inf`, and so has a special token that is in a chosen
/// cluster.
///
/// Arguments are those of [`argmax_kernel`]; `all_ids` and `all_logits`, which are bits, are `[tokens, probes * capacity + special]`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn candidates_kernel(
    logits: &[f32],
    chosen: &[i32],
    ids: &[i32],
    special: Special,
    all_ids: &mut [i32],
    all_logits: &mut [u32],
    sizes: Sizes,
) {
    let count = sizes.probes * sizes.capacity;
    let columns = count + sizes.special;
    let at = ABSOLUTE_POS;
    if at < (sizes.tokens * columns) as usize {
        let token = at as u32 / columns;
        let candidate = at as u32 % columns;
        let mut id = NONE.runtime();
        let mut logit = 0.0f32;
        if candidate < count {
            id = ids[row_of(chosen, token, candidate, &sizes) as usize];
            logit = logits[(token * count + candidate) as usize];
        } else if comptime!(special.rows.len() == 1) {
            let index = candidate - count;
            let row = special.rows.index(0usize)[index as usize];
            id = ids[row as usize];
            logit = special.logits.index(0usize)[(token * sizes.special + index) as usize];
            let cluster = row / i32::cast_from(sizes.capacity);
            for probe in 0..sizes.probes {
                if chosen[(token * sizes.probes + probe) as usize] == cluster {
                    id = NONE;
                }
            }
        }
        all_ids[at] = id;
        all_logits[at] = select(id == NONE, NONE_BITS, u32::reinterpret(logit));
    }
}
