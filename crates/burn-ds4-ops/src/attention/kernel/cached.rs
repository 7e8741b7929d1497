//! Attention with a sink, for few queries, over rows where a cache keeps them.

use cubecl::prelude::*;

use super::heads::{CHUNK, Chunk, Heads};
use super::meeting::meet;
use super::rotate::Table;
use super::sink::{STRETCH, SinkBlueprint, Sizes, Strides};
use crate::attention::MASKED;

/// How [`cached_kernel`] is compiled: as [`sink_kernel`](super::sink_kernel), of whose queries and results the vectors from `kept` on turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CachedBlueprint {
    pub sink: SinkBlueprint,
    pub kept: u32,
}

/// [`sink_kernel`](super::sink_kernel) of queries as they were projected, over rows that are found, and seen, by positions. The stretches
/// are the same ones, counted from the first position of a query's window and from the first of all blocks.
///
/// - `window`: that of a position is in slot `position % sizes.columns`
/// - `rows`: number `r` is seen from position `(r + 1) * ratio - 1` on
/// - `start`: the first query's position of each sequence; one outside the table is of a sequence that is not there, which sees nothing
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn cached_kernel<F: Float, O: Float, I: Int, P: Int, N: Size>(
    queries: &[Vector<F, N>],
    window: &[Vector<F, N>],
    rows: &[Vector<F, N>],
    picks: ComptimeOption<&[I]>,
    sinks: &[f32],
    angles: &[f32],
    start: &[P],
    output: &mut [Vector<O, N>],
    shares: &mut [f32],
    sizes: Sizes,
    strides: Strides,
    table: Table,
    ratio: u32,
    epsilon: f32,
    scale: f32,
    #[comptime] blueprint: CachedBlueprint,
    #[define(F, O, I, P)] _dtypes: [ElemType; 4],
) {
    let sink = comptime!(blueprint.sink);
    let token = CUBE_POS_Y;
    let (sequence, query) = (token / sizes.count, token % sizes.count);
    let first_head = CUBE_POS_X * sink.heads;
    let given = start[sequence as usize];
    let there = given >= P::from_int(0) && given < P::cast_from(table.known);
    let position = select(there, u32::cast_from(given), 0u32) + query;
    // Positions up to the query's own.
    let known = select(there, position + 1, 0u32);
    let angle = table.at::<P>(given, query);

    let own = sequence as usize * strides.queries_sequence + query as usize * strides.query;
    let mut heads =
        Heads::<N>::new::<F>(queries, sinks, own, first_head, &sizes, strides.head, sink);
    heads.normalize_and_turn(
        angles,
        angle,
        &table,
        sizes.vectors,
        epsilon,
        blueprint.kept,
    );

    let slots = sizes.columns;
    let own_slot = position % slots;
    // That of the first position of the window, which may be before the first of all.
    let first_slot = (own_slot + slots + 1 - sizes.span) % slots;
    let stretch = CUBE_POS_Z;
    let span = select(stretch == 0u32, sizes.span, 0u32);
    let mut first = UNIT_POS_Y * CHUNK;
    while first < span {
        let mut chunk = Chunk::new();
        #[unroll]
        for c in 0..CHUNK {
            let column = first + c;
            let inside = column < sizes.span && column + known >= sizes.span;
            let slot = first_slot + column;
            let slot = select(slot < slots, slot, slot - slots);
            // What is not seen may be anything; the query's own row is seen.
            let slot = select(inside, slot, own_slot);
            chunk.biases[c as usize] = select(inside, 0.0f32, MASKED);
            chunk.starts[c as usize] =
                sequence as usize * strides.window_sequence + slot as usize * strides.window_row;
        }
        if chunk.is_seen() {
            heads.attend::<F>(window, &chunk, sizes.vectors, scale);
        }
        first += comptime!(CHUNK * sink.planes);
    }

    let visible = min(known / ratio, sizes.rows);
    let mut end = sizes.seen;
    if picks.is_none() {
        end = min(end, visible);
    }
    if comptime!(sink.split) {
        end = min(end, (stretch + 1) * STRETCH);
    }
    let mut first = stretch * STRETCH + UNIT_POS_Y * CHUNK;
    while first < end {
        let mut chunk = Chunk::new();
        #[unroll]
        for c in 0..CHUNK {
            let mut inside = first + c < end;
            let place = select(inside, first + c, first);
            let at = token as usize * sizes.seen as usize + place as usize;
            let picked: ComptimeOption<I> = picks.map(|picks| picks[at]);
            let picked = picked.unwrap_or_else(|| I::cast_from(place));
            inside = inside && picked >= I::from_int(0) && picked < I::cast_from(visible);
            let row = select(inside, u32::cast_from(picked), 0u32) as usize;
            chunk.biases[c as usize] = select(inside, 0.0f32, MASKED);
            chunk.starts[c as usize] =
                sequence as usize * strides.rows_sequence + row * strides.row;
        }
        if chunk.is_seen() {
            heads.attend::<F>(rows, &chunk, sizes.vectors, scale);
        }
        first += comptime!(CHUNK * sink.planes);
    }

    let kept = comptime!(Some(blueprint.kept));
    meet::<O, N>(
        &heads,
        sinks,
        angles,
        output,
        shares,
        angle,
        table.pairs,
        &sizes,
        kept,
        sink,
    );
}
