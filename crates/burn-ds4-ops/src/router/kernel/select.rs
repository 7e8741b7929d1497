use cubecl::prelude::*;

use super::activation::{EPSILON, biased_score, element, sqrt_softplus};
use super::best::{BestScores, Ranks};
use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::{
    group_ballot, group_max, group_sum, modulo, not_nan, reciprocal, sync_group,
};

/// Lower logits are raised to this one, which ranks above NaN: NaN becomes the lowest f32.
const LOWEST_LOGIT: f32 = -1e38;

/// How [`select_kernel`] is compiled.
///
/// A group of `lanes` neighbouring lanes works on a row. Each lane reads its part of the row once,
/// writes the scores to shared memory and keeps a list of its best `depth` scores, without ids.
/// Then the best head of the group's lists is taken, `k` times. Up to here equal scores need no
/// distinction. Finally the lane of each rank finds the id of its score: in the part of the lane
/// that the score came from or, where several elements have that score, in the whole row, the lower
/// id first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SelectBlueprint {
    /// Whether to select by `sqrt(softplus(x)) + bias` and return weights, or to select by value
    /// and return values.
    pub scored: bool,
    /// Elements to select.
    pub k: u32,
    /// Lanes for each row: a power of two that divides the plane.
    pub lanes: u32,
    /// Vectors of a row for each lane, rounded up to a multiple of `read_vectors`.
    pub vectors: u32,
    /// Vectors that a lane reads at once.
    pub read_vectors: u32,
    /// Whether no lane's part reaches beyond the row.
    pub even: bool,
    /// Elements in a lane's list.
    pub depth: u32,
    /// Partial sums of which an element is the sum.
    pub partials: u32,
    /// Planes of a cube.
    pub planes: u32,
    /// Lanes of a plane.
    pub plane: u32,
    /// Instructions that the kernel may use.
    pub target: Target,
}

impl SelectBlueprint {
    /// Results that a lane writes, rounded up.
    fn slots(&self) -> u32 {
        self.k.div_ceil(self.lanes)
    }

    /// Vectors of a row in shared memory.
    fn row_vectors(&self) -> u32 {
        self.vectors * self.lanes
    }

    /// Rows that a plane works on at once.
    pub fn plane_rows(&self) -> u32 {
        self.plane / self.lanes
    }

    /// Vectors of a cube in shared memory.
    fn shared_vectors(&self) -> u32 {
        self.row_vectors() * self.plane_rows() * self.planes
    }
}

/// Rows that are selected from, each as partial sums.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SelectRows<F: Float, N: Size> {
    rows: Box<[Vector<F, N>]>,
    tokens: u32,
    columns: u32,
    /// Vectors from one row to the next.
    row_vectors: usize,
    /// Vectors from one partial of a row to the next.
    partial_vectors: usize,
}

/// Which rows are padding, and what is written for a row.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Selection<O: Float, P: Int> {
    /// Not zero where the row is padding.
    padding: ComptimeOption<Box<[P]>>,
    /// The weights or the elements, `[tokens, k]`.
    values: Box<[O]>,
    /// `[tokens, k]`.
    ids: Box<[i32]>,
    /// The sum of the weights.
    scale: f32,
    /// -inf, which ranks below every element.
    none: f32,
}

#[cube]
impl<O: Float, P: Int> Selection<O, P> {
    fn is_padded(&self, token: u32) -> bool {
        let padding = self.padding.as_ref();
        let padded: ComptimeOption<bool> =
            padding.map(|padding| padding[token as usize] != P::from_int(0));
        padded.unwrap_or_else(|| false)
    }
}

/// A row and the position of a lane in it.
#[derive(CubeType)]
struct RouterRow<'a, 'b, F: Float, N: Size> {
    rows: &'a [Vector<F, N>],
    bias: ComptimeOption<&'b [Vector<f32, N>]>,
    /// First vector of the row.
    first: usize,
    /// Vectors from one partial to the next.
    partial_vectors: usize,
    /// Vectors of the row.
    vectors: u32,
    lane: u32,
    /// -inf, which ranks below every element.
    none: f32,
    #[cube(comptime)]
    blueprint: SelectBlueprint,
}

