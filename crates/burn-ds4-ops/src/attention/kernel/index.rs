//! Scores of the lightning indexer.

use cubecl::prelude::*;

/// Planes of units that share the heads of a row.
pub(crate) const SHARES: u32 = 4;

/// Every unit has a row, and goes through every so manieth head; the sums of a row meet in one order. No score depends on how many others
/// there are.
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
    #[comptime] units: u32,
    #[define(F)] _dtype: ElemType,
) {
    let mut shares = Shared::<[f32]>::new_slice(comptime!((SHARES * units) as usize));
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
    let mut head = UNIT_POS_Y;
    while head < heads {
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
        head += SHARES;
    }
    shares[(UNIT_POS_Y * units + UNIT_POS_X) as usize] = score;
    sync_cube();
    if UNIT_POS_Y == 0 && own < rows {
        let mut score = shares[UNIT_POS_X as usize];
        #[unroll]
        for share in 1..SHARES {
            score += shares[(share * units + UNIT_POS_X) as usize];
        }
        scores[token as usize * rows as usize + own as usize] = score;
    }
}
