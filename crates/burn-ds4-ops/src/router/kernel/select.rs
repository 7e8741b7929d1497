use cubecl::prelude::*;

use super::activation::{EPSILON, biased_score, element, sqrt_softplus};
use crate::intrinsics::{
    Target, group_ballot, group_max, group_sum, not_nan, reciprocal, sync_group,
};

/// Logits below make no difference to each other, but all rank above NaN, which takes the place of the lowest f32.
const LOWEST_LOGIT: f32 = -1e38;

/// How [`select_kernel`] is compiled.
///
/// A group of `lanes` neighbouring lanes shares a row. Each lane goes through its part of the row once, leaves the scores in shared
/// memory and keeps the best `depth` of them, without their ids; then `k` times the best head of the group's lists wins. Equal
/// scores make no difference up to here. Last, the lane of each rank looks its score up to find the id: in the winner's part, or,
/// where several elements have that score, in the whole row, the lower id first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SelectBlueprint {
    /// Selects by `sqrt(softplus(x)) + bias` and returns weights, or selects by value and returns values.
    pub scored: bool,
    /// Elements to select.
    pub k: u32,
    /// Lanes to a row: a power of two that divides the plane.
    pub lanes: u32,
    /// Vectors of a row to a lane, rounded up to whole chunks.
    pub vectors: u32,
    /// Vectors that a lane reads at once.
    pub chunk: u32,
    /// Whether all lanes have so many.
    pub even: bool,
    /// Elements in a lane's list.
    pub depth: u32,
    /// Partial sums of which an element is the sum.
    pub parts: u32,
    /// Planes of a cube.
    pub planes: u32,
    /// Lanes of a plane.
    pub plane: u32,
    /// What the instructions are that the kernel may use.
    pub target: Target,
}

impl SelectBlueprint {
    /// Results that a lane writes, rounded up.
    fn slots(&self) -> u32 {
        self.k.div_ceil(self.lanes)
    }

    /// Vectors of a row in shared memory.
    pub fn row_vectors(&self) -> u32 {
        self.vectors * self.lanes
    }

    /// Rows that a plane works on at once.
    pub fn plane_rows(&self) -> u32 {
        self.plane / self.lanes
    }

    /// Vectors in shared memory.
    pub fn staged_vectors(&self) -> u32 {
        self.row_vectors() * self.plane_rows() * self.planes
    }
}

/// A row, as a lane sees it.
#[derive(CubeType)]
pub(super) struct Row<'a, 'b, F: Float, N: Size> {
    rows: &'a [Vector<F, N>],
    bias: ComptimeOption<&'b [Vector<f32, N>]>,
    /// First vector of the row.
    first: usize,
    /// Vectors from one partial sum to the next.
    part_vectors: usize,
    /// Vectors of the row.
    vectors: u32,
    lane: u32,
    /// -inf: ranks below every element.
    none: f32,
    #[cube(comptime)]
    blueprint: SelectBlueprint,
}

/// A lane's best scores in descending order, and how far they have been used up.
#[derive(CubeType)]
struct Best {
    scores: Array<f32>,
    /// The last that won, and how many equal ones have.
    last: f32,
    won: u32,
    /// Nothing comes after the list.
    complete: bool,
}

/// What a lane knows of the ranks that it looks up.
#[derive(CubeType)]
struct Ranks {
    scores: Array<f32>,
    /// Lane whose part the score is from.
    owners: Array<u32>,
    /// Ranks before with the same score.
    equals: Array<u32>,
    ids: Array<u32>,
}

#[cube]
impl Best {
    /// Puts a score into its place, and the last one out.
    fn insert(&mut self, score: f32, #[comptime] depth: u32) {
        let mut rest = score;
        #[unroll]
        for d in 0..depth {
            let here = self.scores[d as usize];
            self.scores[d as usize] = max(here, rest);
            rest = min(here, rest);
        }
    }

    fn clear(&mut self, none: f32, #[comptime] depth: u32) {
        #[unroll]
        for d in 0..depth {
            self.scores[d as usize] = none;
        }
    }

