use cubecl::prelude::*;

use super::{
    NONE, Numbers, Places, Rule, Sizes, destination_of, inverse_length, slot_of, stage_gates,
};
use crate::gated_delta::MAX_TOKENS;
use crate::intrinsics::{Target, shuffle_xor};

/// How [`lanes_kernel`] is compiled.
///
/// A few neighbouring lanes share some rows of a state and keep them in registers while all tokens pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LanesBlueprint {
    /// Lanes that share a row, and vectors of it that each has.
    pub lanes: u32,
    pub steps: u32,
    /// Rows that they share.
    pub rows: u32,
    /// Lanes of a plane, and planes of a cube.
    pub plane: u32,
    pub planes: u32,
    pub rule: Rule,
    pub target: Target,
}

impl LanesBlueprint {
    /// Rows of a cube.
    pub const fn cube_rows(self) -> u32 {
        self.planes * (self.plane / self.lanes) * self.rows
    }
}

/// Puts each sum over a group of neighbouring lanes in all of them: all sums advance together, since a step waits for the one before.
#[cube]
fn group_sums(
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

/// A row as the lane has it.
#[cube]
fn own_vectors<Q: Float, N: Size>(
    rows: &[Vector<Q, N>],
    from: usize,
    #[comptime] blueprint: LanesBlueprint,
) -> Array<Vector<f32, N>> {
    let mut own = Array::<Vector<f32, N>>::new(comptime!(blueprint.steps as usize));
    let lane = UNIT_POS_X % blueprint.lanes;
    #[unroll]
    for i in 0..blueprint.steps {
        let at = from + (lane + comptime!(i * blueprint.lanes)) as usize;
        own[i as usize] = Vector::cast_from(rows[at]);
    }
    own
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

/// The lane's part of the rows that there are goes to a state that begins at `first`.
#[cube]
fn store<S: Float, N: Size>(
    state: &Array<Vector<f32, N>>,
    to: &mut [Vector<S, N>],
    first: usize,
    row_vectors: usize,
    first_row: u32,
    channels: u32,
    #[comptime] blueprint: LanesBlueprint,
) {
    let stride = comptime!(blueprint.planes * (blueprint.plane / blueprint.lanes));
    let lane = UNIT_POS_X % blueprint.lanes;
    #[unroll]
    for r in 0..blueprint.rows {
        let row = first_row + comptime!(r * stride);
        if row < channels {
            #[unroll]
            for i in 0..blueprint.steps {
                let vector = (lane + comptime!(i * blueprint.lanes)) as usize;
                let at = comptime!((r * blueprint.steps + i) as usize);
                to[first + row as usize * row_vectors + vector] = Vector::cast_from(state[at]);
            }
        }
    }
}

/// All tokens of some rows of the state of a head of a sequence, one token after the other.
///
/// - `q`, `k`: rows of vectors; `v`, `a`, `b`: elements; all where `places` says
/// - `pool`: states where `places` says, read at `read_slots` and written at `write_slots` or, without, where they were read
/// - `accepted`: the tokens of each sequence after which its state is written; without, all
/// - `out`: `[batch, tokens, heads, channels]`
/// - `states`: `[batch, tokens, heads, channels, vectors]`, the state after every token
#[cube(launch_unchecked, address_type = "dynamic")]
// What is known at compile time is asked by itself, so that the rest is left out.
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
pub(crate) fn lanes_kernel<
    Q: Float,
    A: Float,
    B: Float,
    D: Float,
    S: Float,
    R: Int,
    W: Int,
    C: Int,
    N: Size,
>(
    q: &[Vector<Q, N>],
    k: &[Vector<Q, N>],
    v: &[Q],
    a: &[A],
    b: &[B],
    a_log: &[f32],
    dt_bias: &[D],
    pool: &mut [Vector<S, N>],
    read_slots: &[R],
    write_slots: ComptimeOption<&[W]>,
    accepted: ComptimeOption<&[C]>,
    out: &mut [Q],
    mut states: ComptimeOption<Box<[Vector<S, N>]>>,
    sizes: Sizes,
    places: Places,
    numbers: Numbers,
    #[comptime] blueprint: LanesBlueprint,
    #[define(Q, A, B, D, S, R, W, C)] _dtypes: [ElemType; 8],
) {
    let LanesBlueprint {
        lanes,
        steps,
        rows,
        plane,
        planes,
        rule,
        ..
    } = comptime!(blueprint);
    let blocks = sizes.channels.div_ceil(comptime!(blueprint.cube_rows()));
    let cube = CUBE_POS as u32;
    let head = cube / blocks % sizes.heads;
    let sequence = cube / blocks / sizes.heads;
    // Cubes past the end repeat the last sequence's work up to the barrier.
    let present = sequence < sizes.batch;
    let sequence = min(sequence, sizes.batch - 1);
    let lane = UNIT_POS_X % lanes;
    let group = UNIT_POS_Y * comptime!(plane / lanes) + UNIT_POS_X / lanes;
    let stride = comptime!(planes * (plane / lanes));
    let first_row = cube % blocks * comptime!(blueprint.cube_rows()) + group;
    let state_vectors = sizes.channels as usize * sizes.vectors as usize;
    let out_token = sizes.heads as usize * sizes.channels as usize;
    let first_token = sequence as usize * sizes.tokens as usize;
    let out_start = first_token * out_token + head as usize * sizes.channels as usize;
    let states_start = (first_token * sizes.heads as usize + head as usize) * state_vectors;
    let states_token = sizes.heads as usize * state_vectors;

    let slot = slot_of::<R>(read_slots[sequence as usize], sizes.slots, rule);
    let alive = present && slot != NONE;
    let mut state = Array::<Vector<f32, N>>::new(comptime!((rows * steps) as usize));
    if alive {
        let from = slot as usize * places.slot + head as usize * places.pool_head;
        #[unroll]
        for r in 0..rows {
            let row = min(first_row + comptime!(r * stride), sizes.channels - 1);
            let own = own_vectors(&*pool, from + row as usize * places.row, blueprint);
            #[unroll]
            for i in 0..steps {
                state[comptime!((r * steps + i) as usize)] = own[i as usize];
            }
        }
    }
    let mut decays = Shared::<[f32]>::new_slice(MAX_TOKENS);
    let mut strengths = Shared::<[f32]>::new_slice(MAX_TOKENS);
    stage_gates(
        a,
        b,
        a_log,
        dt_bias,
        &mut decays,
        &mut strengths,
        sequence,
        head,
        &sizes,
        &places,
        numbers.threshold,
        comptime!(plane * planes),
    );
    sync_cube();

    if alive {
        let destination =
            destination_of::<W, C>(&write_slots, &accepted, sequence, slot, &sizes, rule);
        let (target, kept) = (destination.slot, destination.kept);
        let to = target as usize * places.slot + head as usize * places.pool_head;
        if comptime!(rule.written && accepted.is_some()) {
            if kept == 0 && target != NONE && target != slot {
                store(
                    &state,
                    pool,
                    to,
                    places.row,
                    first_row,
                    sizes.channels,
                    blueprint,
                );
            }
        }

        let key_head = head / sizes.sharing;
        let mut token = 0u32;
        while token < sizes.tokens {
            let keys = own_vectors(k, places.k.of(sequence, token, key_head), blueprint);
            let queries = own_vectors(q, places.q.of(sequence, token, key_head), blueprint);
            let mut squares = Array::<f32>::new(2usize);
            squares[0] = 0.0f32;
            squares[1] = 0.0f32;
            if comptime!(rule.l2_norm) {
                #[unroll]
                for i in 0..comptime!(steps as usize) {
                    squares[0] = dot(keys[i], keys[i], squares[0]);
                    squares[1] = dot(queries[i], queries[i], squares[1]);
                }
                group_sums(&mut squares, 2u32, blueprint);
            }
            let key_factor = inverse_length(squares[0], rule);
            let query_factor = inverse_length(squares[1], rule) * numbers.scale;
            let decay = decays[token as usize];
            let strength = strengths[token as usize];

            let mut sums = Array::<f32>::new(comptime!(rows as usize));
            #[unroll]
            for r in 0..rows {
                let mut sum = 0.0f32;
                #[unroll]
                for i in 0..steps {
                    let at = comptime!((r * steps + i) as usize);
                    state[at] *= Vector::new(decay);
                    let key = keys[i as usize] * Vector::new(key_factor);
                    sum = dot(state[at], key, sum);
                }
                sums[r as usize] = sum;
            }
            group_sums(&mut sums, rows, blueprint);
            let value_at = places.v.of(sequence, token, head);
            #[unroll]
            for r in 0..rows {
                let row = min(first_row + comptime!(r * stride), sizes.channels - 1);
                let value = f32::cast_from(v[value_at + row as usize]);
                let correction = (value - sums[r as usize]) * strength;
                let mut sum = 0.0f32;
                #[unroll]
                for i in 0..steps {
                    let at = comptime!((r * steps + i) as usize);
                    let key = keys[i as usize] * Vector::new(key_factor);
                    state[at] += Vector::new(correction) * key;
                    let query = queries[i as usize] * Vector::new(query_factor);
                    sum = dot(state[at], query, sum);
                }
                sums[r as usize] = sum;
            }
            group_sums(&mut sums, rows, blueprint);
            let outputs = out_start + token as usize * out_token;
            #[unroll]
            for r in 0..rows {
                let row = first_row + comptime!(r * stride);
                if lane == 0 && row < sizes.channels {
                    out[outputs + row as usize] = Q::cast_from(sums[r as usize]);
                }
            }
            #[comptime]
            if let ComptimeOption::Some(states) = states.as_mut() {
                let first = states_start + token as usize * states_token;
                store(
                    &state,
                    states,
                    first,
                    sizes.vectors as usize,
                    first_row,
                    sizes.channels,
                    blueprint,
                );
            }
            token += 1;
            if comptime!(rule.written) {
                if token == kept && target != NONE {
                    store(
                        &state,
                        pool,
                        to,
                        places.row,
                        first_row,
                        sizes.channels,
                        blueprint,
                    );
                }
            }
        }
    } else if present {
        let mut token = 0u32;
        while token < sizes.tokens {
            let outputs = out_start + token as usize * out_token;
            #[unroll]
            for r in 0..rows {
                let row = first_row + comptime!(r * stride);
                if lane == 0 && row < sizes.channels {
                    out[outputs + row as usize] = Q::from_int(0);
                }
            }
            #[comptime]
            if let ComptimeOption::Some(states) = states.as_mut() {
                let mut zeros = Array::<Vector<f32, N>>::new(comptime!((rows * steps) as usize));
                #[unroll]
                for i in 0..comptime!((rows * steps) as usize) {
                    zeros[i] = Vector::new(0.0f32);
                }
                let first = states_start + token as usize * states_token;
                store(
                    &zeros,
                    states,
                    first,
                    sizes.vectors as usize,
                    first_row,
                    sizes.channels,
                    blueprint,
                );
            }
            token += 1;
        }
    }
}
