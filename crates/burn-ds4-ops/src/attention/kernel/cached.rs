//! Attention with a sink, for few queries, over rows where a cache keeps them.

use cubecl::prelude::*;

use super::heads::{CHUNK, Chunk, Heads};
use super::meeting::meet;
use super::rotate::Table;
use super::sight::Sight;
use super::sink::{SinkBlueprint, Sizes, Stretch, Strides};
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
    let first_head = CUBE_POS_X * sink.heads;
    let sight = Sight::new::<P>(start, token, ratio, &sizes, &table);
    let (sequence, query) = (sight.sequence as usize, sight.query as usize);
    let own = sequence * strides.queries_sequence + query * strides.query;
    let mut heads =
        Heads::<N>::new::<F>(queries, sinks, own, first_head, &sizes, strides.head, sink);
    heads.normalize_and_turn(
        angles,
        sight.angle,
        &table,
        sizes.vectors,
        epsilon,
        blueprint.kept,
    );

    let mut seen = sizes.seen;
    if picks.is_none() {
        seen = min(seen, sight.visible);
    }
    let stretch = Stretch::new(&sizes, seen, sink);
    let mut first = stretch.first + UNIT_POS_Y * CHUNK;
    while first < min(stretch.end, sizes.span) {
        let mut chunk = Chunk::new();
        #[unroll]
        for c in 0..CHUNK {
            let slot = sight.slot(first + c, &sizes) as usize;
            chunk.biases[c as usize] = select(sight.sees(first + c, &sizes), 0.0f32, MASKED);
            chunk.starts[c as usize] =
                sequence * strides.window_sequence + slot * strides.window_row;
        }
        if chunk.is_seen() {
            heads.attend::<F>(window, &chunk, sizes.vectors, scale);
        }
        first += comptime!(CHUNK * sink.planes);
    }

    let end = stretch.row(stretch.end);
    let mut first = stretch.row(stretch.first) + UNIT_POS_Y * CHUNK;
    while first < end {
        let mut chunk = Chunk::new();
        #[unroll]
        for c in 0..CHUNK {
            let mut inside = first + c < end;
            let place = select(inside, first + c, first);
            let at = token as usize * sizes.seen as usize + place as usize;
            let picked: ComptimeOption<I> = picks.map(|picks| picks[at]);
            let picked = picked.unwrap_or_else(|| I::cast_from(place));
            inside = inside && picked >= I::from_int(0) && picked < I::cast_from(sight.visible);
            let row = select(inside, u32::cast_from(picked), 0u32) as usize;
            chunk.biases[c as usize] = select(inside, 0.0f32, MASKED);
            chunk.starts[c as usize] = sequence * strides.rows_sequence + row * strides.row;
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
        sight.angle,
        table.pairs,
        &sizes,
        kept,
        sink,
    );
}
