//! Attention with a sink on tensor cores, for many queries.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::cached_tiles::{
    KIND_COMPRESSED, KIND_HIDDEN, KIND_WINDOW, LOGIT_GAP, SLICE_CHANNELS, TILE_HEADS, TILE_PLANES,
    WEIGHT_GAP, join_words,
};
use super::combine::with_sink;
use super::sink::AttentionInputs;
use super::softmax_weight;
use crate::attention::{HIDDEN_BELOW, MASKED};
use crate::caps::Target;
use crate::intrinsics::{
    await_copies, commit_copies, group_sum, modulo, multiply_tiles, pack_bf16, pack_f16,
    shuffle_xor,
};

/// Lanes of a plane.
const LANES: u32 = 32;
/// vec8s of a slice of channels.
const SLICE_VECTORS: u32 = SLICE_CHANNELS / 8;

/// How [`sink_tiles_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SinkTilesBlueprint {
    /// Tiles of [`TILE_HEADS`] heads of a cube: 1, 2 or 4.
    pub head_tiles: u32,
    /// Vectors of 8 channels of a row: a multiple of 8, at most 64.
    pub vectors: u32,
    /// Columns of a block: 32 or 64, the latter for one tile of heads.
    pub columns: u32,
    /// Blocks whose rows are in shared memory at the same time: 1 or 2.
    pub stages: u32,
    /// Whether rows are `f16` rather than `bf16`.
    pub f16_input: bool,
    pub target: Target,
}

impl SinkTilesBlueprint {
    /// Heads of a cube.
    pub const fn heads(self) -> u32 {
        self.head_tiles * TILE_HEADS
    }

    /// Heads whose weights a plane computes.
    const fn plane_heads(self) -> u32 {
        self.heads() / TILE_PLANES
    }

    /// Planes among which the heads of logits are divided. Their columns are among the others.
    const fn logit_planes(self) -> u32 {
        if self.head_tiles == 1 { 1 } else { 2 }
    }

    /// Tiles of 8 columns of a plane's logits.
    const fn logit_columns(self) -> u32 {
        self.columns * self.logit_planes() / TILE_PLANES / 8
    }

    const fn logit_stride(self) -> u32 {
        self.columns + LOGIT_GAP
    }

    const fn weight_stride(self) -> u32 {
        self.columns / 2 + WEIGHT_GAP
    }

    /// Shared memory of a cube.
    pub const fn shared_bytes(self) -> usize {
        let rows = (self.heads() + self.stages * self.columns) * self.vectors * 16;
        let of_heads = self.heads() * (self.logit_stride() + self.weight_stride() + 1) * 4;
        (rows + of_heads + self.stages * self.columns * 4) as usize
    }
}

