//! Attention with a sink, for few queries.

use cubecl::prelude::*;

use super::weight;
use crate::attention::{HIDDEN, MASKED};
use crate::intrinsics::{Target, group_sum};

/// Columns that a plane takes at a time.
const CHUNK: u32 = 4;
/// Below any sum of a softmax: its largest term is 1.
const TINY: f32 = 1e-30;

/// How [`sink_kernel`] is compiled.
///
/// A cube has a few heads of one query. Its planes share the columns out in chunks, counted from the query's first, and read every row
/// once, as key and as value, for all heads of the cube; each keeps a softmax of its own, and these meet in shared memory, plane
/// by plane. So nothing but the grid depends on the number of queries.
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

/// What a lane has of the heads of a cube.
#[derive(CubeType)]
struct Heads<N: Size> {
    /// Its vectors of the queries, and of the weighted sums of rows: `[heads, steps]`.
    queries: Array<Vector<f32, N>>,
    sums: Array<Vector<f32, N>>,
    /// Largest logit so far, and the sum of exponentials relative to it.
    maxima: Array<f32>,
    totals: Array<f32>,
    #[cube(comptime)]
    blueprint: SinkBlueprint,
}

/// A few rows: where they start, and how visible they are.
#[derive(CubeType)]
struct Chunk {
    starts: Array<usize>,
    biases: Array<f32>,
}

#[cube]
impl Chunk {
    fn new() -> Chunk {
        Chunk {
            starts: Array::new(comptime!(CHUNK as usize)),
            biases: Array::new(comptime!(CHUNK as usize)),
        }
    }

    /// Whether there is anything to see.
    fn is_seen(&self) -> bool {
        let mut best = self.biases[0];
        #[unroll]
        for c in 1..CHUNK {
            best = max(best, self.biases[c as usize]);
        }
        best > HIDDEN
    }
}

#[cube]
impl<N: Size> Heads<N> {
    fn new<F: Float>(
        queries: &[Vector<F, N>],
        sinks: &[f32],
        start: usize,
        first_head: u32,
        sizes: &Sizes,
        stride: usize,
        #[comptime] blueprint: SinkBlueprint,
    ) -> Heads<N> {
        let vectors = comptime!((blueprint.heads * blueprint.steps) as usize);
        let mut heads = Heads::<N> {
            queries: Array::new(vectors),
            sums: Array::new(vectors),
            maxima: Array::new(comptime!(blueprint.heads as usize)),
            totals: Array::new(comptime!(blueprint.heads as usize)),
            blueprint,
        };
        #[unroll]
        for h in 0..blueprint.heads {
            // Heads past the end repeat the last, and are not written.
            let head = min(first_head + h, sizes.heads - 1) as usize;
            #[unroll]
            for step in 0..blueprint.steps {
                let vector = UNIT_POS_X + step * blueprint.plane;
                let at = comptime!((h * blueprint.steps + step) as usize);
                heads.sums[at] = Vector::new(0.0f32);
                if comptime!(blueprint.even) {
                    heads.queries[at] =
                        Vector::cast_from(queries[start + head * stride + vector as usize]);
                } else {
                    let inside = vector < sizes.vectors;
                    let vector = select(inside, vector, 0u32);
                    let query: Vector<f32, N> =
                        Vector::cast_from(queries[start + head * stride + vector as usize]);
                    // Zeros, so that what the lane reads of a row instead adds nothing.
                    let mut own = Vector::new(0.0f32);
                    if inside {
                        own = query;
                    }
                    heads.queries[at] = own;
                }
            }
            heads.maxima[h as usize] = max(sinks[head], HIDDEN);
            heads.totals[h as usize] = 0.0f32;
        }
        heads
    }

