use cubecl::prelude::*;

use super::{
    DeltaInputs, DeltaResults, DeltaShape, GateInputs, NO_SLOT, RowLayout, RuleOptions, StateSlots,
    inverse_norm, slot_of,
};
use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::gated_delta::args::MAX_TOKENS;
use crate::intrinsics::{modulo, shuffle_xor};

/// How [`lanes_kernel`] is compiled.
///
/// A group of neighbouring lanes shares some rows of a state and keeps them in registers for all
/// tokens. The registers are f32. If there is only one token, they have the dtype of the pool: that
/// state is rounded for storing before it is needed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LanesBlueprint {
    /// Lanes that share a row, and vectors of the row in each of them.
    pub lanes: u32,
    pub lane_vectors: u32,
    /// Rows that a group of lanes shares.
    pub rows: u32,
    /// Whether there is one token.
    pub single_token: bool,
    /// Lanes of a plane, and planes of a cube.
    pub plane: u32,
    pub planes: u32,
    pub rule: RuleOptions,
    pub target: Target,
}

impl LanesBlueprint {
    /// Groups of lanes in a cube, which is also the distance from one row of a group to its next.
    const fn stride(self) -> u32 {
        self.planes * (self.plane / self.lanes)
    }

    /// Rows of a cube.
    pub const fn cube_rows(self) -> u32 {
        self.stride() * self.rows
    }
}

/// Puts the sum over a group of neighbouring lanes into all of them, for each of several sums. The
/// sums advance together, since each step waits for the one before.
#[cube]
fn sum_groups(
    sums: &mut Array<f32>,
    #[comptime] count: u32,
    #[comptime] blueprint: LanesBlueprint,
) {
    #[unroll]
    for step in 0..comptime!(blueprint.lanes.ilog2()) {
        #[unroll]
        for i in 0..comptime!(count as usize) {
            let other = shuffle_xor(sums[i], comptime!(1u32 << step), blueprint.target);
            sums[i] += other;
        }
    }
}

/// Reads this lane's vectors of a row.
#[cube]
fn read_lane_vectors<S: Float, N: Size>(
    rows: &[Vector<S, N>],
    from: usize,
    #[comptime] blueprint: LanesBlueprint,
) -> Array<Vector<S, N>> {
    let mut own = Array::<Vector<S, N>>::new(comptime!(blueprint.lane_vectors as usize));
    let lane = modulo(UNIT_POS_X, blueprint.lanes);
    #[unroll]
    for i in 0..blueprint.lane_vectors {
        let at = from + (lane + comptime!(i * blueprint.lanes)) as usize;
        own[i as usize] = rows[at];
    }
    own
}

/// The rows of a state that a group of lanes shares.
#[derive(CubeType, Clone, Copy)]
struct GroupRows {
    sequence: u32,
    head: u32,
    key_head: u32,
    /// The first of them, and the number of rows of the state.
    first: u32,
    channels: u32,
}

/// The inputs of a token that a lane needs, as they were read. They are not converted here: a
/// conversion would wait for the read.
#[derive(CubeType)]
struct TokenInputs<Q: Float, N: Size> {
    keys: Array<Vector<Q, N>>,
    queries: Array<Vector<Q, N>>,
    /// The values of the group's rows.
    values: Array<Q>,
}

#[cube]
impl<Q: Float, N: Size> TokenInputs<Q, N> {
    fn new(#[comptime] blueprint: LanesBlueprint) -> TokenInputs<Q, N> {
        TokenInputs::<Q, N> {
            keys: Array::new(comptime!(blueprint.lane_vectors as usize)),
            queries: Array::new(comptime!(blueprint.lane_vectors as usize)),
            values: Array::new(comptime!(blueprint.rows as usize)),
        }
    }

    /// Starts to read token `token` of a sequence.
    fn read(
        &mut self,
        inputs: &DeltaInputs<Vector<Q, N>, Q>,
        token: u32,
        group: &GroupRows,
        #[comptime] blueprint: LanesBlueprint,
    ) {
        let key = inputs.k.offset(group.sequence, token, group.key_head);
        let keys = read_lane_vectors(&inputs.k.elements, key, blueprint);
        let query = inputs.q.offset(group.sequence, token, group.key_head);
        let queries = read_lane_vectors(&inputs.q.elements, query, blueprint);
        #[unroll]
        for i in 0..comptime!(blueprint.lane_vectors as usize) {
            self.keys[i] = keys[i];
            self.queries[i] = queries[i];
        }
        let first = inputs.v.offset(group.sequence, token, group.head);
        #[unroll]
        for r in 0..blueprint.rows {
            let row = group.first + comptime!(r * blueprint.stride());
            self.values[r as usize] =
                inputs.v.elements[first + min(row, group.channels - 1) as usize];
        }
    }
}

#[cube]
fn dot<N: Size>(a: Vector<f32, N>, b: Vector<f32, N>, sum: f32) -> f32 {
    let mut sum = sum;
    #[unroll]
    for i in 0..N::value() {
        sum = fma(a.extract(i), b.extract(i), sum);
    }
    sum
}

