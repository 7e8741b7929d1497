//! The gated delta rule on tensor cores, for states in `bf16`.

mod ahead;
mod block;
mod fetch;
mod state;

use cubecl::prelude::*;

use super::{Counts, NONE, Numbers, Places, Rule, Sizes, decay, destination_of, slot_of, strength};
use crate::intrinsics::{await_copies, commit_copies, sync_planes};
use ahead::Ahead;
use block::{Grams, Products, Staged};
use fetch::{Item, fetched_at, stage_keys, write_rows};
use state::State;

/// Columns of a chunk: a quad of lanes reads 64 bytes of a row.
pub(crate) const CHUNK: u32 = 32;
/// Rows of a tile.
pub(crate) const TILE: u32 = 16;
/// Parts of an f32 in `bf16`.
const PARTS: u32 = 3;

/// How [`tiles_kernel`] is compiled, which needs PTX.
///
/// A plane has some rows of a state in registers, as it was read. What all keys and queries find in it are products of tiles; from
/// these, and from the products of keys and queries with each other, each lane gets what one row learns and puts out, token by token, and
/// the state afterwards is again a product of tiles. Meanwhile the next state is on its way to shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TilesBlueprint {
    /// Tokens of a sequence.
    pub tokens: u32,
    /// Chunks of 32 columns.
    pub chunks: u32,
    /// Tiles of 16 rows of a plane: one or two.
    pub tiles: u32,
    /// Planes that share a state or a part of it, and so many groups of them that are a cube.
    pub planes: u32,
    pub groups: u32,
    /// States of a group that are on their way or being read.
    pub depth: u32,
    pub rule: Rule,
}

impl TilesBlueprint {
    /// Tiles of 8 tokens.
    const fn sides(self) -> u32 {
        self.tokens.div_ceil(8)
    }

    /// Tokens of whole tiles.
    const fn padded(self) -> u32 {
        8 * self.sides()
    }

    /// Pairs of tokens: one or two, or those of whole tiles.
    const fn pairs(self) -> u32 {
        match self.tokens {
            1 | 2 => 1,
            3 | 4 => 2,
            _ => 4 * self.sides(),
        }
    }

    /// Words of what a row has learned: of every part the pairs of tokens, in whole tiles of four.
    const fn slots(self) -> u32 {
        (PARTS * self.pairs()).next_multiple_of(4)
    }

    /// Rows of a plane.
    const fn plane_rows(self) -> u32 {
        TILE * self.tiles
    }

    /// Rows of a group.
    pub const fn group_rows(self) -> u32 {
        self.planes * self.plane_rows()
    }

    /// Units of a group.
    const fn group_units(self) -> u32 {
        32 * self.planes
    }

    /// Vectors of a row of the state, a key or a query.
    const fn row_vectors(self) -> u32 {
        4 * self.chunks
    }

    /// Rows of a group that are fetched: of the state, the keys and the queries.
    const fn fetched_rows(self) -> u32 {
        self.group_rows() + 2 * self.padded()
    }

    /// Where in shared memory a column begins of whose elements each pair of tokens has a word: such that lanes that read together
    /// meet no bank twice, if there is one tile of tokens.
    const fn words(self, column: u32) -> u32 {
        column * (self.padded() / 2) + column / 8 * 8
    }

    /// Words of a group.
    const fn all_words(self) -> u32 {
        self.words(CHUNK * self.chunks)
    }

    /// Bytes of shared memory.
    pub const fn shared_bytes(self) -> usize {
        let fetched = self.depth * self.fetched_rows() * self.row_vectors() * 16;
        let rows = self.group_rows() * (self.product_pitch() + self.learned_pitch()) * 4;
        let grams = 2 * self.padded() * (self.padded() + 2) * 4;
        (self.groups * (fetched + rows + grams + self.all_words() * 4)) as usize
    }
}

