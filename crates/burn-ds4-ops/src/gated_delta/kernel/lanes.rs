use cubecl::prelude::*;

use super::{Gates, NONE, Numbers, Places, Rule, Sizes, destination_of, inverse_length, slot_of};
use crate::gated_delta::MAX_TOKENS;
use crate::intrinsics::{Target, shuffle_xor};

/// How [`lanes_kernel`] is compiled.
///
/// A few neighbouring lanes share some rows of a state and keep them in registers while all tokens pass: in f32, but those of a single
/// token, which are rounded before they are needed again, as they are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LanesBlueprint {
    /// Lanes that share a row, and vectors of it that each has.
    pub lanes: u32,
    pub steps: u32,
    /// Rows that they share.
    pub rows: u32,
    /// Whether there is one token.
    pub single: bool,
    /// Lanes of a plane, and planes of a cube.
    pub plane: u32,
    pub planes: u32,
    pub rule: Rule,
    pub target: Target,
}

impl LanesBlueprint {
    /// Groups of lanes of a cube, and so from one row of a group to its next.
    const fn stride(self) -> u32 {
        self.planes * (self.plane / self.lanes)
    }

    /// Rows of a cube.
    pub const fn cube_rows(self) -> u32 {
        self.stride() * self.rows
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

/// The lane's part of a row.
#[cube]
fn own_vectors<S: Float, N: Size>(
    rows: &[Vector<S, N>],
    from: usize,
    #[comptime] blueprint: LanesBlueprint,
) -> Array<Vector<S, N>> {
    let mut own = Array::<Vector<S, N>>::new(comptime!(blueprint.steps as usize));
    let lane = UNIT_POS_X % blueprint.lanes;
    #[unroll]
    for i in 0..blueprint.steps {
        let at = from + (lane + comptime!(i * blueprint.lanes)) as usize;
        own[i as usize] = rows[at];
    }
    own
}

/// What a lane needs of a token, as it was read: nothing is made of it before, which would wait for it.
#[derive(CubeType)]
struct Token<Q: Float, N: Size> {
    keys: Array<Vector<Q, N>>,
    queries: Array<Vector<Q, N>>,
    /// Of the rows.
    values: Array<Q>,
}

#[cube]
impl<Q: Float, N: Size> Token<Q, N> {
    fn new(#[comptime] blueprint: LanesBlueprint) -> Token<Q, N> {
        Token::<Q, N> {
            keys: Array::new(comptime!(blueprint.steps as usize)),
            queries: Array::new(comptime!(blueprint.steps as usize)),
            values: Array::new(comptime!(blueprint.rows as usize)),
        }
    }

    /// Begins to read token `token` of a sequence.
    #[allow(clippy::too_many_arguments)]
    fn read(
        &mut self,
        q: &[Vector<Q, N>],
        k: &[Vector<Q, N>],
        v: &[Q],
        sequence: u32,
        token: u32,
        head: u32,
        key_head: u32,
        first_row: u32,
        channels: u32,
        places: &Places,
        #[comptime] blueprint: LanesBlueprint,
    ) {
        let keys = own_vectors(k, places.k.of(sequence, token, key_head), blueprint);
        let queries = own_vectors(q, places.q.of(sequence, token, key_head), blueprint);
        #[unroll]
        for i in 0..comptime!(blueprint.steps as usize) {
            self.keys[i] = keys[i];
            self.queries[i] = queries[i];
        }
        let first = places.v.of(sequence, token, head);
        #[unroll]
        for r in 0..blueprint.rows {
            let row = first_row + comptime!(r * blueprint.stride());
            self.values[r as usize] = v[first + min(row, channels - 1) as usize];
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

/// The lane's part of the rows that there are goes to a state that begins at `first`.
#[cube]
fn store<H: Float, S: Float, N: Size>(
    state: &Array<Vector<H, N>>,
    to: &mut [Vector<S, N>],
    first: usize,
    row_vectors: usize,
    first_row: u32,
    channels: u32,
    #[comptime] blueprint: LanesBlueprint,
) {
    let lane = UNIT_POS_X % blueprint.lanes;
    #[unroll]
    for r in 0..blueprint.rows {
        let row = first_row + comptime!(r * blueprint.stride());
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
    H: Float,
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
    #[define(Q, A, B, D, S, H, R, W, C)] _dtypes: [ElemType; 9],
) {
    let LanesBlueprint {
        lanes,
        steps,
        rows,
        single,
        plane,
        rule,
        ..
    } = comptime!(blueprint);
    // Divisions by what is known ahead would take registers that others have to have.
    let blocks = sizes.channels.div_ceil(comptime!(blueprint.cube_rows()));
    let cube = CUBE_POS as u32;
    let block = cube % blocks;
    let head = cube / blocks % sizes.heads;
    let sequence = cube / blocks / sizes.heads;
    let key_head = head / sizes.sharing;
    // Cubes past the end repeat the last sequence's work up to the barrier.
    let present = sequence < sizes.batch;
    let sequence = min(sequence, sizes.batch - 1);
    let lane = UNIT_POS_X % lanes;
    let group = UNIT_POS_Y * comptime!(plane / lanes) + UNIT_POS_X / lanes;
    let stride = comptime!(blueprint.stride());
    let first_row = block * comptime!(blueprint.cube_rows()) + group;
    let state_vectors = sizes.channels as usize * sizes.vectors as usize;
    let out_token = sizes.heads as usize * sizes.channels as usize;
    let first_token = sequence as usize * sizes.tokens as usize;
    let out_start = first_token * out_token + head as usize * sizes.channels as usize;
    let states_start = (first_token * sizes.heads as usize + head as usize) * state_vectors;
    let states_token = sizes.heads as usize * state_vectors;

    // All that no slot has to be known for is asked for before the slot is waited for.
    let raw_slot = read_slots[sequence as usize];
    let own_token = min(UNIT_POS, sizes.tokens - 1);
    let gates = Gates::read(a, b, a_log, dt_bias, sequence, own_token, head, &places);
    let mut coming = Token::<Q, N>::new(blueprint);
    coming.read(
        q,
        k,
        v,
        sequence,
        0u32,
        head,
        key_head,
        first_row,
        sizes.channels,
        &places,
        blueprint,
    );
    let slot = slot_of::<R>(raw_slot, sizes.slots, rule);
    let alive = present && slot != NONE;
    let mut state = Array::<Vector<H, N>>::new(comptime!((rows * steps) as usize));
    if alive {
        let from = slot as usize * places.slot + head as usize * places.pool_head;
        #[unroll]
        for r in 0..rows {
            let row = min(first_row + comptime!(r * stride), sizes.channels - 1);
            let own = own_vectors(&*pool, from + row as usize * places.row, blueprint);
            #[unroll]
            for i in 0..steps {
                state[comptime!((r * steps + i) as usize)] = Vector::cast_from(own[i as usize]);
            }
        }
    }
    let mut decays = Shared::<[f32]>::new_slice(MAX_TOKENS);
    let mut strengths = Shared::<[f32]>::new_slice(MAX_TOKENS);
    if UNIT_POS < sizes.tokens {
        decays[own_token as usize] = gates.decay(numbers.threshold);
        strengths[own_token as usize] = gates.strength();
    }
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

        let mut token = 0u32;
        while token < sizes.tokens {
            let mut keys = Array::<Vector<f32, N>>::new(comptime!(steps as usize));
            let mut queries = Array::<Vector<f32, N>>::new(comptime!(steps as usize));
            let mut values = Array::<f32>::new(comptime!(rows as usize));
            #[unroll]
            for i in 0..comptime!(steps as usize) {
                keys[i] = Vector::cast_from(coming.keys[i]);
                queries[i] = Vector::cast_from(coming.queries[i]);
            }
            #[unroll]
            for r in 0..comptime!(rows as usize) {
                values[r] = f32::cast_from(coming.values[r]);
            }
            if comptime!(!single) && token + 1 < sizes.tokens {
                coming.read(
                    q,
                    k,
                    v,
                    sequence,
                    token + 1,
                    head,
                    key_head,
                    first_row,
                    sizes.channels,
                    &places,
                    blueprint,
                );
            }

            // What key and query find in the state as it is, and in each other: one exchange between the lanes for all of a token.
            let mut sums = Array::<f32>::new(comptime!((3 + 2 * rows) as usize));
            #[unroll]
            for i in 0..comptime!((3 + 2 * rows) as usize) {
                sums[i] = 0.0f32;
            }
            #[unroll]
            for i in 0..comptime!(steps as usize) {
                sums[0] = dot(keys[i], queries[i], sums[0]);
                if comptime!(rule.l2_norm) {
                    sums[1] = dot(keys[i], keys[i], sums[1]);
                    sums[2] = dot(queries[i], queries[i], sums[2]);
                }
                #[unroll]
                for r in 0..comptime!(rows as usize) {
                    let own = Vector::<f32, N>::cast_from(state[comptime!(r * steps as usize + i)]);
                    let (of_key, of_query) = comptime!((3 + 2 * r, 4 + 2 * r));
                    sums[of_key] = dot(own, keys[i], sums[of_key]);
                    sums[of_query] = dot(own, queries[i], sums[of_query]);
                }
            }
            group_sums(&mut sums, comptime!(3 + 2 * rows), blueprint);
            let key_factor = inverse_length(sums[1], rule);
            let query_factor = inverse_length(sums[2], rule) * numbers.scale;
            let decay = decays[token as usize];
            let strength = strengths[token as usize];
            #[unroll]
            for r in 0..comptime!(rows as usize) {
                let found = sums[comptime!(3 + 2 * r)] * decay * key_factor;
                let learned = (values[r] - found) * strength * key_factor;
                #[unroll]
                for i in 0..comptime!(steps as usize) {
                    let at = comptime!(r * steps as usize + i);
                    let own = Vector::<f32, N>::cast_from(state[at]);
                    let own = own * Vector::new(decay) + keys[i] * Vector::new(learned);
                    state[at] = Vector::cast_from(own);
                }
                let output = sums[comptime!(4 + 2 * r)] * decay + sums[0] * learned;
                values[r] = output * query_factor;
            }
            let outputs = out_start + token as usize * out_token;
            #[unroll]
            for r in 0..rows {
                let row = first_row + comptime!(r * stride);
                if lane == 0 && row < sizes.channels {
                    out[outputs + row as usize] = Q::cast_from(values[r as usize]);
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
                let mut zeros = Array::<Vector<H, N>>::new(comptime!((rows * steps) as usize));
                #[unroll]
                for i in 0..comptime!((rows * steps) as usize) {
                    zeros[i] = Vector::new(H::from_int(0));
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
