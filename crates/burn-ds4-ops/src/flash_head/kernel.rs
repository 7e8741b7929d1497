//! Kernels that work on the logits of candidates. They use no Burn types.

use cubecl::prelude::*;

use crate::argmax::{LOWEST_RANK, best_of_units, is_better, rank};
use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::arrives_last;

/// The id of padding.
const PADDING: i32 = -1;
/// The bits of `-inf`. Shader languages have no literal for it.
const NEG_INFINITY_BITS: u32 = 0xff80_0000;
/// The numbers of tokens and candidates.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct CandidateShape {
    pub tokens: u32,
    /// Clusters of a token, and rows of each cluster.
    pub probes: u32,
    pub capacity: u32,
    /// The number of special tokens.
    pub special: u32,
}

/// Special tokens: their rows of the weight, `[special]`, and their logits, `[tokens, special]`.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Special {
    rows: Box<[i32]>,
    logits: Box<[f32]>,
}

/// Candidates and their logits.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Candidates {
    /// Logits of the clusters' rows, `[tokens, probes, capacity]`.
    logits: Box<[f32]>,
    /// Clusters, `[tokens, probes]`.
    chosen: Box<[i32]>,
    /// The ids of all rows of the weight.
    ids: Box<[i32]>,
    special: ComptimeOption<Special>,
    shape: CandidateShape,
}

/// How [`argmax_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ArgmaxBlueprint {
    /// Units of a cube, and candidates that each unit reads at once.
    pub units: u32,
    pub per_unit: u32,
    /// Whether a token has several cubes, whose winners the last-arriving cube compares.
    pub split: bool,
    pub target: Target,
}

/// Finds the candidate of every token that wins by (logit descending, id ascending), -1 where no
/// logit is a number above `-inf`. A token has one cube or several.
///
/// - `partials`: `[2, tokens, cubes]`, ranks and ids of the cubes' winners
/// - `counters`, `turn`: see [`arrives_last`]
#[cube(launch_unchecked, address_type = "dynamic")]
// Compile-time conditions have an `if` of their own, so that the code they exclude is not compiled.
#[allow(clippy::collapsible_if)]
pub(crate) fn argmax_kernel(
    candidates: &Candidates,
    partials: &mut [u32],
    counters: &mut [Atomic<u32>],
    output: &mut [i32],
    turn: u32,
    #[comptime] blueprint: ArgmaxBlueprint,
) {
    let ArgmaxBlueprint {
        units,
        per_unit,
        split,
        target,
    } = comptime!(blueprint);
    let (ids, shape) = (&candidates.ids, &candidates.shape);
    let token = CUBE_POS_Y;
    let all_units = CUBE_COUNT_X * units;
    let own = CUBE_POS_X * units + UNIT_POS;
    let mut ranks = Shared::<[u32]>::new_slice(units as usize);
    let mut winners = Shared::<[u32]>::new_slice(units as usize);
    let mut best = LOWEST_RANK.runtime();
    let mut winner = u32::MAX.runtime();
    let count = shape.probes * shape.capacity;
    let mut first = own;
    while first < count {
        // All candidates are read before any is compared: each id is read through a row that must
        // be read first.
        let mut rows = Array::<u32>::new(per_unit as usize);
        let mut ranks = Array::<u32>::new(per_unit as usize);
        let mut row_ids = Array::<i32>::new(per_unit as usize);
        #[unroll]
        for i in 0..per_unit {
            // The last candidate may be read again, which changes nothing.
            let at = min(first + i * all_units, count - 1);
            rows[i as usize] = candidates.row_of(token, at);
            ranks[i as usize] = rank(candidates.logits[(token * count + at) as usize]);
        }
        #[unroll]
        for i in 0..comptime!(per_unit as usize) {
            row_ids[i] = ids[rows[i] as usize];
        }
        #[unroll]
        for i in 0..comptime!(per_unit as usize) {
            let (own, id) = (ranks[i], u32::cast_from(row_ids[i]));
            // What is called after `&&` becomes a branch.
            let wins = is_better(own, id, best, winner);
            // As an unsigned number, the id of padding is large.
            let wins = id < 0x8000_0000u32 && wins;
            best = select(wins, own, best);
            winner = select(wins, id, winner);
        }
        first += per_unit * all_units;
    }
    #[comptime]
    if let ComptimeOption::Some(special) = &candidates.special {
        let mut at = own;
        while at < shape.special {
            let id = u32::cast_from(ids[special.rows[at as usize] as usize]);
            let own = rank(special.logits[(token * shape.special + at) as usize]);
            let wins = is_better(own, id, best, winner);
            best = select(wins, own, best);
            winner = select(wins, id, winner);
            at += all_units;
        }
    }
    ranks[UNIT_POS as usize] = best;
    winners[UNIT_POS as usize] = winner;
    best_of_units(&mut ranks, &mut winners, units);
    if comptime!(!split) {
        if UNIT_POS == 0 {
            output[token as usize] = i32::cast_from(winners[0]);
        }
    } else {
        let cubes = shape.tokens * CUBE_COUNT_X;
        if UNIT_POS == 0 {
            let at = token * CUBE_COUNT_X + CUBE_POS_X;
            partials[at as usize] = ranks[0];
            partials[(cubes + at) as usize] = winners[0];
        }
        if arrives_last(counters, turn, cubes, target) {
            let mut token = UNIT_POS;
            while token < shape.tokens {
                let mut best = LOWEST_RANK.runtime();
                let mut winner = u32::MAX.runtime();
                for cube in 0..CUBE_COUNT_X {
                    let at = token * CUBE_COUNT_X + cube;
                    let (own, id) = (partials[at as usize], partials[(cubes + at) as usize]);
                    let wins = is_better(own, id, best, winner);
                    best = select(wins, own, best);
                    winner = select(wins, id, winner);
                }
                output[token as usize] = i32::cast_from(winner);
                token += units;
            }
        }
    }
}

