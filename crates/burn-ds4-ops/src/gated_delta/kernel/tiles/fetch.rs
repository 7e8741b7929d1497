//! Copies of whole rows between device memory and shared memory.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::blueprint::TilesBlueprint;
use crate::gated_delta::kernel::{DeltaInputs, NO_SLOT, RowLayout, StatePool, WorkDivisors};
use crate::intrinsics::modulo;

/// The index in shared memory of vector `vector` of row `row`. In odd rows, the two 64-byte parts
/// of every 128 bytes are swapped, so that lanes that read 64 bytes of each of eight rows have no
/// bank conflicts.
#[cube]
pub(super) fn fetched_index(row: u32, vector: u32, #[comptime] blueprint: TilesBlueprint) -> u32 {
    let swizzle = if comptime!(blueprint.column_blocks.is_multiple_of(2)) {
        row % 2 * 4
    } else {
        0u32.runtime()
    };
    row * comptime!(blueprint.row_vectors()) + (vector ^ swizzle)
}

/// Starts to copy `rows` rows to shared memory, from row `to` on. `unit` is one of `units` that
/// divide the work.
#[cube]
fn fetch(
    from: &[Vector<u32, Const<4>>],
    layout: &RowLayout,
    fetched: &mut Shared<[Vector<u32, Const<4>>]>,
    to: u32,
    unit: u32,
    #[comptime] rows: u32,
    #[comptime] units: u32,
    #[comptime] blueprint: TilesBlueprint,
) {
    let vectors = comptime!(blueprint.row_vectors());
    let (row, vector) = (unit / vectors, unit % vectors);
    let mut from_at = layout.offset(row) + vector as usize;
    if comptime!(units.is_multiple_of(2 * vectors)) {
        // All rows that a unit copies are odd, or all are even.
        let to_at = fetched_index(to + row, vector, blueprint) as usize;
        let rows_at_once = comptime!(units / vectors);
        #[unroll]
        for i in 0..comptime!(rows.div_ceil(rows_at_once)) {
            if comptime!(rows.is_multiple_of(rows_at_once))
                || row + comptime!(i * rows_at_once) < rows
            {
                let to_at = to_at + comptime!((i * units) as usize);
                copy_async(
                    &from[from_at..from_at + 1],
                    &mut fetched[to_at..to_at + 1],
                    4u32,
                );
            }
            from_at += rows_at_once as usize * layout.stride;
        }
    } else {
        #[unroll]
        for i in 0..comptime!((rows * vectors).div_ceil(units)) {
            let at = unit + comptime!(i * units);
            if at < comptime!(rows * vectors) {
                let (row, vector) = (at / vectors, at % vectors);
                let from_at = layout.offset(row) + vector as usize;
                let to_at = fetched_index(to + row, vector, blueprint) as usize;
                copy_async(
                    &from[from_at..from_at + 1],
                    &mut fetched[to_at..to_at + 1],
                    4u32,
                );
            }
        }
    }
}

/// A block of rows of a state: one sequence, one head and the rows of one group of planes.
#[derive(CubeType)]
pub(super) struct StateBlock {
    pub sequence: u32,
    pub head: u32,
    /// The first of the group's rows.
    pub row: u32,
}

#[cube]
impl StateBlock {
    pub fn new(
        index: u32,
        divisors: &WorkDivisors,
        #[comptime] blueprint: TilesBlueprint,
    ) -> StateBlock {
        let (state, block) = divisors.blocks.div_mod(index);
        let (sequence, head) = divisors.heads.div_mod(state);
        StateBlock {
            sequence,
            head,
            row: block * comptime!(blueprint.group_rows()),
        }
    }