    /// Takes the first out.
    fn pop(&mut self, none: f32, #[comptime] depth: u32) {
        let score = self.scores[0];
        self.won = select(score == self.last, self.won + 1, 1u32);
        self.last = score;
        #[unroll]
        for d in 1..depth {
            self.scores[comptime!(d as usize - 1)] = self.scores[d as usize];
        }
        self.scores[comptime!(depth as usize - 1)] = none;
    }
}

#[cube]
impl<'a, 'b, F: Float, N: Size> Row<'a, 'b, F, N> {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        rows: &'a [Vector<F, N>],
        bias: ComptimeOption<&'b [Vector<f32, N>]>,
        first: usize,
        part_vectors: usize,
        vectors: u32,
        lane: u32,
        none: f32,
        #[comptime] blueprint: SelectBlueprint,
    ) -> Self {
        Row::<'a, 'b, F, N> {
            rows,
            bias,
            first,
            part_vectors,
            vectors,
            lane,
            none,
            blueprint,
        }
    }

    fn read(&self, vector: u32) -> Vector<f32, N> {
        let first = self.first + vector as usize;
        let mut values = Vector::<f32, N>::cast_from(self.rows[first]);
        #[unroll]
        for part in 1..comptime!(self.blueprint.parts as usize) {
            values += Vector::<f32, N>::cast_from(self.rows[first + part * self.part_vectors]);
        }
        values
    }

    /// Goes through the lane's part.
    fn collect(&self, best: &mut Best, stage: &mut Shared<[Vector<f32, N>]>, at: u32) {
        let blueprint = comptime!(self.blueprint);
        best.clear(self.none, blueprint.depth);
        let mut values = Array::<Vector<f32, N>>::new(comptime!(blueprint.chunk as usize));
        let mut biases = Array::<Vector<f32, N>>::new(comptime!(blueprint.chunk as usize));
        // A number that the compiler does not know, lest it unrolls what the blueprint cut into chunks.
        let chunk_vectors = comptime!(blueprint.chunk * blueprint.lanes);
        let chunks = self.vectors.div_ceil(chunk_vectors);
        for chunk in 0..chunks {
            let first = chunk * chunk_vectors + self.lane;
            // All that has to be waited for at once.
            #[unroll]
            for i in 0..blueprint.chunk {
                let vector = first + i * blueprint.lanes;
                let vector = if comptime!(blueprint.even) {
                    vector
                } else {
                    select(vector < self.vectors, vector, 0u32)
                };
                values[i as usize] = self.read(vector);
                #[comptime]
                if let ComptimeOption::Some(bias) = self.bias {
                    biases[i as usize] = bias[vector as usize];
                }
            }
            #[unroll]
            for i in 0..blueprint.chunk {
                let vector = first + i * blueprint.lanes;
                let scores = self.scores(values[i as usize], biases[i as usize], vector, best);
                stage[(at + vector) as usize] = scores;
            }
        }
    }

    /// The scores of a vector, which take part in the selection.
    fn scores(
        &self,
        values: Vector<f32, N>,
        bias: Vector<f32, N>,
        vector: u32,
        best: &mut Best,
    ) -> Vector<f32, N> {
        let blueprint = comptime!(self.blueprint);
        let biased = self.bias.is_some();
        let mut scores = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for j in 0..N::value() {
            let value = values.extract(j);
            let score = if comptime!(biased) {
                biased_score(value, bias.extract(j), blueprint.target)
            } else {
                // Without a bias the activations are in the order of the logits. Zeros of either sign are equal.
                let value = select(value == 0.0f32, 0.0f32, value);
                if comptime!(blueprint.scored) {
                    // The activation of -inf is a number, which that of NaN is not.
                    select(value < LOWEST_LOGIT, LOWEST_LOGIT, value)
                } else {
                    value
                }
            };
            let mut score = not_nan(score, f32::MIN, blueprint.target);
            if comptime!(!blueprint.even) {
                score = select(vector < self.vectors, score, self.none);
            }
            best.insert(score, blueprint.depth);
            scores.insert(j, score);
        }
        scores
    }

    /// Goes through the lane's part again for what comes after its last winner.
    fn collect_again(&self, best: &mut Best, stage: &Shared<[Vector<f32, N>]>, at: u32) {
        let blueprint = comptime!(self.blueprint);
        best.clear(self.none, blueprint.depth);
        let mut equal = 0u32;
        for i in 0..blueprint.vectors {
            let scores = stage[(at + i * blueprint.lanes + self.lane) as usize];
            #[unroll]
            for j in 0..N::value() {
                let score = scores.extract(j);
                let is_last = score == best.last && best.won > 0;
                let after = best.won == 0 || score < best.last || (is_last && equal >= best.won);
                equal += select(is_last, 1u32, 0u32);
                best.insert(select(after, score, self.none), blueprint.depth);
            }
        }
        best.complete = best.scores[0] == self.none;
    }

    /// The ids of the `k` best of the row: that of rank `slot * lanes + lane` in `ids[slot]`.
    fn choose(&self, ranks: &mut Ranks) {
        let blueprint = comptime!(self.blueprint);
        let slots = comptime!(blueprint.slots());
        let size = N::value();
        let whole = comptime!(blueprint.vectors as usize * size <= blueprint.depth as usize);
        let mut stage =
            Shared::<[Vector<f32, N>]>::new_slice(comptime!(blueprint.staged_vectors() as usize));
        let group = UNIT_POS_X / blueprint.lanes;
        let at = (UNIT_POS_Y * comptime!(blueprint.plane_rows()) + group)
            * comptime!(blueprint.row_vectors());
        let mut best = Best {
            scores: Array::new(comptime!(blueprint.depth as usize)),
            last: self.none,
            won: 0u32,
            complete: false,
        };
        self.collect(&mut best, &mut stage, at);
        best.complete = best.scores[0] == self.none;

        #[unroll]
        for slot in 0..slots {
            ranks.scores[slot as usize] = self.none;
            ranks.owners[slot as usize] = 0u32;
            ranks.equals[slot as usize] = 0u32;
        }
        let mut tied = false;
        let mut equals = 0u32;
        let mut previous = self.none;
        for rank in 0..blueprint.k {
            if !whole {
                // All lanes or none, so that the plane stays together; a list that is not empty comes out as it was.
                if plane_any(best.scores[0] == self.none && !best.complete) {
                    self.collect_again(&mut best, &stage, at);
                }
            }
            let score = group_max(best.scores[0], blueprint.lanes, blueprint.target);
            let holders = group_ballot(best.scores[0] == score, blueprint.lanes, blueprint.target);
            let owner = holders.trailing_zeros();
            equals = select(score == previous, equals + 1, 0u32);
            tied = tied || equals > 0 || (holders & (holders - 1)) != 0;
            previous = score;
            if self.lane == owner {
                best.pop(self.none, blueprint.depth);
            }
            #[unroll]
            for slot in 0..slots {
                if slot * blueprint.lanes + self.lane == rank {
                    ranks.scores[slot as usize] = score;
                    ranks.owners[slot as usize] = owner;
                    ranks.equals[slot as usize] = equals;
                }
            }
        }

        sync_group(blueprint.target);
        if plane_any(tied) {
            self.look_up_in_row(ranks, &stage, at);
        } else {
            self.look_up_in_part(ranks, &stage, at);
        }
    }

    /// Each rank's score is the only such score of its row that can have won.
    fn look_up_in_part(&self, ranks: &mut Ranks, stage: &Shared<[Vector<f32, N>]>, at: u32) {
        let blueprint = comptime!(self.blueprint);
        let length = N::value();
        let size = length as u32;
        #[unroll]
        for slot in 0..comptime!(blueprint.slots() as usize) {
            let (score, owner) = (ranks.scores[slot], ranks.owners[slot]);
            let mut id = 0u32;
            // Backwards: the owner may hold an equal score of a higher id that has not won.
            for i in 0..blueprint.vectors {
                let vector = (blueprint.vectors - 1 - i) * blueprint.lanes + owner;
                let scores = stage[(at + vector) as usize];
                #[unroll]
                for j in 0..N::value() {
                    let j = comptime!(length - 1 - j);
                    id = select(scores.extract(j) == score, vector * size + j as u32, id);
                }
            }
            ranks.ids[slot] = id;
        }
    }

    /// Of equal scores, the lower ids are the earlier ranks'.
    fn look_up_in_row(&self, ranks: &mut Ranks, stage: &Shared<[Vector<f32, N>]>, at: u32) {
        let size = N::value() as u32;
        #[unroll]
        for slot in 0..comptime!(self.blueprint.slots() as usize) {
            let (score, equals) = (ranks.scores[slot], ranks.equals[slot]);
            let mut id = 0u32;
            let mut seen = 0u32;
            for vector in 0..self.vectors {
                let scores = stage[(at + vector) as usize];
                #[unroll]
                for j in 0..N::value() {
                    let equal = scores.extract(j) == score;
                    id = select(equal && seen == equals, vector * size + j as u32, id);
                    seen += select(equal, 1u32, 0u32);
                }
            }
            ranks.ids[slot] = id;
        }
    }

    /// Writes the `k` best of the row from `first` on.
    pub(super) fn write<O: Float>(
        &self,
        values: &mut [O],
        ids: &mut [i32],
        first: usize,
        scale: f32,
        padded: bool,
        writes: bool,
    ) {
        let blueprint = comptime!(self.blueprint);
        let slots = comptime!(blueprint.slots());
        let mut ranks = Ranks {
            scores: Array::new(comptime!(slots as usize)),
            owners: Array::new(comptime!(slots as usize)),
            equals: Array::new(comptime!(slots as usize)),
            ids: Array::new(comptime!(slots as usize)),
        };
        self.choose(&mut ranks);

        let mut outputs = Array::<f32>::new(comptime!(slots as usize));
        let mut sum = 0.0f32;
        #[unroll]
        for slot in 0..slots {
            let id = ranks.ids[slot as usize];
            let mut value = element(self.read(id / N::value() as u32), id);
            if comptime!(blueprint.scored) {
                value = sqrt_softplus(value, blueprint.target);
                let rank = slot * blueprint.lanes + self.lane;
                sum += select(rank < blueprint.k, value, 0.0f32);
            }
            outputs[slot as usize] = value;
        }
        let mut factor = 1.0f32;
        if comptime!(blueprint.scored) {
            let lanes = comptime!(blueprint.k.next_power_of_two().min(blueprint.lanes));
            let sum = group_sum(sum, lanes, blueprint.target);
            factor = scale * reciprocal(sum + EPSILON, blueprint.target);
        }
        #[unroll]
        for slot in 0..slots {
            let rank = slot * blueprint.lanes + self.lane;
            if writes && rank < blueprint.k {
                let at = first + rank as usize;
                values[at] = O::cast_from(select(padded, 0.0f32, outputs[slot as usize] * factor));
                ids[at] = select(padded, -1i32, ranks.ids[slot as usize] as i32);
            }
        }
    }
}