/// Stores this lane's part of the rows that exist to a state with the layout `rows`.
#[cube]
fn store<H: Float, S: Float, N: Size>(
    state: &Array<Vector<H, N>>,
    to: &mut [Vector<S, N>],
    rows: &RowLayout,
    group: &GroupRows,
    #[comptime] blueprint: LanesBlueprint,
) {
    let lane = modulo(UNIT_POS_X, blueprint.lanes);
    #[unroll]
    for r in 0..blueprint.rows {
        let row = group.first + comptime!(r * blueprint.stride());
        if row < group.channels {
            #[unroll]
            for i in 0..blueprint.lane_vectors {
                let vector = (lane + comptime!(i * blueprint.lanes)) as usize;
                let at = comptime!((r * blueprint.lane_vectors + i) as usize);
                to[rows.offset(row) + vector] = Vector::cast_from(state[at]);
            }
        }
    }
}

/// Processes all tokens of some rows of one state, one token after the other.
#[cube(launch_unchecked, address_type = "dynamic")]
// Compile-time conditions have an `if` of their own, so that the code they exclude is not compiled.
#[allow(clippy::collapsible_if)]
pub(crate) fn lanes_kernel<
    Q: Float,
    A: Float,
    B: Float,
    D: Float,
    S: Float,
    H: Float,
    R: Int,
    W: Int,
    C: Int,
    N: Size,
