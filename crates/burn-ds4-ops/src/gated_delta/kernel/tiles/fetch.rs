//! What comes from memory in whole rows, and goes there.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::TilesBlueprint;
use crate::gated_delta::kernel::{Counts, NONE, Places};

/// Vector number `vector` of row number `row` in shared memory. Where rows are odd, halves of 128 bytes change places, so that lanes which
/// read 64 bytes of each of eight rows meet no bank twice.
#[cube]
pub(super) fn fetched_at(row: u32, vector: u32, #[comptime] blueprint: TilesBlueprint) -> u32 {
    let turn = if comptime!(blueprint.chunks.is_multiple_of(2)) {
        row % 2 * 4
    } else {
        0u32.runtime()
    };
    row * comptime!(blueprint.row_vectors()) + (vector ^ turn)
}

/// Begins to copy `rows` rows to shared memory, where they are from row `to` on; `unit` is one of `units` that share the work.
#[cube]
#[allow(clippy::too_many_arguments)]
fn fetch(
    from: &[Vector<u32, Const<4>>],
    first: usize,
    row_vectors: usize,
    fetched: &mut Shared<[Vector<u32, Const<4>>]>,
    to: u32,
    unit: u32,
    #[comptime] rows: u32,
    #[comptime] units: u32,
    #[comptime] blueprint: TilesBlueprint,
) {
    let vectors = comptime!(blueprint.row_vectors());
    let (row, vector) = (unit / vectors, unit % vectors);
    let mut from_at = first + row as usize * row_vectors + vector as usize;
    if comptime!(units.is_multiple_of(2 * vectors)) {
        // Rows that a unit copies are odd or even alike.
        let to_at = fetched_at(to + row, vector, blueprint) as usize;
        let lines = comptime!(units / vectors);
        #[unroll]
        for i in 0..comptime!(rows.div_ceil(lines)) {
            if comptime!(rows.is_multiple_of(lines)) || row + comptime!(i * lines) < rows {
                let to_at = to_at + comptime!((i * units) as usize);
                copy_async(
                    &from[from_at..from_at + 1],
                    &mut fetched[to_at..to_at + 1],
                    4u32,
                );
            }
            from_at += lines as usize * row_vectors;
        }
    } else {
        #[unroll]
        for i in 0..comptime!((rows * vectors).div_ceil(units)) {
            let at = unit + comptime!(i * units);
            if at < comptime!(rows * vectors) {
                let (row, vector) = (at / vectors, at % vectors);
                let from_at = first + row as usize * row_vectors + vector as usize;
                let to_at = fetched_at(to + row, vector, blueprint) as usize;
                copy_async(
                    &from[from_at..from_at + 1],
                    &mut fetched[to_at..to_at + 1],
                    4u32,
                );
            }
        }
    }
}

/// Rows of a state of a head of a sequence.
#[derive(CubeType)]
pub(super) struct Item {
    pub sequence: u32,
    pub head: u32,
    /// First of a group's rows.
    pub row: u32,
}

#[cube]
impl Item {
    pub fn new(index: u32, counts: &Counts, #[comptime] blueprint: TilesBlueprint) -> Item {
        let (state, block) = counts.blocks.div_mod(index);
        let (sequence, head) = counts.heads.div_mod(state);
        Item {
            sequence,
            head,
            row: block * comptime!(blueprint.group_rows()),
        }
    }

    /// Begins to copy the keys, the queries and, if there is a slot, the plane's rows to where `first` of the fetched rows is.
    #[allow(clippy::too_many_arguments)]
    pub fn fetch(
        &self,
        q: &[Vector<u32, Const<4>>],
        k: &[Vector<u32, Const<4>>],
        pool: &[Vector<u32, Const<4>>],
        fetched: &mut Shared<[Vector<u32, Const<4>>]>,
        first: u32,
        slot: u32,
        counts: &Counts,
        places: &Places,
        #[comptime] blueprint: TilesBlueprint,
    ) {
        let plane = UNIT_POS_Y % blueprint.planes;
        let unit = plane * 32 + UNIT_POS_X;
        let (tokens, units) = comptime!((blueprint.tokens, blueprint.group_units()));
        let to = first + comptime!(blueprint.group_rows());
        let key_head = counts.sharing.div(self.head);
        let from = places.k.of(self.sequence, 0u32, key_head);
        fetch(
            k,
            from,
            places.k.token,
            fetched,
            to,
            unit,
            tokens,
            units,
            blueprint,
        );
        let to = to + comptime!(blueprint.padded());
        let from = places.q.of(self.sequence, 0u32, key_head);
        fetch(
            q,
            from,
            places.q.token,
            fetched,
            to,
            unit,
            tokens,
            units,
            blueprint,
        );
        if slot != NONE {
            let rows = comptime!(blueprint.plane_rows());
            let row = plane * rows;
            let from = slot as usize * places.slot
                + self.head as usize * places.pool_head
                + (self.row + row) as usize * places.row;
            let unit = UNIT_POS_X;
            fetch(
                pool,
                from,
                places.row,
                fetched,
                first + row,
                unit,
                rows,
                32u32,
                blueprint,
            );
        }
    }
}

/// Keys of two tokens side by side, column by column, in shared memory.
#[cube]
pub(super) fn stage_keys(
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
        let low = fetched[fetched_at(low_row, vector, blueprint) as usize];
        let high = fetched[fetched_at(low_row + 1, vector, blueprint) as usize];
        let to = first_word + vector * comptime!(blueprint.words(8)) + pair;
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

/// Writes a plane's rows from shared memory to where they belong, whole lines at a time.
#[cube]
pub(super) fn write_rows(
    fetched: &Shared<[Vector<u32, Const<4>>]>,
    first_row: u32,
    to: &mut [Vector<u32, Const<4>>],
    first: usize,
    row_vectors: usize,
    #[comptime] blueprint: TilesBlueprint,
) {
    sync_plane();
    let vectors = comptime!(blueprint.row_vectors());
    let all = comptime!(blueprint.plane_rows() * vectors);
    let (row, vector) = (UNIT_POS_X / vectors, UNIT_POS_X % vectors);
    if comptime!(32 % vectors == 0) {
        let lines = comptime!(32 / vectors);
        let mut to_at = first + row as usize * row_vectors + vector as usize;
        #[unroll]
        for i in 0..comptime!(all / 32) {
            let at = fetched_at(first_row + row + comptime!(i * lines), vector, blueprint);
            to[to_at] = fetched[at as usize];
            to_at += lines as usize * row_vectors;
        }
    } else {
        let mut at = UNIT_POS_X;
        while at < all {
            let (row, vector) = (at / vectors, at % vectors);
            let from = fetched_at(first_row + row, vector, blueprint) as usize;
            to[first + row as usize * row_vectors + vector as usize] = fetched[from];
            at += 32;
        }
    }
    sync_plane();
}