#[cube]
impl Candidates {
    /// The row of the weight of a token's candidate, counted within its clusters.
    fn row_of(&self, token: u32, candidate: u32) -> u32 {
        let shape = &self.shape;
        let probe = token * shape.probes + candidate / shape.capacity;
        u32::cast_from(self.chosen[probe as usize]) * shape.capacity + candidate % shape.capacity
    }

    /// The id and the bits of the logit of a token's candidate. Padding has id -1 and logit `-inf`,
    /// and so does a special token that is in a chosen cluster.
    fn candidate(&self, token: u32, candidate: u32) -> (i32, u32) {
        let shape = &self.shape;
        let count = shape.probes * shape.capacity;
        let mut id = PADDING.runtime();
        let mut logit = 0.0f32;
        if candidate < count {
            id = self.ids[self.row_of(token, candidate) as usize];
            logit = self.logits[(token * count + candidate) as usize];
        } else {
            #[comptime]
            if let ComptimeOption::Some(special) = &self.special {
                let index = candidate - count;
                let row = special.rows[index as usize];
                id = self.ids[row as usize];
                logit = special.logits[(token * shape.special + index) as usize];
                let cluster = row / i32::cast_from(shape.capacity);
                for probe in 0..shape.probes {
                    if self.chosen[(token * shape.probes + probe) as usize] == cluster {
                        id = PADDING;
                    }
                }
            }
        }
        let bits = select(id == PADDING, NEG_INFINITY_BITS, u32::reinterpret(logit));
        (id, bits)
    }
}

/// Writes ids and logits of all candidates, with one unit for each.
///
/// `all_ids` and `all_logits`, which holds bits, are `[tokens, probes * capacity + special]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn candidates_kernel(
    candidates: &Candidates,
    all_ids: &mut [i32],
    all_logits: &mut [u32],
) {
    let shape = &candidates.shape;
    let columns = shape.probes * shape.capacity + shape.special;
    let at = ABSOLUTE_POS;
    if at < (shape.tokens * columns) as usize {
        let found = candidates.candidate(at as u32 / columns, at as u32 % columns);
        all_ids[at] = found.0;
        all_logits[at] = found.1;
    }
}

/// Writes the logit of every candidate to the column of its id, with one unit for each. The other
/// columns stay as they are.
///
/// `all_logits`, which holds bits, is `[tokens, vocabulary]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn scatter_kernel(candidates: &Candidates, all_logits: &mut [u32], vocabulary: u32) {
    let shape = &candidates.shape;
    let columns = shape.probes * shape.capacity + shape.special;
    let at = ABSOLUTE_POS;
    if at < (shape.tokens * columns) as usize {
        let token = at as u32 / columns;
        let found = candidates.candidate(token, at as u32 % columns);
        if found.0 >= 0 {
            all_logits[(token * vocabulary + u32::cast_from(found.0)) as usize] = found.1;
        }
    }
}