    /// Starts to copy the keys, the queries and, if there is a slot, the plane's rows of the state
    /// to the fetched rows from `first` on.
    pub fn fetch<Q: Float>(
        &self,
        inputs: &DeltaInputs<Vector<u32, Const<4>>, Q>,
        pool: &StatePool<Vector<u32, Const<4>>>,
        fetched: &mut Shared<[Vector<u32, Const<4>>]>,
        first: u32,
        slot: u32,
        divisors: &WorkDivisors,
        #[comptime] blueprint: TilesBlueprint,
    ) {
        let plane = modulo(UNIT_POS_Y, blueprint.planes);
        let unit = plane * 32 + UNIT_POS_X;
        let (tokens, units) = comptime!((blueprint.tokens, blueprint.group_units()));
        let to = first + comptime!(blueprint.group_rows());
        let key_head = divisors.heads_per_key.div(self.head);
        let keys = inputs.k.rows(self.sequence, key_head);
        let from = &inputs.k.elements;
        fetch(from, &keys, fetched, to, unit, tokens, units, blueprint);
        let to = to + comptime!(blueprint.padded());
        let queries = inputs.q.rows(self.sequence, key_head);
        let from = &inputs.q.elements;
        fetch(from, &queries, fetched, to, unit, tokens, units, blueprint);
        if slot != NO_SLOT {
            let rows = comptime!(blueprint.plane_rows());
            let row = plane * rows;
            let own = pool.rows(slot, self.head).skip(self.row + row);
            let from = &pool.vectors;
            let (to, unit) = (first + row, UNIT_POS_X);
            fetch(from, &own, fetched, to, unit, rows, 32u32, blueprint);
        }
    }
}

/// Writes the keys to shared memory column by column, with two tokens to a word.
#[cube]
pub(super) fn interleave_keys(
    fetched: &Shared<[Vector<u32, Const<4>>]>,
    keys: &mut Shared<[u32]>,
    first_row: u32,
    first_word: u32,
    unit: u32,
    #[comptime] blueprint: TilesBlueprint,
) {
    let vectors = comptime!(blueprint.row_vectors());
    let pairs = comptime!(blueprint.padded() / 2);
    let mut at = unit;
    while at < comptime!(blueprint.tokens.div_ceil(2) * vectors) {
        let vector = at % vectors;
        let pair = at / vectors;
        let low_row = first_row + 2 * pair;
        let low = fetched[fetched_index(low_row, vector, blueprint) as usize];
        let high = fetched[fetched_index(low_row + 1, vector, blueprint) as usize];
        let to = first_word + vector * comptime!(blueprint.column_offset(8)) + pair;
        #[unroll]
        for i in 0..4u32 {
            let (low, high) = (low.extract(i as usize), high.extract(i as usize));
            let even = (low & 0xffffu32) | (high << 16);
            let odd = (low >> 16) | (high & 0xffff_0000u32);
            keys[(to + comptime!(2 * i * pairs)) as usize] = even;
            keys[(to + comptime!((2 * i + 1) * pairs)) as usize] = odd;
        }
        at += comptime!(blueprint.group_units());
    }
}

/// Writes a plane's rows from shared memory to a state, whole rows at a time.
#[cube]
pub(super) fn write_rows(
    fetched: &Shared<[Vector<u32, Const<4>>]>,
    first_row: u32,
    to: &mut [Vector<u32, Const<4>>],
    layout: &RowLayout,
    #[comptime] blueprint: TilesBlueprint,
) {
    sync_plane();
    let vectors = comptime!(blueprint.row_vectors());
    let vector_count = comptime!(blueprint.plane_rows() * vectors);
    let (row, vector) = (UNIT_POS_X / vectors, UNIT_POS_X % vectors);
    if comptime!(32 % vectors == 0) {
        let rows_at_once = comptime!(32 / vectors);
        let mut to_at = layout.offset(row) + vector as usize;
        #[unroll]
        for i in 0..comptime!(vector_count / 32) {
            let at = fetched_index(
                first_row + row + comptime!(i * rows_at_once),
                vector,
                blueprint,
            );
            to[to_at] = fetched[at as usize];
            to_at += rows_at_once as usize * layout.stride;
        }
    } else {
        let mut at = UNIT_POS_X;
        while at < vector_count {
            let (row, vector) = (at / vectors, at % vectors);
            let from = fetched_index(first_row + row, vector, blueprint) as usize;
            to[layout.offset(row) + vector as usize] = fetched[from];
            at += 32;
        }
    }
    sync_plane();
}
