//! Attention with a sink, for few queries.

use cubecl::prelude::*;

use super::heads::{CHUNK, Chunk, Heads};
use super::meeting::meet;
use crate::attention::MASKED;
use crate::intrinsics::Target;

/// Compressed rows of a cube.
pub(crate) const STRETCH: u32 = 128;

/// How [`sink_kernel`] is compiled.
///
/// A cube has a few heads of one query, and a stretch of its columns: the first stretch is the window and the first [`STRETCH`]
/// compressed rows, and so many rows are each of the others. Its planes share the columns out in chunks, counted from the stretch's first, and
/// read every row once, as key and as value, for all heads of the cube; each keeps a softmax of its own, and these meet in shared memory, plane
/// by plane. Stretches meet in [`join_kernel`](super::join_kernel). So nothing but the grid depends on the number of queries, and what is
/// hidden behind all else changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SinkBlueprint {
    /// Heads of a cube.
    pub heads: u32,
    /// Planes of a cube.
    pub planes: u32,
    /// Lanes of a plane.
    pub plane: u32,
    /// Vectors of a row to a lane.
    pub steps: u32,
    /// Whether the lanes' vectors are those of a row, and none beyond.
    pub even: bool,
    /// Whether there are several stretches.
    pub split: bool,
    /// What the instructions are that the kernel may use.
    pub target: Target,
}

/// How much there is.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Sizes {
    /// Queries of a sequence.
    pub count: u32,
    /// Heads of a query.
    pub heads: u32,
    /// Vectors of a row.
    pub vectors: u32,
    /// Rows of a sequence's window, and those of them that a query sees.
    pub columns: u32,
    pub span: u32,
    /// Compressed rows of a sequence, and those of them that a query sees or picks.
    pub rows: u32,
    pub seen: u32,
}

/// Vectors from one to the next.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Strides {
    pub queries_sequence: usize,
    pub query: usize,
    pub head: usize,
    pub window_sequence: usize,
    pub window_row: usize,
    pub rows_sequence: usize,
    pub row: usize,
}

/// One softmax over the rows of the window, compressed rows and a sink, whose share is dropped.
///
/// - `window`: query `i` of a sequence sees `span` rows, the last but `count - 1 - i` among them
/// - `rows`: all queries of a sequence see the first `seen`, or each has `seen` of its own in `picks`; a pick that is no row is hidden
/// - `window_bias`, `rows_bias`: `[batch, columns]`, `[batch, count, rows]`
/// - `output`: `[batch, count, heads, vectors]`; of several stretches, each one's sums relative to its largest logit, in f32
/// - `shares`: of several stretches, their largest logits and then their sums of exponentials: `[2, stretches, batch, count, heads]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn sink_kernel<F: Float, O: Float, I: Int, N: Size>(
    queries: &[Vector<F, N>],
    window: &[Vector<F, N>],
    window_bias: &[f32],
    rows: &[Vector<F, N>],
    rows_bias: &[f32],
    picks: ComptimeOption<&[I]>,
    sinks: &[f32],
    output: &mut [Vector<O, N>],
    shares: &mut [f32],
    sizes: Sizes,
    strides: Strides,
    scale: f32,
    #[comptime] blueprint: SinkBlueprint,
    #[define(F, O, I)] _dtypes: [ElemType; 3],
) {
    let token = CUBE_POS_Y;
    let (sequence, query) = (token / sizes.count, token % sizes.count);
    let first_head = CUBE_POS_X * blueprint.heads;
    let own = sequence as usize * strides.queries_sequence + query as usize * strides.query;
    let mut heads = Heads::<N>::new::<F>(
        queries,
        sinks,
        own,
        first_head,
        &sizes,
        strides.head,
        blueprint,
    );

    let first_column = sizes.columns + 1 - sizes.count - sizes.span + query;
    let stretch = CUBE_POS_Z;
    let span = select(stretch == 0u32, sizes.span, 0u32);
    let mut first = UNIT_POS_Y * CHUNK;
    while first < span {
        let mut chunk = Chunk::new();
        #[unroll]
        for c in 0..CHUNK {
            let inside = first + c < sizes.span;
            let column = first_column + select(inside, first + c, first);
            let bias = window_bias[(sequence * sizes.columns + column) as usize];
            chunk.biases[c as usize] = select(inside, bias, MASKED);
            chunk.starts[c as usize] =
                sequence as usize * strides.window_sequence + column as usize * strides.window_row;
        }
        if chunk.is_seen() {
            heads.attend::<F>(window, &chunk, sizes.vectors, scale);
        }
        first += comptime!(CHUNK * blueprint.planes);
    }

    let mut end = sizes.seen;
    if comptime!(blueprint.split) {
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
            inside = inside && picked >= I::from_int(0) && picked < I::cast_from(sizes.rows);
            let row = select(inside, u32::cast_from(picked), 0u32) as usize;
            let bias = rows_bias[token as usize * sizes.rows as usize + row];
            chunk.biases[c as usize] = select(inside, bias, MASKED);
            chunk.starts[c as usize] =
                sequence as usize * strides.rows_sequence + row * strides.row;
        }
        if chunk.is_seen() {
            heads.attend::<F>(rows, &chunk, sizes.vectors, scale);
        }
        first += comptime!(CHUNK * blueprint.planes);
    }

    meet::<O, N>(
        &heads, sinks, sinks, output, shares, 0usize, 0usize, &sizes, None, blueprint,
    );
}
