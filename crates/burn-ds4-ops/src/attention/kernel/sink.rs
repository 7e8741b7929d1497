//! Attention with a sink, for few queries.

use cubecl::prelude::*;

use super::heads::{CHUNK, Chunk, Heads};
use super::meeting::meet;
use crate::attention::MASKED;
use crate::intrinsics::Target;

/// How [`sink_kernel`] is compiled.
///
/// A cube has a few heads of one query, and a [stretch](Stretch) of its columns. Its planes share the columns out in chunks, counted from the
/// first of the window and from the first compressed row, and read every row once, as key and as value, for all heads of the cube; each keeps
/// a softmax of its own, and these meet in shared memory, plane by plane. Stretches meet in [`join_kernel`](super::join_kernel). So nothing but
/// the grid depends on the number of queries, and what is hidden behind all else changes nothing.
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
    /// Columns of a stretch: a multiple of [`CHUNK`].
    pub stretch: u32,
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

/// What a cube has of the columns of its query: those of the window, up to a whole chunk, and then the compressed rows, in stretches of one
/// length.
#[derive(CubeType)]
pub(super) struct Stretch {
    /// The first, and the end.
    pub first: u32,
    pub end: u32,
    /// The first of all that is a compressed row.
    pub rows: u32,
}

#[cube]
impl Stretch {
    /// The cube's, with `seen` compressed rows.
    pub fn new(sizes: &Sizes, seen: u32, #[comptime] blueprint: SinkBlueprint) -> Stretch {
        let rows = (sizes.span + comptime!(CHUNK - 1)) / CHUNK * CHUNK;
        let first = CUBE_POS_Z * blueprint.stretch;
        Stretch {
            first,
            end: min(first + blueprint.stretch, rows + seen),
            rows,
        }
    }

    /// The number of a column, or that of the first one, among the compressed rows.
    pub fn row(&self, column: u32) -> u32 {
        max(column, self.rows) - self.rows
    }
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
    let stretch = Stretch::new(&sizes, sizes.seen, blueprint);
    let mut first = stretch.first + UNIT_POS_Y * CHUNK;
    while first < min(stretch.end, sizes.span) {
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