/// All tokens of some rows of the `bf16` state of a head of a sequence at once, on tensor cores.
///
/// Arguments are those of [`lanes_kernel`](super::lanes_kernel); `q`, `k` and states are in vectors of 16 bytes.
#[cube(launch_unchecked, address_type = "dynamic")]
// What is known at compile time is asked by itself, so that the rest is left out.
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
pub(crate) fn tiles_kernel<Q: Float, A: Float, B: Float, D: Float, R: Int, W: Int, C: Int>(
    q: &[Vector<u32, Const<4>>],
    k: &[Vector<u32, Const<4>>],
    v: &[Q],
    a: &[A],
    b: &[B],
    a_log: &[f32],
    dt_bias: &[D],
    pool: &mut [Vector<u32, Const<4>>],
    read_slots: &[R],
    write_slots: ComptimeOption<&[W]>,
    accepted: ComptimeOption<&[C]>,
    out: &mut [Q],
    mut states: ComptimeOption<Box<[Vector<u32, Const<4>>]>>,
    sizes: Sizes,
    counts: Counts,
    places: Places,
    numbers: Numbers,
    #[comptime] blueprint: TilesBlueprint,
    #[define(Q, A, B, D, R, W, C)] _dtypes: [ElemType; 7],
) {
    let TilesBlueprint {
        tokens,
        chunks,
        tiles,
        planes,
        groups,
        depth,
        rule,
        ..
    } = comptime!(blueprint);
    let padded = comptime!(blueprint.padded());
    let group_rows = comptime!(blueprint.group_rows());
    let units = comptime!(blueprint.group_units());
    let side = UNIT_POS_Y / planes;
    let plane = UNIT_POS_Y % planes;
    let unit = plane * 32 + UNIT_POS_X;
    // Which token's gates are this unit's; most repeat the last one's.
    let gate = min(unit, comptime!(tokens - 1));
    let (group, quarter) = (UNIT_POS_X / 4, UNIT_POS_X % 4);
    let own_row =
        plane * comptime!(blueprint.plane_rows()) + UNIT_POS_X % comptime!(blueprint.plane_rows());
    // Where there are half as many rows as lanes, both halves have the same.
    let writes = UNIT_POS_X < comptime!(blueprint.plane_rows());

    let mut fetched = Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(
        (groups * depth * blueprint.fetched_rows() * blueprint.row_vectors()) as usize
    ));
    let mut keys = Shared::<[u32]>::new_slice(comptime!((groups * blueprint.all_words()) as usize));
    let mut decays = Shared::<[f32]>::new_slice(comptime!((groups * padded) as usize));
    let mut strengths = Shared::<[f32]>::new_slice(comptime!((groups * padded) as usize));
    let mut grams = Grams::new(blueprint);
    let mut products = Products::new(blueprint);
    let mut learned = Staged::new(blueprint);
    let first_fetched = side * comptime!(depth * blueprint.fetched_rows());
    let first_word = side * comptime!(blueprint.all_words());
    let first_gate = side * padded;
    let all = sizes.batch * sizes.heads * (sizes.channels / group_rows);
    let last = all - 1;
    let step = CUBE_COUNT as u32 * groups;
    let mut index = side * CUBE_COUNT as u32 + CUBE_POS as u32;

    // What is known of items ahead of time: of those that are fetched before the first is computed with, and the slot of the next.
    let mut raw_slots = Array::<R>::new(comptime!(depth as usize + 1));
    let mut ahead = Ahead::<Q, A, B, D>::new(depth, tokens);
    let next = Item::new(min(index + step * depth, last), &counts, blueprint);
    raw_slots[depth as usize] = read_slots[next.sequence as usize];
    #[unroll]
    for i in 0..depth {
        let item = Item::new(min(index + step * i, last), &counts, blueprint);
        raw_slots[i as usize] = read_slots[item.sequence as usize];
        ahead.load(i, v, a, b, a_log, dt_bias, &item, own_row, gate, &places);
    }

    let mut slots = Array::<u32>::new(comptime!(depth as usize));
    #[unroll]
    for i in 0..depth {
        slots[i as usize] = slot_of::<R>(raw_slots[i as usize], sizes.slots, rule);
        let coming = index + step * i;
        if coming < all {
            Item::new(coming, &counts, blueprint).fetch(
                q,
                k,
                &*pool,
                &mut fetched,
                first_fetched + comptime!(i * blueprint.fetched_rows()),
                slots[i as usize],
                &counts,
                &places,
                blueprint,
            );
        }
        commit_copies();
    }
    let mut raw_slot = raw_slots[depth as usize];

    // Tokens that there are none of stay zeros.
    let rows_of_tokens = comptime!(2 * padded);
    let mut at = unit;
    while at < comptime!(depth * rows_of_tokens * blueprint.row_vectors()) {
        let row = at / comptime!(blueprint.row_vectors());
        let vector = at % comptime!(blueprint.row_vectors());
        if row % padded >= tokens {
            let buffer = row / rows_of_tokens * comptime!(blueprint.fetched_rows());
            let to = first_fetched + buffer + group_rows + row % rows_of_tokens;
            fetched[fetched_at(to, vector, blueprint) as usize] = Vector::new(0u32);
        }
        at += units;
    }
    let mut at = unit;
    while at < comptime!(blueprint.all_words()) {
        keys[(first_word + at) as usize] = 0u32;
        at += units;
    }

    let mut buffer = first_fetched;
    while index < all {
        let item = Item::new(index, &counts, blueprint);
        let first_row = item.row + plane * comptime!(blueprint.plane_rows());
        let slot = slots[0];
        let alive = slot != NONE;
        let key_rows = buffer + group_rows;
        let query_rows = key_rows + padded;
        let plane_rows = buffer + plane * comptime!(blueprint.plane_rows());
        let destination =
            destination_of::<W, C>(&write_slots, &accepted, item.sequence, slot, &sizes, rule);
        let (target, kept) = (destination.slot, destination.kept);
        await_copies(comptime!(depth - 1));
        sync_planes(side, planes);
        if unit < tokens {
            let x = (f32::cast_from(ahead.a[0]), f32::cast_from(ahead.dt_bias[0]));
            let at = (first_gate + unit) as usize;
            decays[at] = decay(x.0, x.1, ahead.a_log[0], numbers.threshold);
            strengths[at] = strength(f32::cast_from(ahead.b[0]));
        }
        let mut values = Array::<f32>::new(comptime!(tokens as usize));
        #[unroll]
        for token in 0..comptime!(tokens as usize) {
            values[token] = f32::cast_from(ahead.values[token]);
        }
        let mut state = State {
            words: Array::new(comptime!((2 * tiles * chunks) as usize)),
            blueprint,
        };
        #[unroll]
        for line in 0..comptime!(2 * tiles) {
            #[unroll]
            for chunk in 0..chunks {
                let row = plane_rows + comptime!(8 * line) + group;
                let at = fetched_at(row, comptime!(4 * chunk) + quarter, blueprint);
                state.words[comptime!((line * chunks + chunk) as usize)] = fetched[at as usize];
            }
        }
        stage_keys(&fetched, &mut keys, key_rows, first_word, unit, blueprint);
        products.multiply(
            &state,
            &fetched,
            key_rows,
            query_rows,
            &mut grams,
            side,
            numbers.scale,
        );
        sync_planes(side, planes);

        #[unroll]
        for i in 1..depth {
            slots[comptime!(i as usize - 1)] = slots[i as usize];
        }
        let coming_slot = slot_of::<R>(raw_slot, sizes.slots, rule);
        slots[comptime!(depth as usize - 1)] = coming_slot;
        let coming = index + step * depth;
        let item_coming = Item::new(min(coming, last), &counts, blueprint);
        // Before any rows that it would come after.
        ahead.shift();
        let newest = comptime!(depth - 1);
        ahead.load(
            newest,
            v,
            a,
            b,
            a_log,
            dt_bias,
            &item_coming,
            own_row,
            gate,
            &places,
        );
        let after = Item::new(min(coming + step, last), &counts, blueprint);
        raw_slot = read_slots[after.sequence as usize];

        let out_token = sizes.heads as usize * sizes.channels as usize;
        let first_token = item.sequence as usize * sizes.tokens as usize;
        let out_start = first_token * out_token
            + item.head as usize * sizes.channels as usize
            + (item.row + own_row) as usize;
        let state_vectors = sizes.channels as usize * sizes.vectors as usize;
        let states_start = (first_token * sizes.heads as usize + item.head as usize)
            * state_vectors
            + first_row as usize * sizes.vectors as usize;
        let states_token = sizes.heads as usize * state_vectors;
        if alive {
            let to = target as usize * places.slot
                + item.head as usize * places.pool_head
                + first_row as usize * places.row;
            if comptime!(rule.written && accepted.is_some()) {
                if kept == 0 && target != NONE && target != slot {
                    write_rows(&fetched, plane_rows, pool, to, places.row, blueprint);
                }
            }
            let mut kept_carried = 1.0f32;
            let mut corrections = Array::<f32>::new(comptime!(tokens as usize));
            let mut carried = 1.0f32;
            #[unroll]
            for token in 0..tokens {
                let at = (first_gate + token) as usize;
                let decay = decays[at];
                carried *= decay;
                let output = products.step(
                    &grams,
                    &mut corrections,
                    values[token as usize],
                    decay,
                    carried,
                    strengths[at],
                    side,
                    token,
                );
                if writes {
                    let at = out_start + comptime!(token as usize) * out_token;
                    out[at] = Q::cast_from(output);
                }
                let after = comptime!(token + 1);
                #[comptime]
                if let ComptimeOption::Some(states) = states.as_mut() {
                    learned.put(&corrections, after);
                    let after = after.runtime();
                    let first = states_start + comptime!(token as usize) * states_token;
                    state.store(
                        carried,
                        &learned,
                        &keys,
                        first_word,
                        after,
                        &mut fetched,
                        plane_rows,
                        states,
                        first,
                        sizes.vectors as usize,
                        true,
                    );
                }
                if comptime!(rule.written && (accepted.is_some() || after == tokens)) {
                    if kept == after {
                        learned.put(&corrections, after);
                        kept_carried = carried;
                    }
                }
            }
            if comptime!(rule.written) {
                if kept > 0 && target != NONE {
                    state.store(
                        kept_carried,
                        &learned,
                        &keys,
                        first_word,
                        kept,
                        &mut fetched,
                        plane_rows,
                        pool,
                        to,
                        places.row,
                        false,
                    );
                }
            }
        } else {
            #[unroll]
            for token in 0..tokens {
                if writes {
                    let at = out_start + comptime!(token as usize) * out_token;
                    out[at] = Q::from_int(0);
                }
                #[comptime]
                if let ComptimeOption::Some(states) = states.as_mut() {
                    let first = states_start + comptime!(token as usize) * states_token;
                    let lane = group as usize * sizes.vectors as usize + quarter as usize;
                    #[unroll]
                    for line in 0..comptime!(2 * tiles as usize) {
                        #[unroll]
                        for chunk in 0..comptime!(chunks as usize) {
                            let at = first + comptime!(8 * line) * sizes.vectors as usize + lane;
                            states[at + comptime!(4 * chunk)] = Vector::new(0u32);
                        }
                    }
                }
            }
        }
        // While others are computed with, this one's place is filled.
        if coming < all {
            item_coming.fetch(
                q,
                k,
                &*pool,
                &mut fetched,
                buffer,
                coming_slot,
                &counts,
                &places,
                blueprint,
            );
        }
        commit_copies();

        index += step;
        buffer += comptime!(blueprint.fetched_rows());
        if buffer == first_fetched + comptime!(depth * blueprint.fetched_rows()) {
            buffer = first_fetched;
        }
    }
}