#[cube]
impl<'a, 'b, F: Float, N: Size> RouterRow<'a, 'b, F, N> {
    fn new(
        rows: &'a [Vector<F, N>],
        bias: ComptimeOption<&'b [Vector<f32, N>]>,
        first: usize,
        partial_vectors: usize,
        vectors: u32,
        lane: u32,
        none: f32,
        #[comptime] blueprint: SelectBlueprint,
    ) -> Self {
        RouterRow::<'a, 'b, F, N> {
            rows,
            bias,
            first,
            partial_vectors,
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
        for partial in 1..comptime!(self.blueprint.partials as usize) {
            values +=
                Vector::<f32, N>::cast_from(self.rows[first + partial * self.partial_vectors]);
        }
        values
    }

    /// Reads the lane's part of the row, writes its scores to shared memory and lists the best.
    fn collect(
        &self,
        best: &mut BestScores,
        row_scores: &mut Shared<[Vector<f32, N>]>,
        offset: u32,
    ) {
        let blueprint = comptime!(self.blueprint);
        best.clear(self.none, blueprint.depth);
        let mut values = Array::<Vector<f32, N>>::new(comptime!(blueprint.read_vectors as usize));
        let mut biases = Array::<Vector<f32, N>>::new(comptime!(blueprint.read_vectors as usize));
        // Divides a runtime number, so that the compiler does not unroll the loop.
        let iteration_vectors = comptime!(blueprint.read_vectors * blueprint.lanes);
        let iterations = self.vectors.div_ceil(iteration_vectors);
        for iteration in 0..iterations {
            let first = iteration * iteration_vectors + self.lane;
            // All reads that are in flight at once.
            #[unroll]
            for i in 0..blueprint.read_vectors {
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
            for i in 0..blueprint.read_vectors {
                let vector = first + i * blueprint.lanes;
                let scores = self.scores(values[i as usize], biases[i as usize], vector, best);
                row_scores[(offset + vector) as usize] = scores;
            }
        }
    }

    /// The scores of a vector, each of which is also inserted into the list.
    fn scores(
        &self,
        values: Vector<f32, N>,
        bias: Vector<f32, N>,
        vector: u32,
        best: &mut BestScores,
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
                // Without a bias the activations are in the order of the logits. Zeros of either
                // sign are equal.
                let value = select(value == 0.0f32, 0.0f32, value);
                if comptime!(blueprint.scored) {
                    // The activation of -inf is a number, but that of NaN is not.
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

    /// Lists the best scores of the lane's part that come after the last one taken.
    fn collect_again(
        &self,
        best: &mut BestScores,
        row_scores: &Shared<[Vector<f32, N>]>,
        offset: u32,
    ) {
        let blueprint = comptime!(self.blueprint);
        best.clear(self.none, blueprint.depth);
        let mut equal = 0u32;
        for i in 0..blueprint.vectors {
            let scores = row_scores[(offset + i * blueprint.lanes + self.lane) as usize];
            #[unroll]
            for j in 0..N::value() {
                let score = scores.extract(j);
                let is_last = score == best.last && best.taken > 0;
                let after =
                    best.taken == 0 || score < best.last || (is_last && equal >= best.taken);
                equal += select(is_last, 1u32, 0u32);
                best.insert(select(after, score, self.none), blueprint.depth);
            }
        }
        best.exhausted = best.scores[0] == self.none;
    }

    /// Finds the ids of the `k` best of the row: that of rank `slot * lanes + lane` in `ids[slot]`.
    fn choose(&self, ranks: &mut Ranks) {
        let blueprint = comptime!(self.blueprint);
        let slots = comptime!(blueprint.slots());
        let size = N::value();
        let whole = comptime!(blueprint.vectors as usize * size <= blueprint.depth as usize);
        let mut row_scores =
            Shared::<[Vector<f32, N>]>::new_slice(comptime!(blueprint.shared_vectors() as usize));
        let group = UNIT_POS_X / blueprint.lanes;
        let offset = (UNIT_POS_Y * comptime!(blueprint.plane_rows()) + group)
            * comptime!(blueprint.row_vectors());
        let mut best = BestScores {
            scores: Array::new(comptime!(blueprint.depth as usize)),
            last: self.none,
            taken: 0u32,
            exhausted: false,
        };
        self.collect(&mut best, &mut row_scores, offset);
        best.exhausted = best.scores[0] == self.none;

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
                // All lanes call it or none, so that the plane stays converged. It leaves a list
                // that is not empty as it was.
                if plane_any(best.scores[0] == self.none && !best.exhausted) {
                    self.collect_again(&mut best, &row_scores, offset);
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
            self.look_up_in_row(ranks, &row_scores, offset);
        } else {
            self.look_up_in_lane(ranks, &row_scores, offset);
        }
    }

    /// Looks ids up where no two elements that could be taken have the same score.
    fn look_up_in_lane(
        &self,
        ranks: &mut Ranks,
        row_scores: &Shared<[Vector<f32, N>]>,
        offset: u32,
    ) {
        let blueprint = comptime!(self.blueprint);
        let length = N::value();
        let size = length as u32;
        #[unroll]
        for slot in 0..comptime!(blueprint.slots() as usize) {
            let (score, owner) = (ranks.scores[slot], ranks.owners[slot]);
            let mut id = 0u32;
            // From the last to the first: the lane may also hold an equal score of a higher id that
            // was not taken.
            for i in 0..blueprint.vectors {
                let vector = (blueprint.vectors - 1 - i) * blueprint.lanes + owner;
                let scores = row_scores[(offset + vector) as usize];
                #[unroll]
                for j in 0..N::value() {
                    let j = comptime!(length - 1 - j);
                    id = select(scores.extract(j) == score, vector * size + j as u32, id);
                }
            }
            ranks.ids[slot] = id;
        }
    }

    /// Looks ids up in the whole row. Of equal scores, the lower ids have the earlier ranks.
    fn look_up_in_row(
        &self,
        ranks: &mut Ranks,
        row_scores: &Shared<[Vector<f32, N>]>,
        offset: u32,
    ) {
        let size = N::value() as u32;
        #[unroll]
        for slot in 0..comptime!(self.blueprint.slots() as usize) {
            let (score, equals) = (ranks.scores[slot], ranks.equals[slot]);
            let mut id = 0u32;
            let mut matched = 0u32;
            for vector in 0..self.vectors {
                let scores = row_scores[(offset + vector) as usize];
                #[unroll]
                for j in 0..N::value() {
                    let equal = scores.extract(j) == score;
                    id = select(equal && matched == equals, vector * size + j as u32, id);
                    matched += select(equal, 1u32, 0u32);
                }
            }
            ranks.ids[slot] = id;
        }
    }

    /// Writes the `k` best of the row.
    fn write<O: Float, P: Int>(
        &self,
        selection: &mut Selection<O, P>,
        token: u32,
        padded: bool,
        writes: bool,
    ) {
        let blueprint = comptime!(self.blueprint);
        let first = token as usize * blueprint.k as usize;
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
            factor = selection.scale * reciprocal(sum + EPSILON, blueprint.target);
        }
        #[unroll]
        for slot in 0..slots {
            let rank = slot * blueprint.lanes + self.lane;
            if writes && rank < blueprint.k {
                let offset = first + rank as usize;
                selection.values[offset] =
                    O::cast_from(select(padded, 0.0f32, outputs[slot as usize] * factor));
                selection.ids[offset] = select(padded, -1i32, ranks.ids[slot as usize] as i32);
            }
        }
    }
}

/// Selects `k` elements of each row.
///
/// - `bias`: one per column
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn select_kernel<F: Float, O: Float, P: Int, N: Size>(
    input: &SelectRows<F, N>,
    bias: ComptimeOption<&[Vector<f32, N>]>,
    selection: &mut Selection<O, P>,
    #[comptime] blueprint: SelectBlueprint,
    #[define(F, O, P)] _dtypes: [ElemType; 3],
) {
    let lane = modulo(UNIT_POS_X, blueprint.lanes);
    let token = (CUBE_POS as u32 * blueprint.planes + UNIT_POS_Y)
        * comptime!(blueprint.plane_rows())
        + UNIT_POS_X / blueprint.lanes;
    let writes = token < input.tokens;
    // Idle groups repeat the last row, so that all lanes take part in the operations of the plane.
    let token = select(writes, token, input.tokens - 1);

    let padded = selection.is_padded(token);
    let row = RouterRow::<F, N>::new(
        &input.rows,
        bias,
        token as usize * input.row_vectors,
        input.partial_vectors,
        input.columns / N::value() as u32,
        lane,
        selection.none,
        blueprint,
    );
    row.write(selection, token, padded, writes);
}