/// Computes [`sink_kernel`](super::sink_kernel) for rows of 16-bit floats. A cube has some heads of
/// one query, and goes through its columns block by block: those of the window, then compressed
/// rows.
///
/// `output` is `[batch, count, heads, vectors]`. The weights of columns are rounded to 16 bits, and
/// the divisor is the sum of the rounded weights.
///
/// The rows of the next block are copied to shared memory while three phases process a block.
/// First, planes multiply the queries by the columns. Then, each computes the weights of some heads
/// relative to the largest logit so far. Last, each adds a slice of the channels of all heads.
///
/// A lane reads eight channels of a row at once. A vector is stored where [`swizzled`] says, so
/// that lanes that read together do so from different banks.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sink_tiles_kernel<F: Float, I: Int>(
    inputs: &AttentionInputs<F, I, Const<8>>,
    window_bias: &[f32],
    rows_bias: &[f32],
    output: &mut [Vector<F, Const<8>>],
    #[comptime] blueprint: SinkTilesBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let SinkTilesBlueprint {
        head_tiles,
        vectors,
        columns,
        stages,
        target,
        ..
    } = comptime!(blueprint);
    let heads = comptime!(blueprint.heads());
    let plane_heads = comptime!(blueprint.plane_heads());
    let mut queries =
        Shared::<[Vector<F, Const<8>>]>::new_slice(comptime!((heads * vectors) as usize));
    let mut rows = Shared::<[Vector<F, Const<8>>]>::new_slice(comptime!(
        (stages * columns * vectors) as usize
    ));
    let mut logits =
        Shared::<[f32]>::new_slice(comptime!((heads * blueprint.logit_stride()) as usize));
    let mut weights =
        Shared::<[u32]>::new_slice(comptime!((heads * blueprint.weight_stride()) as usize));
    let mut biases = Shared::<[f32]>::new_slice(comptime!((stages * columns) as usize));
    let mut factors = Shared::<[f32]>::new_slice(heads as usize);

    let shape = &inputs.shape;
    let first_head = CUBE_POS_Y * heads;
    let source = BlockSource::<F, I>::new(inputs, window_bias, rows_bias, CUBE_POS_X, blueprint);
    source.fetch(0u32, &mut rows, &mut biases);
    source.fetch_queries(first_head, &mut queries);

    let mut maxima = Array::<f32>::new(plane_heads as usize);
    let mut totals = Array::<f32>::new(plane_heads as usize);
    #[unroll]
    for h in 0..plane_heads {
        let head = min(first_head + UNIT_POS_Y * plane_heads + h, shape.heads - 1);
        maxima[h as usize] = max(inputs.sinks[head as usize], HIDDEN_BELOW);
        totals[h as usize] = 0.0f32;
    }
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(8 * head_tiles as usize));
    #[unroll]
    for i in 0..comptime!(8 * head_tiles as usize) {
        sums[i] = Vector::new(0.0f32);
    }

    let blocks = (shape.span + shape.selected + comptime!(columns - 1)) / columns;
    for block in 0..blocks {
        let stage = if comptime!(stages == 1) {
            0u32.runtime()
        } else {
            block % stages
        };
        await_copies(0u32);
        sync_cube();
        if comptime!(stages > 1) {
            source.fetch(block + 1, &mut rows, &mut biases);
        }
        multiply_queries(
            &queries,
            &rows,
            &biases,
            &mut logits,
            stage,
            inputs.scale,
            blueprint,
        );
        sync_cube();
        #[unroll]
        for h in 0..plane_heads {
            let row = UNIT_POS_Y * plane_heads + h;
            // Each lane has two columns.
            let inside = UNIT_POS_X * 2 < columns;
            let at = row * comptime!(blueprint.logit_stride()) + UNIT_POS_X * 2;
            let at = select(inside, at, 0u32) as usize;
            let even = select(inside, logits[at], MASKED);
            let odd = select(inside, logits[at + 1], MASKED);
            let before = maxima[h as usize];
            let mut maximum = max(before, max(even, odd));
            #[unroll]
            for step in 0..comptime!(LANES.ilog2()) {
                maximum = max(
                    maximum,
                    shuffle_xor(maximum, comptime!(1u32 << step), target),
                );
            }
            let even = softmax_weight(even - maximum, target);
            let odd = softmax_weight(odd - maximum, target);
            let factor = softmax_weight(before - maximum, target);
            let total = f32::cast_from(F::cast_from(even)) + f32::cast_from(F::cast_from(odd));
            totals[h as usize] = totals[h as usize] * factor + total;
            maxima[h as usize] = maximum;
            if inside {
                let to = row * comptime!(blueprint.weight_stride()) + UNIT_POS_X;
                weights[to as usize] = if comptime!(blueprint.f16_input) {
                    pack_f16(even, odd)
                } else {
                    pack_bf16(even, odd)
                };
            }
            if UNIT_POS_X == 0 {
                factors[row as usize] = factor;
            }
        }
        sync_cube();
        if UNIT_POS_Y < comptime!(vectors / SLICE_VECTORS) {
            add_rows(&rows, &weights, &factors, &mut sums, stage, blueprint);
        }
        if comptime!(stages == 1) {
            sync_cube();
            source.fetch(block + 1, &mut rows, &mut biases);
        }
    }
    await_copies(0u32);
    sync_cube();
    #[unroll]
    for h in 0..plane_heads {
        let row = UNIT_POS_Y * plane_heads + h;
        let head = min(first_head + row, shape.heads - 1);
        let total = group_sum(totals[h as usize], LANES, target);
        let sink = inputs.sinks[head as usize];
        let divisor = with_sink(total, sink, maxima[h as usize], target);
        if UNIT_POS_X == 0 {
            factors[row as usize] = divisor;
        }
    }
    sync_cube();
    if UNIT_POS_Y < comptime!(vectors / SLICE_VECTORS) {
        let group = UNIT_POS_X / 4;
        #[unroll]
        for half in 0..comptime!(2 * head_tiles) {
            let row = group + comptime!(8 * half);
            let head = first_head + row;
            if head < shape.heads {
                let divisor = factors[row as usize];
                #[unroll]
                for part in 0..2u32 {
                    let mut sum = Vector::<f32, Const<8>>::new(0.0f32);
                    #[unroll]
                    for i in 0..8usize {
                        let own = sums[comptime!(half as usize / 2 * 8 + i)];
                        let own = own.extract(comptime!((half % 2 * 2 + part) as usize));
                        sum.insert(i, own / divisor);
                    }
                    let vector = UNIT_POS_Y * SLICE_VECTORS + UNIT_POS_X % 4 * 2 + part;
                    let to = (CUBE_POS_X as usize * shape.heads as usize + head as usize)
                        * comptime!(vectors as usize);
                    output[to + vector as usize] = Vector::cast_from(sum);
                }
            }
        }
    }
}