    /// Takes the rows of a chunk in.
    fn attend<F: Float>(&mut self, rows: &[Vector<F, N>], chunk: &Chunk, vectors: u32, scale: f32) {
        let blueprint = comptime!(self.blueprint);
        let steps = comptime!(blueprint.steps);
        let mut keys = Array::<Vector<f32, N>>::new(comptime!((CHUNK * steps) as usize));
        #[unroll]
        for c in 0..CHUNK {
            #[unroll]
            for step in 0..steps {
                let mut vector = UNIT_POS_X + step * blueprint.plane;
                if comptime!(!blueprint.even) {
                    vector = select(vector < vectors, vector, 0u32);
                }
                keys[comptime!((c * steps + step) as usize)] =
                    Vector::cast_from(rows[chunk.starts[c as usize] + vector as usize]);
            }
        }
        #[unroll]
        for h in 0..blueprint.heads {
            let before = self.maxima[h as usize];
            let mut maximum = before;
            let mut weights = Array::<f32>::new(comptime!(CHUNK as usize));
            #[unroll]
            for c in 0..CHUNK {
                let mut dot = 0.0f32;
                #[unroll]
                for step in 0..steps {
                    let query = self.queries[comptime!((h * steps + step) as usize)];
                    let key = keys[comptime!((c * steps + step) as usize)];
                    #[unroll]
                    for i in 0..N::value() {
                        dot = fma(query.extract(i), key.extract(i), dot);
                    }
                }
                let dot = group_sum(dot, blueprint.plane, blueprint.target);
                let logit = fma(dot, scale, chunk.biases[c as usize]);
                weights[c as usize] = logit;
                maximum = max(maximum, logit);
            }
            let kept = weight(before - maximum, blueprint.target);
            let mut total = self.totals[h as usize] * kept;
            #[unroll]
            for c in 0..CHUNK {
                let share = weight(weights[c as usize] - maximum, blueprint.target);
                weights[c as usize] = share;
                total += share;
            }
            self.maxima[h as usize] = maximum;
            self.totals[h as usize] = total;
            #[unroll]
            for step in 0..steps {
                let at = comptime!((h * steps + step) as usize);
                let mut sum = self.sums[at] * Vector::new(kept);
                #[unroll]
                for c in 0..CHUNK {
                    let row = keys[comptime!((c * steps + step) as usize)];
                    sum += row * Vector::new(weights[c as usize]);
                }
                self.sums[at] = sum;
            }
        }
    }
}

/// One softmax over the rows of the window, compressed rows and a sink, whose share is dropped.
///
/// - `window`: query `i` of a sequence sees `span` rows, the last but `count - 1 - i` among them
/// - `rows`: all queries of a sequence see the first `seen`, or each has `seen` of its own in `picks`; a pick that is no row is hidden
/// - `window_bias`, `rows_bias`: `[batch, columns]`, `[batch, count, rows]`
/// - `output`: `[batch, count, heads, vectors]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn sink_kernel<F: Float, I: Int, N: Size>(
    queries: &[Vector<F, N>],
    window: &[Vector<F, N>],
    window_bias: &[f32],
    rows: &[Vector<F, N>],
    rows_bias: &[f32],
    picks: ComptimeOption<&[I]>,
    sinks: &[f32],
    output: &mut [Vector<F, N>],
    sizes: Sizes,
    strides: Strides,
    scale: f32,
    #[comptime] blueprint: SinkBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
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
    let mut first = UNIT_POS_Y * CHUNK;
    while first < sizes.span {
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

    let mut first = UNIT_POS_Y * CHUNK;
    while first < sizes.seen {
        let mut chunk = Chunk::new();
        #[unroll]
        for c in 0..CHUNK {
            let mut inside = first + c < sizes.seen;
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
        let sink = max(sinks[min(head, sizes.heads - 1) as usize], MASKED);
        let mut total = weight(sink - maximum, blueprint.target);
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
        let total = max(total, TINY);
        let mut vector = UNIT_POS;
        while vector < sizes.vectors && head < sizes.heads {
            let mut sum = stage[vector as usize];
            #[unroll]
            for plane in 1..comptime!(blueprint.planes as usize) {
                sum += stage[plane * plane_vectors + vector as usize];
            }
            let line =
                (token as usize * sizes.heads as usize + head as usize) * sizes.vectors as usize;
            output[line + vector as usize] = Vector::cast_from(sum / Vector::new(total));
            vector += comptime!(blueprint.planes * blueprint.plane);
        }
        if comptime!(h + 1 < cube_heads) {
            sync_cube();
        }
    }
}
