//! Scores of the lightning indexer.

use cubecl::prelude::*;

use crate::attention::MASKED;

/// Planes of units that share the heads of a row.
pub(crate) const SHARES: u32 = 4;

/// What is scored: rows of a sequence, by the heads of its `count` queries; from which position on a row is seen; and steps from one to the
/// next, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct IndexSizes {
    /// Positions of the block that a row stands for.
    pub ratio: u32,
    pub count: u32,
    pub heads: u32,
    pub rows: u32,
    /// What a sum is multiplied by.
    pub scale: f32,
    pub queries_sequence: usize,
    pub queries_query: usize,
    pub queries_head: usize,
    pub keys_sequence: usize,
    pub keys_row: usize,
}

#[cube]
impl IndexSizes {
    /// Where the first head of a query is, of all queries of all sequences.
    pub fn query(&self, token: u32) -> usize {
        (token / self.count) as usize * self.queries_sequence
            + (token % self.count) as usize * self.queries_query
    }

    /// Where the first row of a query's sequence is.
    pub fn keys(&self, token: u32) -> usize {
        (token / self.count) as usize * self.keys_sequence
    }
}

/// How many rows a query sees: all of them, or if there are positions of first queries, those whose blocks have ended.
#[cube]
pub(super) fn seen_rows<P: Int>(
    start: &ComptimeOption<&[P]>,
    sizes: &IndexSizes,
    token: u32,
) -> u32 {
    let mut visible = sizes.rows;
    #[comptime]
    if let ComptimeOption::Some(start) = start {
        let given = start[(token / sizes.count) as usize];
        // What is beyond 32 bits would be another position.
        let limit = comptime!(i32::MAX as u32) - sizes.count;
        let there = given >= P::from_int(0) && given < P::cast_from(limit);
        let position = select(there, u32::cast_from(given), 0u32) + token % sizes.count;
        visible = select(there, (position + 1) / sizes.ratio, 0u32);
    }
    visible
}

/// The score of row `own`: of its `shares`, from `at` on and so far apart, in their order, or that of a row that is not seen.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn store_score(
    shares: &[f32],
    at: u32,
    scores: &mut [f32],
    token: u32,
    own: u32,
    visible: u32,
    sizes: &IndexSizes,
    #[comptime] apart: u32,
) {
    let mut score = shares[at as usize];
    #[unroll]
    for share in 1..SHARES {
        score += shares[(at + comptime!(share * apart)) as usize];
    }
    let score = select(own < visible, score * sizes.scale, MASKED);
    scores[token as usize * sizes.rows as usize + own as usize] = score;
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
    sizes: IndexSizes,
    #[comptime] vectors: u32,
    #[comptime] units: u32,
    #[define(F, P)] _dtypes: [ElemType; 2],
) {
    let mut shares = Shared::<[f32]>::new_slice(comptime!((SHARES * units) as usize));
    let own = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let token = CUBE_POS_Y;
    let (heads, rows) = (sizes.heads, sizes.rows);
    let keys_at = sizes.keys(token) + min(own, rows - 1) as usize * sizes.keys_row;
    let visible = seen_rows::<P>(&start, &sizes, token);
    // Rows that are not seen are not read where none of the cube's are.
    let seen = CUBE_POS_X * CUBE_DIM_X < visible;
    let mut key = Array::<Vector<f32, N>>::new(comptime!(vectors as usize));
    #[unroll]
    for v in 0..comptime!(vectors as usize) {
        key[v] = Vector::new(0.0f32);
        if seen {
            key[v] = Vector::cast_from(keys[keys_at + v]);
        }
    }
    let query = sizes.query(token);
    let mut score = 0.0f32;
    let mut head = UNIT_POS_Y;
    while head < heads && seen {
        let line = query + head as usize * sizes.queries_head;
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
        store_score(
            &shares[..],
            UNIT_POS_X,
            scores,
            token,
            own,
            visible,
            &sizes,
            units,
        );
    }
}