/// The position of a vector in its row in shared memory. Lanes `4 * g + q` of a quarter of a plane
/// read the vectors `q` of rows `g`, or the vectors `g` of rows `2 * q`.
#[cube]
fn swizzled(row: u32, vector: u32) -> u32 {
    vector ^ ((row & 6) ^ ((row & 1) << 2))
}

/// Where the rows of blocks come from.
#[derive(CubeType)]
struct BlockSource<'a, F: Float, I: Int> {
    inputs: &'a AttentionInputs<F, I, Const<8>>,
    window_bias: &'a [f32],
    rows_bias: &'a [f32],
    token: u32,
    #[cube(comptime)]
    blueprint: SinkTilesBlueprint,
}

#[cube]
impl<'a, F: Float, I: Int> BlockSource<'a, F, I> {
    fn new(
        inputs: &'a AttentionInputs<F, I, Const<8>>,
        window_bias: &'a [f32],
        rows_bias: &'a [f32],
        token: u32,
        #[comptime] blueprint: SinkTilesBlueprint,
    ) -> BlockSource<'a, F, I> {
        BlockSource::<'a, F, I> {
            inputs,
            window_bias,
            rows_bias,
            token,
            blueprint,
        }
    }

    /// Copies the queries of a cube's heads.
    fn fetch_queries(&self, first_head: u32, queries: &mut Shared<[Vector<F, Const<8>>]>) {
        let vectors = comptime!(self.blueprint.vectors);
        let (shape, strides) = (&self.inputs.shape, &self.inputs.strides);
        let sequence = (self.token / shape.count) as usize;
        let start = sequence * strides.queries_sequence
            + (self.token % shape.count) as usize * strides.query;
        let mut index = UNIT_POS;
        while index < comptime!(self.blueprint.heads() * self.blueprint.vectors) {
            let (row, vector) = (index / vectors, index % vectors);
            let head = min(first_head + row, shape.heads - 1) as usize;
            let to = row * vectors + swizzled(row, vector);
            queries[to as usize] =
                self.inputs.queries[start + head * strides.head + vector as usize];
            index += CUBE_DIM;
        }
    }

    /// Begins to copy the rows of a block, if it has any columns. Each plane has some of them.
    fn fetch(
        &self,
        block: u32,
        rows: &mut Shared<[Vector<F, Const<8>>]>,
        biases: &mut Shared<[f32]>,
    ) {
        let blueprint = comptime!(self.blueprint);
        let columns = comptime!(blueprint.columns);
        let plane_columns = comptime!(columns / TILE_PLANES);
        let (shape, strides) = (&self.inputs.shape, &self.inputs.strides);
        let end = shape.span + shape.selected;
        if block * columns < end {
            let (sequence, query) = (self.token / shape.count, self.token % shape.count);
            let first = shape.columns + 1 - shape.count - shape.span + query;
            let stage = if comptime!(blueprint.stages == 1) {
                0u32.runtime()
            } else {
                block % blueprint.stages
            };
            // All places first: reading them must not wait for copies.
            let mut starts = Array::<usize>::new(plane_columns as usize);
            let mut kinds = Array::<u32>::new(plane_columns as usize);
            #[unroll]
            for c in 0..plane_columns {
                let own = UNIT_POS_Y * plane_columns + c;
                let column = block * columns + own;
                let mut bias = MASKED.runtime();
                let mut kind = KIND_HIDDEN.runtime();
                let mut start = 0usize.runtime();
                if column < shape.span {
                    let column = first + column;
                    bias = self.window_bias[(sequence * shape.columns + column) as usize];
                    kind = KIND_WINDOW.runtime();
                    start = sequence as usize * strides.window_sequence
                        + column as usize * strides.window_row;
                } else if column < end {
                    let picked = self.inputs.pick(self.token, column - shape.span);
                    if picked >= I::from_int(0) && picked < I::cast_from(shape.rows) {
                        let row = u32::cast_from(picked) as usize;
                        bias = self.rows_bias[self.token as usize * shape.rows as usize + row];
                        kind = KIND_COMPRESSED.runtime();
                        start = sequence as usize * strides.rows_sequence + row * strides.row;
                    }
                }
                starts[c as usize] = start;
                kinds[c as usize] = kind;
                if UNIT_POS_X == 0 {
                    biases[(stage * columns + own) as usize] = bias;
                }
            }
            #[unroll]
            for c in 0..plane_columns {
                let own = UNIT_POS_Y * plane_columns + c;
                let (start, kind) = (starts[c as usize], kinds[c as usize]);
                let to = (stage * columns + own) * blueprint.vectors;
                #[unroll]
                for step in 0..comptime!(blueprint.vectors.div_ceil(LANES)) {
                    let vector = UNIT_POS_X + comptime!(step * LANES);
                    if vector < blueprint.vectors {
                        let to = (to + swizzled(own, vector)) as usize;
                        let from = start + vector as usize;
                        if kind == KIND_WINDOW {
                            copy_async(
                                &self.inputs.window[from..from + 1],
                                &mut rows[to..to + 1],
                                8u32,
                            );
                        } else if kind == KIND_COMPRESSED {
                            copy_async(
                                &self.inputs.rows[from..from + 1],
                                &mut rows[to..to + 1],
                                8u32,
                            );
                        } else {
                            rows[to] = Vector::new(F::new(0.0));
                        }
                    }
                }
            }
        }
        commit_copies();
    }
}

