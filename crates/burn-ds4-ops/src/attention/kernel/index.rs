//! Scores of the lightning indexer.

use cubecl::prelude::*;

/// Every unit has a row, and goes through the heads in their order: no score depends on how many others there are.
///
/// - `queries`, `keys`: vectors of a row follow each other
/// - `weights`: `[batch, count, heads]`
/// - `scores`: `[batch, count, rows]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn index_kernel<F: Float, N: Size>(
    queries: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    weights: &[f32],
    scores: &mut [f32],
    count: u32,
    heads: u32,
    rows: u32,
    queries_sequence: usize,
    query_stride: usize,
    head_stride: usize,
    keys_sequence: usize,
    key_stride: usize,
    #[comptime] vectors: u32,
    #[define(F)] _dtype: ElemType,
) {
    let own = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let token = CUBE_POS_Y;
    let sequence = (token / count) as usize;
    let row = min(own, rows - 1) as usize;
    let mut key = Array::<Vector<f32, N>>::new(comptime!(vectors as usize));
    #[unroll]
    for v in 0..comptime!(vectors as usize) {
        key[v] = Vector::cast_from(keys[sequence * keys_sequence + row * key_stride + v]);
    }
    let query = sequence * queries_sequence + (token % count) as usize * query_stride;
    let mut score = 0.0f32;
    for head in 0..heads {
        let line = query + head as usize * head_stride;
        let mut sums = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for v in 0..comptime!(vectors as usize) {
            sums += Vector::<f32, N>::cast_from(queries[line + v]) * key[v];
        }
        let mut dot = sums.extract(0usize);
        #[unroll]
        for i in 1..N::value() {
            dot += sums.extract(i);
        }
        let weight = weights[(token * heads + head) as usize];
        score += weight * select(dot < 0.0f32, 0.0f32, dot);
    }
    if own < rows {
        scores[token as usize * rows as usize + own as usize] = score;
    }
}