>(
    inputs: &DeltaInputs<Vector<Q, N>, Q>,
    gates: &GateInputs<A, B, D>,
    slots: &StateSlots<R, W, C>,
    results: &mut DeltaResults<Vector<S, N>, Q>,
    shape: DeltaShape,
    #[comptime] blueprint: LanesBlueprint,
    #[define(Q, A, B, D, S, H, R, W, C)] _dtypes: [ElemType; 9],
) {
    let LanesBlueprint {
        lanes,
        lane_vectors,
        rows,
        single_token,
        plane,
        rule,
        ..
    } = comptime!(blueprint);
    // Divisors precomputed on the host would take registers that other values need.
    let blocks = shape.channels.div_ceil(comptime!(blueprint.cube_rows()));
    let cube = CUBE_POS as u32;
    let block = cube % blocks;
    let head = cube / blocks % shape.heads;
    let sequence = cube / blocks / shape.heads;
    // Cubes past the end repeat the last sequence's work up to the barrier.
    let in_batch = sequence < shape.batch;
    let sequence = min(sequence, shape.batch - 1);
    let lane = modulo(UNIT_POS_X, lanes);
    let group = UNIT_POS_Y * comptime!(plane / lanes) + UNIT_POS_X / lanes;
    let stride = comptime!(blueprint.stride());
    let group = GroupRows {
        sequence,
        head,
        key_head: head / shape.heads_per_key,
        first: block * comptime!(blueprint.cube_rows()) + group,
        channels: shape.channels,
    };
    let state_vectors = shape.channels as usize * shape.vectors as usize;
    let out_token = shape.heads as usize * shape.channels as usize;
    let first_token = sequence as usize * shape.tokens as usize;
    let out_start = first_token * out_token + head as usize * shape.channels as usize;
    let states_start = (first_token * shape.heads as usize + head as usize) * state_vectors;
    let states_token = shape.heads as usize * state_vectors;

    // Everything that does not depend on the slot is requested before the kernel waits for the
    // slot.
    let raw_slot = slots.read[sequence as usize];
    let own_token = min(UNIT_POS, shape.tokens - 1);
    let own_gates = gates.read(sequence, own_token, head);
    let mut next_inputs = TokenInputs::<Q, N>::new(blueprint);
    next_inputs.read(inputs, 0u32, &group, blueprint);
    let slot = slot_of::<R>(raw_slot, slots.count, rule);
    let active = in_batch && slot != NO_SLOT;
    let mut state = Array::<Vector<H, N>>::new(comptime!((rows * lane_vectors) as usize));
    if active {
        let from = results.pool.rows(slot, head);
        #[unroll]
        for r in 0..rows {
            let row = min(group.first + comptime!(r * stride), shape.channels - 1);
            let own = read_lane_vectors(&results.pool.vectors, from.offset(row), blueprint);
            #[unroll]
            for i in 0..lane_vectors {
                state[comptime!((r * lane_vectors + i) as usize)] =
                    Vector::cast_from(own[i as usize]);
            }
        }
    }
    let mut decays = Shared::<[f32]>::new_slice(MAX_TOKENS);
    let mut betas = Shared::<[f32]>::new_slice(MAX_TOKENS);
    if UNIT_POS < shape.tokens {
        decays[own_token as usize] = own_gates.decay(gates.threshold);
        betas[own_token as usize] = own_gates.beta();
    }
    sync_cube();

    if active {
        let destination = slots.destination(sequence, slot, shape.tokens, rule);
        let (target, write_after) = (destination.slot, destination.write_after);
        let to = results.pool.rows(target, head);
        if comptime!(rule.writes_pool && slots.accepted.is_some()) {
            if write_after == 0 && target != NO_SLOT && target != slot {
                store(&state, &mut results.pool.vectors, &to, &group, blueprint);
            }
        }

        let mut token = 0u32;
        while token < shape.tokens {
            let mut keys = Array::<Vector<f32, N>>::new(comptime!(lane_vectors as usize));
            let mut queries = Array::<Vector<f32, N>>::new(comptime!(lane_vectors as usize));
            let mut values = Array::<f32>::new(comptime!(rows as usize));
            #[unroll]
            for i in 0..comptime!(lane_vectors as usize) {
                keys[i] = Vector::cast_from(next_inputs.keys[i]);
                queries[i] = Vector::cast_from(next_inputs.queries[i]);
            }
            #[unroll]
            for r in 0..comptime!(rows as usize) {
                values[r] = f32::cast_from(next_inputs.values[r]);
            }
            if comptime!(!single_token) && token + 1 < shape.tokens {
                next_inputs.read(inputs, token + 1, &group, blueprint);
            }

            // The products of key and query with the state before the update, and with each other:
            // the lanes exchange all sums of a token at once.
            let mut sums = Array::<f32>::new(comptime!((3 + 2 * rows) as usize));
            #[unroll]
            for i in 0..comptime!((3 + 2 * rows) as usize) {
                sums[i] = 0.0f32;
            }
            #[unroll]
            for i in 0..comptime!(lane_vectors as usize) {
                sums[0] = dot(keys[i], queries[i], sums[0]);
                if comptime!(rule.l2_norm) {
                    sums[1] = dot(keys[i], keys[i], sums[1]);
                    sums[2] = dot(queries[i], queries[i], sums[2]);
                }
                #[unroll]
                for r in 0..comptime!(rows as usize) {
                    let own = Vector::<f32, N>::cast_from(
                        state[comptime!(r * lane_vectors as usize + i)],
                    );
                    let (of_key, of_query) = comptime!((3 + 2 * r, 4 + 2 * r));
                    sums[of_key] = dot(own, keys[i], sums[of_key]);
                    sums[of_query] = dot(own, queries[i], sums[of_query]);
                }
            }
            sum_groups(&mut sums, comptime!(3 + 2 * rows), blueprint);
            let key_factor = inverse_norm(sums[1], rule);
            let query_factor = inverse_norm(sums[2], rule) * inputs.scale;
            let decay = decays[token as usize];
            let beta = betas[token as usize];
            #[unroll]
            for r in 0..comptime!(rows as usize) {
                let recalled = sums[comptime!(3 + 2 * r)] * decay * key_factor;
                let correction = (values[r] - recalled) * beta * key_factor;
                #[unroll]
                for i in 0..comptime!(lane_vectors as usize) {
                    let at = comptime!(r * lane_vectors as usize + i);
                    let own = Vector::<f32, N>::cast_from(state[at]);
                    let own = own * Vector::new(decay) + keys[i] * Vector::new(correction);
                    state[at] = Vector::cast_from(own);
                }
                let output = sums[comptime!(4 + 2 * r)] * decay + sums[0] * correction;
                values[r] = output * query_factor;
            }
            let outputs = out_start + token as usize * out_token;
            #[unroll]
            for r in 0..rows {
                let row = group.first + comptime!(r * stride);
                if lane == 0 && row < shape.channels {
                    results.out[outputs + row as usize] = Q::cast_from(values[r as usize]);
                }
            }
            #[comptime]
            if let ComptimeOption::Some(states) = results.states.as_mut() {
                let to = RowLayout {
                    first: states_start + token as usize * states_token,
                    stride: shape.vectors as usize,
                };
                store(&state, states, &to, &group, blueprint);
            }
            token += 1;
            if comptime!(rule.writes_pool) {
                if token == write_after && target != NO_SLOT {
                    store(&state, &mut results.pool.vectors, &to, &group, blueprint);
                }
            }
        }
    } else if in_batch {
        let mut token = 0u32;
        while token < shape.tokens {
            let outputs = out_start + token as usize * out_token;
            #[unroll]
            for r in 0..rows {
                let row = group.first + comptime!(r * stride);
                if lane == 0 && row < shape.channels {
                    results.out[outputs + row as usize] = Q::from_int(0);
                }
            }
            #[comptime]
            if let ComptimeOption::Some(states) = results.states.as_mut() {
                let mut zeros =
                    Array::<Vector<H, N>>::new(comptime!((rows * lane_vectors) as usize));
                #[unroll]
                for i in 0..comptime!((rows * lane_vectors) as usize) {
                    zeros[i] = Vector::new(H::from_int(0));
                }
                let to = RowLayout {
                    first: states_start + token as usize * states_token,
                    stride: shape.vectors as usize,
                };
                store(&zeros, states, &to, &group, blueprint);
            }
            token += 1;
        }
    }
}