/// Writes the logits of a block.
#[cube]
fn multiply_queries<F: Float>(
    queries: &Shared<[Vector<F, Const<8>>]>,
    rows: &Shared<[Vector<F, Const<8>>]>,
    biases: &Shared<[f32]>,
    logits: &mut Shared<[f32]>,
    stage: u32,
    scale: f32,
    #[comptime] blueprint: SinkTilesBlueprint,
) {
    let (vectors, columns) = comptime!((blueprint.vectors, blueprint.columns));
    let planes = comptime!(blueprint.logit_planes());
    let m_tiles = comptime!(blueprint.head_tiles / planes);
    let n_tiles = comptime!(blueprint.logit_columns());
    let dtype = comptime!(if blueprint.f16_input { "f16" } else { "bf16" });
    let (group, group_lane) = (UNIT_POS_X / 4, UNIT_POS_X % 4);
    let first_row = modulo(UNIT_POS_Y, planes) * comptime!(m_tiles * 16) + group;
    let first_column = UNIT_POS_Y / planes * comptime!(n_tiles * 8);
    // The rows of all tiles of a lane are the same modulo 8.
    let even = swizzled(group, group_lane);
    let odd = even ^ 4;
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!((m_tiles * n_tiles) as usize));
    #[unroll]
    for i in 0..comptime!((m_tiles * n_tiles) as usize) {
        sums[i] = Vector::new(0.0f32);
    }
    #[unroll]
    for step in 0..comptime!(vectors / 4) {
        let vector = comptime!(step / 2 * 8) + if comptime!(step % 2 == 0) { even } else { odd };
        let mut keys = Array::<Vector<u32, Const<4>>>::new(n_tiles as usize);
        #[unroll]
        for n in 0..n_tiles {
            let row = stage * columns + first_column + comptime!(n * 8) + group;
            keys[n as usize] =
                Vector::<u32, Const<4>>::reinterpret(rows[(row * vectors + vector) as usize]);
        }
        #[unroll]
        for m in 0..m_tiles {
            let at = ((first_row + comptime!(m * 16)) * vectors + vector) as usize;
            let low = Vector::<u32, Const<4>>::reinterpret(queries[at]);
            let high = Vector::<u32, Const<4>>::reinterpret(
                queries[at + comptime!((8 * vectors) as usize)],
            );
            #[unroll]
            for n in 0..n_tiles {
                let key = keys[n as usize];
                let own = comptime!((m * n_tiles + n) as usize);
                #[unroll]
                for half in 0..2usize {
                    let (i, j) = comptime!((2 * half, 2 * half + 1));
                    sums[own] = multiply_tiles(
                        low.extract(i),
                        high.extract(i),
                        low.extract(j),
                        high.extract(j),
                        key.extract(i),
                        key.extract(j),
                        sums[own],
                        dtype,
                    );
                }
            }
        }
    }
    let stride = comptime!(blueprint.logit_stride());
    #[unroll]
    for n in 0..n_tiles {
        #[unroll]
        for part in 0..2u32 {
            let column = first_column + comptime!(n * 8) + group_lane * 2 + part;
            let bias = biases[(stage * columns + column) as usize];
            let hidden = bias < HIDDEN_BELOW;
            #[unroll]
            for m in 0..m_tiles {
                let dots = sums[comptime!((m * n_tiles + n) as usize)];
                let at = ((first_row + comptime!(m * 16)) * stride + column) as usize;
                let low = fma(dots.extract(comptime!(part as usize)), scale, bias);
                let high = fma(dots.extract(comptime!(part as usize + 2)), scale, bias);
                logits[at] = select(hidden, MASKED, low);
                logits[at + comptime!((8 * stride) as usize)] = select(hidden, MASKED, high);
            }
        }
    }
}

