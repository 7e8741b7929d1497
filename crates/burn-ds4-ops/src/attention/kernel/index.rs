//! Scores of the lightning indexer.

use cubecl::prelude::*;

use crate::attention::MASKED;

/// Planes of units that share the heads of a row.
pub(crate) const SHARES: u32 = 4;

/// What is scored: rows of a sequence, by the heads of its `count` queries, and from which position on a row is seen.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Sight {
    /// Positions of the block that a row stands for.
    pub ratio: u32,
    pub count: u32,
    pub heads: u32,
    pub rows: u32,
}

/// How many rows a query sees: all of them, or if there are positions of first queries, those whose blocks have ended.
#[cube]
pub(super) fn seen_rows<P: Int>(start: &ComptimeOption<&[P]>, sight: &Sight, token: u32) -> u32 {
    let mut visible = sight.rows;
    #[comptime]
    if let ComptimeOption::Some(start) = start {
        let given = start[(token / sight.count) as usize];
        // What is beyond 32 bits would be another position.
        let limit = comptime!(i32::MAX as u32) - sight.count;
        let there = given >= P::from_int(0) && given < P::cast_from(limit);
        let position = select(there, u32::cast_from(given), 0u32) + token % sight.count;
        visible = select(there, (position + 1) / sight.ratio, 0u32);
    }
    visible
}

/// Every unit has a row, and goes through every so manieth head; the sums of a row meet in one order. No score depends on how many others
/// there are.
///
/// - `queries`, `keys`: vectors of a row follow each other
/// - `weights`: `[batch, count, heads]`
/// - `start`: position of the first query of each sequence, if rows are seen from the end of their blocks of `ratio` positions on only
/// - `scores`: `[batch, count, rows]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn index_kernel<F: Float, P: Int, N: Size>(
    queries: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    weights: &[f32],
    start: ComptimeOption<&[P]>,
    scores: &mut [f32],
    scale: f32,
    sight: Sight,
    queries_sequence: usize,
    query_stride: usize,
    head_stride: usize,
    keys_sequence: usize,
    key_stride: usize,
    #[comptime] vectors: u32,
    #[comptime] units: u32,
    #[define(F, P)] _dtypes: [ElemType; 2],
) {
    let mut shares = Shared::<[f32]>::new_slice(comptime!((SHARES * units) as usize));
    let own = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let token = CUBE_POS_Y;
    let (count, heads, rows) = (sight.count, sight.heads, sight.rows);
    let sequence = (token / count) as usize;
    let row = min(own, rows - 1) as usize;
    let visible = seen_rows::<P>(&start, &sight, token);
    // Rows that are not seen are not read where none of the cube's are.
    let seen = CUBE_POS_X * CUBE_DIM_X < visible;
    let mut key = Array::<Vector<f32, N>>::new(comptime!(vectors as usize));
    #[unroll]
    for v in 0..comptime!(vectors as usize) {
        key[v] = Vector::new(0.0f32);
        if seen {
            key[v] = Vector::cast_from(keys[sequence * keys_sequence + row * key_stride + v]);
        }
    }
    let query = sequence * queries_sequence + (token % count) as usize * query_stride;
    let mut score = 0.0f32;
    let mut head = UNIT_POS_Y;
    while head < heads && seen {
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
        let score = select(own < visible, score * scale, MASKED);
        scores[token as usize * rows as usize + own as usize] = score;
    }
}