/// Selects `k` elements of each row.
///
/// - `rows`: rows of `columns` elements, `row_vectors` vectors apart; each in partial sums that are `part_vectors` apart
/// - `bias`: one per column
/// - `padding`: non-zero where the row is padding
/// - `values`: `[tokens, k]`, the weights or the elements; `ids`: `[tokens, k]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn select_kernel<F: Float, O: Float, P: Int, N: Size>(
    rows: &[Vector<F, N>],
    bias: ComptimeOption<&[Vector<f32, N>]>,
    padding: ComptimeOption<&[P]>,
    values: &mut [O],
    ids: &mut [i32],
    tokens: u32,
    columns: u32,
    row_vectors: usize,
    part_vectors: usize,
    scale: f32,
    none: f32,
    #[comptime] blueprint: SelectBlueprint,
    #[define(F, O, P)] _dtypes: [ElemType; 3],
) {
    let lane = UNIT_POS_X % blueprint.lanes;
    let token = (CUBE_POS as u32 * blueprint.planes + UNIT_POS_Y)
        * comptime!(blueprint.plane_rows())
        + UNIT_POS_X / blueprint.lanes;
    let writes = token < tokens;
    // Idle groups repeat the last row, so that all lanes take part in what a plane does together.
    let token = select(writes, token, tokens - 1);

    let padded: ComptimeOption<bool> =
        padding.map(|padding| padding[token as usize] != P::from_int(0));
    let padded = padded.unwrap_or_else(|| false);
    let row = Row::<F, N>::new(
        rows,
        bias,
        token as usize * row_vectors,
        part_vectors,
        columns / N::value() as u32,
        lane,
        none,
        blueprint,
    );
    let first = token as usize * blueprint.k as usize;
    row.write(values, ids, first, scale, padded, writes);
}