/// Adds the rows of a block, times their weights, to the sums of a slice of channels. The sums so
/// far are multiplied by the factors of their heads before.
#[cube]
fn add_rows<F: Float>(
    rows: &Shared<[Vector<F, Const<8>>]>,
    weights: &Shared<[u32]>,
    factors: &Shared<[f32]>,
    sums: &mut Array<Vector<f32, Const<4>>>,
    stage: u32,
    #[comptime] blueprint: SinkTilesBlueprint,
) {
    let (vectors, columns) = comptime!((blueprint.vectors, blueprint.columns));
    let head_tiles = comptime!(blueprint.head_tiles);
    let stride = comptime!(blueprint.weight_stride());
    let dtype = comptime!(if blueprint.f16_input { "f16" } else { "bf16" });
    let (group, group_lane) = (UNIT_POS_X / 4, UNIT_POS_X % 4);
    #[unroll]
    for m in 0..head_tiles {
        let low = factors[(group + comptime!(16 * m)) as usize];
        let high = factors[(group + comptime!(16 * m + 8)) as usize];
        let mut factor = Vector::<f32, Const<4>>::new(low);
        factor.insert(2usize, high);
        factor.insert(3usize, high);
        #[unroll]
        for i in 0..8u32 {
            let own = comptime!((8 * m + i) as usize);
            sums[own] *= factor;
        }
    }
    let slice = UNIT_POS_Y * SLICE_VECTORS;
    // The columns of a lane are the same modulo 8, but for the lowest bit.
    let even = slice + swizzled(group_lane * 2, group);
    let odd = even ^ 4;
    #[unroll]
    for part in 0..comptime!(columns / 16) {
        // Of 16 columns, the four that are this lane's part of a tile.
        let mut values = Array::<Vector<u32, Const<4>>>::new(4usize);
        #[unroll]
        for i in 0..4u32 {
            let ahead = comptime!(16 * part + i / 2 * 8 + i % 2);
            let row = stage * columns + group_lane * 2 + ahead;
            let vector = if comptime!(i % 2 == 0) { even } else { odd };
            values[i as usize] =
                Vector::<u32, Const<4>>::reinterpret(rows[(row * vectors + vector) as usize]);
        }
        let mut parts = Array::<u32>::new(comptime!(4 * head_tiles as usize));
        #[unroll]
        for m in 0..head_tiles {
            let at = (group + comptime!(16 * m)) * stride + group_lane + comptime!(8 * part);
            let other = at + comptime!(8 * stride);
            parts[comptime!(4 * m as usize)] = weights[at as usize];
            parts[comptime!(4 * m as usize + 1)] = weights[other as usize];
            parts[comptime!(4 * m as usize + 2)] = weights[at as usize + 4];
            parts[comptime!(4 * m as usize + 3)] = weights[other as usize + 4];
        }
        #[unroll]
        for i in 0..8usize {
            let (word, upper) = comptime!((i / 2, i % 2 == 1));
            let before = join_words(values[0].extract(word), values[1].extract(word), upper);
            let after = join_words(values[2].extract(word), values[3].extract(word), upper);
            #[unroll]
            for m in 0..head_tiles {
                let first = comptime!(4 * m as usize);
                let own = comptime!(8 * m as usize + i);
                sums[own] = multiply_tiles(
                    parts[first],
                    parts[comptime!(first + 1)],
                    parts[comptime!(first + 2)],
                    parts[comptime!(first + 3)],
                    before,
                    after,
                    sums[own],
                    dtype,
                );
            }
        }
    }
}
