//! Attention with a sink, for few queries, over the rows of a cache.

use cubecl::prelude::*;

use super::combine::combine_planes;
use super::heads::{Heads, KV_GROUP, KvGroup};
use super::rotate::AngleTable;
use super::sink::{AttentionShape, AttentionStrides, KvSplit, SinkBlueprint};
use super::visibility::Visibility;
use crate::attention::MASKED;

/// Compile-time configuration of [`cached_kernel`]: as of [`sink_kernel`](super::sink_kernel), and
/// the vectors in front of queries and results that are not rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CachedBlueprint {
    pub sink: SinkBlueprint,
    pub unrotated: u32,
}

/// Computes [`sink_kernel`](super::sink_kernel) for queries as they were projected, over rows that
/// are located, and are visible, by position. The KV splits are the same, counted from the first
/// position of a query's window and from the first block.
///
/// - `window`: the row of a position is in slot `position % shape.columns`
/// - `rows`: row `r` is visible from position `(r + 1) * ratio - 1` on
/// - `start`: the position of the first query of each sequence. A sequence whose start is outside
///   the table is vacant: nothing is visible to it
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
    softmax_stats: &mut [f32],
    shape: AttentionShape,
    strides: AttentionStrides,
    table: AngleTable,
    ratio: u32,
    epsilon: f32,
    scale: f32,
    #[comptime] blueprint: CachedBlueprint,
    #[define(F, O, I, P)] _dtypes: [ElemType; 4],
) {
    let sink = comptime!(blueprint.sink);
    let token = CUBE_POS_Y;
    let first_head = CUBE_POS_X * sink.heads;
    let visibility = Visibility::new::<P>(start, token, ratio, &shape, &table);
    let (sequence, query) = (visibility.sequence as usize, visibility.query as usize);
    let own = sequence * strides.queries_sequence + query * strides.query;
    let mut heads =
        Heads::<N>::new::<F>(queries, sinks, own, first_head, &shape, strides.head, sink);
    heads.normalize_and_rotate(
        angles,
        visibility.angle,
        &table,
        shape.vectors,
        epsilon,
        blueprint.unrotated,
    );

    let mut selected = shape.selected;
    if picks.is_none() {
        selected = min(selected, visibility.visible_rows);
    }
    let split = KvSplit::new(&shape, selected, sink);
    let mut first = split.first + UNIT_POS_Y * KV_GROUP;
    while first < min(split.end, shape.span) {
        let mut group = KvGroup::new();
        #[unroll]
        for c in 0..KV_GROUP {
            let slot = visibility.slot(first + c, &shape) as usize;
            group.biases[c as usize] =
                select(visibility.is_visible(first + c, &shape), 0.0f32, MASKED);
            group.starts[c as usize] =
                sequence * strides.window_sequence + slot * strides.window_row;
        }
        if group.is_visible() {
            heads.attend::<F>(window, &group, shape.vectors, scale);
        }
        first += comptime!(KV_GROUP * sink.planes);
    }

    let end = split.row(split.end);
    let mut first = split.row(split.first) + UNIT_POS_Y * KV_GROUP;
    while first < end {
        let mut group = KvGroup::new();
        #[unroll]
        for c in 0..KV_GROUP {
            let mut inside = first + c < end;
            let index = select(inside, first + c, first);
            let at = token as usize * shape.selected as usize + index as usize;
            let picked: ComptimeOption<I> = picks.map(|picks| picks[at]);
            let picked = picked.unwrap_or_else(|| I::cast_from(index));
            inside = inside
                && picked >= I::from_int(0)
                && picked < I::cast_from(visibility.visible_rows);
            let row = select(inside, u32::cast_from(picked), 0u32) as usize;
            group.biases[c as usize] = select(inside, 0.0f32, MASKED);
            group.starts[c as usize] = sequence * strides.rows_sequence + row * strides.row;
        }
        if group.is_visible() {
            heads.attend::<F>(rows, &group, shape.vectors, scale);
        }
        first += comptime!(KV_GROUP * sink.planes);
    }

    let unrotated = comptime!(Some(blueprint.unrotated));
    combine_planes::<O, N>(
        &heads,
        sinks,
        angles,
        output,
        softmax_stats,
        visibility.angle,
        table.pairs,
        &shape,
        unrotated,
        sink,
    );
}
