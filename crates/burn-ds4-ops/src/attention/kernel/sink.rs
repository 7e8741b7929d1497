//! Attention with a sink, for few queries.

use cubecl::prelude::*;

use super::heads::{CHUNK, Chunk, Heads};
use super::weight;
use crate::attention::{MASKED, TINY};
use crate::intrinsics::Target;

/// Compressed rows of a cube.
pub(crate) const STRETCH: u32 = 128;

/// How [`sink_kernel`] is compiled.
///
/// A cube has a few heads of one query, and a stretch of its columns: the first stretch is the window and the first [`STRETCH`]
/// compressed rows, and so many rows are each of the others. Its planes share the columns out in chunks, counted from the stretch's first, and
/// read every row once, as key and as value, for all heads of the cube; each keeps a softmax of its own, and these meet in shared memory, plane
/// by plane. Stretches meet in [`join_kernel`]. So nothing but the grid depends on the number of queries, and what is hidden behind all else
/// changes nothing.
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

    let cube_heads = comptime!(blueprint.heads);
    let plane_vectors = comptime!((blueprint.steps * blueprint.plane) as usize);
    let mut maxima =
        Shared::<[f32]>::new_slice(comptime!((blueprint.planes * cube_heads) as usize));
    let mut totals =
        Shared::<[f32]>::new_slice(comptime!((blueprint.planes * cube_heads) as usize));
    let mut stage =
        Shared::<[Vector<f32, N>]>::new_slice(comptime!(blueprint.planes as usize * plane_vectors));
    if UNIT_POS_X == 0 {
        #[unroll]
        for h in 0..cube_heads {
            maxima[(UNIT_POS_Y * cube_heads + h) as usize] = heads.maxima[h as usize];
            totals[(UNIT_POS_Y * cube_heads + h) as usize] = heads.totals[h as usize];
        }
    }
    sync_cube();
    #[unroll]
    for h in 0..cube_heads {
        let head = first_head + h;
        let mut maximum = maxima[h as usize];
        #[unroll]
        for plane in 1..blueprint.planes {
            maximum = max(
                maximum,
                maxima[comptime!((plane * cube_heads + h) as usize)],
            );
        }
        let mut total = 0.0f32;
        #[unroll]
        for plane in 0..blueprint.planes {
            let at = comptime!((plane * cube_heads + h) as usize);
            total += totals[at] * weight(maxima[at] - maximum, blueprint.target);
        }
        let share = weight(heads.maxima[h as usize] - maximum, blueprint.target);
        #[unroll]
        for step in 0..blueprint.steps {
            let at = UNIT_POS_Y as usize * plane_vectors
                + (UNIT_POS_X + step * blueprint.plane) as usize;
            let sum = heads.sums[comptime!((h * blueprint.steps + step) as usize)];
            stage[at] = sum * Vector::new(share);
        }
        sync_cube();
        let mut divisor = 1.0f32;
        let mut own = token * sizes.heads + head;
        if comptime!(blueprint.split) {
            let all = CUBE_COUNT_Y * sizes.heads;
            own += stretch * all;
            if UNIT_POS == 0 && head < sizes.heads {
                shares[own as usize] = maximum;
                shares[(CUBE_COUNT_Z * all + own) as usize] = total;
            }
        } else {
            let sink = sinks[min(head, sizes.heads - 1) as usize];
            divisor = with_sink(total, sink, maximum, blueprint.target);
        }
        let mut vector = UNIT_POS;
        while vector < sizes.vectors && head < sizes.heads {
            let mut sum = stage[vector as usize];
            #[unroll]
            for plane in 1..comptime!(blueprint.planes as usize) {
                sum += stage[plane * plane_vectors + vector as usize];
            }
            let at = own as usize * sizes.vectors as usize + vector as usize;
            output[at] = Vector::cast_from(sum / Vector::new(divisor));
            vector += comptime!(blueprint.planes * blueprint.plane);
        }
        if comptime!(h + 1 < cube_heads) {
            sync_cube();
        }
    }
}

/// The sum of all exponentials relative to `maximum`, the sink's included.
#[cube]
fn with_sink(total: f32, sink: f32, maximum: f32, #[comptime] target: Target) -> f32 {
    max(total + weight(max(sink, MASKED) - maximum, target), TINY)
}

/// Joins the stretches of [`sink_kernel`], a cube for a head of a query: `output` is `[batch, count, heads, vectors]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn join_kernel<O: Float, N: Size>(
    sums: &[Vector<f32, N>],
    shares: &[f32],
    sinks: &[f32],
    output: &mut [Vector<O, N>],
    stretches: u32,
    vectors: u32,
    #[comptime] target: Target,
    #[define(O)] _dtype: ElemType,
) {
    let head = CUBE_POS_X;
    let all = CUBE_COUNT_X * CUBE_COUNT_Y;
    let own = CUBE_POS_Y * CUBE_COUNT_X + head;
    let mut maximum = shares[own as usize];
    for stretch in 1..stretches {
        maximum = max(maximum, shares[(stretch * all + own) as usize]);
    }
    let mut total = 0.0f32;
    for stretch in 0..stretches {
        let at = stretch * all + own;
        let share = weight(shares[at as usize] - maximum, target);
        total += shares[(stretches * all + at) as usize] * share;
    }
    let divisor = with_sink(total, sinks[head as usize], maximum, target);
    let mut vector = UNIT_POS;
    while vector < vectors {
        let mut sum = Vector::<f32, N>::new(0.0f32);
        for stretch in 0..stretches {
            let at = stretch * all + own;
            let share = weight(shares[at as usize] - maximum, target);
            sum += sums[at as usize * vectors as usize + vector as usize] * Vector::new(share);
        }
        let at = own as usize * vectors as usize + vector as usize;
        output[at] = Vector::cast_from(sum / Vector::new(divisor));
        vector += CUBE_DIM;
    }
}
