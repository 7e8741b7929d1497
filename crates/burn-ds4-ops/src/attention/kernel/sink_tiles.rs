//! Attention with a sink on tensor cores, for many queries.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::head_tiles::{
    HeadTiles, LANES, PlaneSoftmax, SLICE_VECTORS, TILE_HEADS, TILE_PLANES, add_rows, head_of_row,
    lane_sums, lane_vector, multiply_queries, plane_row, rescale, store_queries, swizzled,
};
use super::inputs::AttentionInputs;
use super::softmax::with_sink;
use crate::attention::options::{HIDDEN_BELOW, MASKED};
use crate::intrinsics::{await_copies, commit_copies};

/// Kinds of columns.
const KIND_HIDDEN: u32 = 0;
const KIND_WINDOW: u32 = 1;
const KIND_COMPRESSED: u32 = 2;

/// How [`sink_tiles_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SinkTilesBlueprint {
    pub tiles: HeadTiles,
    /// Blocks whose rows are in shared memory at the same time: 1 or 2.
    pub stages: u32,
}

/// Computes [`sink_kernel`](super::sink_kernel) for rows of 16-bit floats. A cube has some heads of
/// one query, and goes through its columns block by block: those of the window, then compressed
/// rows.
///
/// `output` is `[batch, count, heads, vectors]`. The rows of the next block are copied to shared
/// memory while [three phases](HeadTiles) process a block. Weights are relative to the largest
/// logit so far.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sink_tiles_kernel<F: Float, I: Int>(
    inputs: &AttentionInputs<F, I, Const<8>>,
    window_bias: &[f32],
    rows_bias: &[f32],
    output: &mut [Vector<F, Const<8>>],
    #[comptime] blueprint: SinkTilesBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let SinkTilesBlueprint { tiles, stages } = comptime!(blueprint);
    let HeadTiles {
        head_tiles,
        vectors,
        columns,
        target,
        ..
    } = comptime!(tiles);
    let heads = comptime!(tiles.heads());
    let plane_heads = comptime!(tiles.plane_heads());
    let mut queries =
        Shared::<[Vector<F, Const<8>>]>::new_slice(comptime!(tiles.query_vectors() as usize));
    let mut rows = Shared::<[Vector<F, Const<8>>]>::new_slice(comptime!(
        (stages * tiles.block_vectors()) as usize
    ));
    let mut logits = Shared::<[f32]>::new_slice(comptime!(tiles.logit_words() as usize));
    let mut weights = Shared::<[u32]>::new_slice(comptime!(tiles.weight_words() as usize));
    let mut biases = Shared::<[f32]>::new_slice(comptime!((stages * columns) as usize));
    let mut factors = Shared::<[f32]>::new_slice(heads as usize);

    let shape = &inputs.shape;
    let first_head = CUBE_POS_Y * heads;
    let source = BlockSource::<F, I>::new(inputs, window_bias, rows_bias, CUBE_POS_X, blueprint);
    source.fetch(0u32, &mut rows, &mut biases);
    source.fetch_queries(first_head, &mut queries);

    let mut softmax = PlaneSoftmax::new(tiles);
    #[unroll]
    for h in 0..plane_heads {
        let head = min(first_head + head_of_row(plane_row(h)), shape.heads - 1);
        softmax.maxima[h as usize] = max(inputs.sinks[head as usize], HIDDEN_BELOW);
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
        let first = stage * columns;
        multiply_queries(
            &queries,
            &rows,
            &biases,
            &mut logits,
            first,
            columns.runtime(),
            inputs.scale,
            tiles,
        );
        sync_cube();
        softmax.weigh::<F>(&logits, &mut weights, &mut factors, columns.runtime(), 1u32);
        sync_cube();
        if UNIT_POS_Y < comptime!(vectors / SLICE_VECTORS) {
            rescale(&mut sums, &factors, tiles);
            add_rows(&rows, &weights, &mut sums, first, columns.runtime(), tiles);
        }
        if comptime!(stages == 1) {
            sync_cube();
            source.fetch(block + 1, &mut rows, &mut biases);
        }
    }
    await_copies(0u32);
    sync_cube();
    softmax.add_lanes();
    #[unroll]
    for h in 0..plane_heads {
        let row = plane_row(h);
        let head = min(first_head + head_of_row(row), shape.heads - 1);
        let sink = inputs.sinks[head as usize];
        let (total, maximum) = (softmax.totals[h as usize], softmax.maxima[h as usize]);
        let divisor = with_sink(total, sink, maximum, target);
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
            let head = first_head + head_of_row(row);
            if head < shape.heads {
                let divisor = factors[row as usize];
                #[unroll]
                for part in 0..2u32 {
                    let sum = lane_sums(&sums, half, part) / Vector::new(divisor);
                    let to = (CUBE_POS_X as usize * shape.heads as usize + head as usize)
                        * comptime!(vectors as usize);
                    output[to + lane_vector(part) as usize] = Vector::cast_from(sum);
                }
            }
        }
    }
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
        let vectors = comptime!(self.blueprint.tiles.vectors);
        let (shape, strides) = (&self.inputs.shape, &self.inputs.strides);
        let (sequence, query) = shape.query_of(self.token);
        let start = sequence as usize * strides.queries_sequence + query as usize * strides.query;
        let mut index = UNIT_POS;
        while index < comptime!(self.blueprint.tiles.query_vectors() / 2) {
            let (pair, vector) = (index / vectors, index % vectors);
            let row = pair / 8 * TILE_HEADS + pair % 8;
            let mut values = Array::<Vector<F, Const<8>>>::new(2usize);
            #[unroll]
            for i in 0..2u32 {
                let head = min(
                    first_head + head_of_row(row + comptime!(8 * i)),
                    shape.heads - 1,
                );
                let from = start + head as usize * strides.head + vector as usize;
                values[i as usize] = self.inputs.queries[from];
            }
            store_queries(
                queries,
                row,
                vector,
                values[0],
                values[1],
                self.blueprint.tiles,
            );
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
        let HeadTiles {
            columns, vectors, ..
        } = comptime!(blueprint.tiles);
        let plane_columns = comptime!(columns / TILE_PLANES);
        let (shape, strides) = (&self.inputs.shape, &self.inputs.strides);
        let end = shape.span + shape.selected;
        if block * columns < end {
            let (sequence, query) = shape.query_of(self.token);
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
                let to = (stage * columns + own) * vectors;
                #[unroll]
                for step in 0..comptime!(vectors.div_ceil(LANES)) {
                    let vector = UNIT_POS_X + comptime!(step * LANES);
                    if vector < vectors {
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
