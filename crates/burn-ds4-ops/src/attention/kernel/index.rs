//! Scores of the lightning indexer.

use cubecl::prelude::*;

use cubecl::std::FastDivmod;

use super::pages::PageTable;
use super::rotate::Positions;
use crate::attention::options::MASKED;
use crate::comptime_option::ComptimeOption;

/// Planes of a cube, among which the heads are divided.
pub(crate) const INDEX_PLANES: u32 = 4;

/// Dimensions and strides of the scores: rows of a sequence, by the heads of its `count` queries.
/// Strides are in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct IndexSizes {
    /// Positions of the block that a row stands for. It is visible from the end of that block on.
    pub ratio: FastDivmod<u32>,
    pub count: u32,
    pub count_divisor: FastDivmod<u32>,
    pub heads: u32,
    pub rows: u32,
    /// The factor of a score.
    pub scale: f32,
    pub queries_sequence: usize,
    pub queries_query: usize,
    pub queries_head: usize,
    pub keys_sequence: usize,
    pub keys_row: usize,
}

#[cube]
impl IndexSizes {
    /// The sequence and the query of it, by the query's number among those of all sequences.
    pub fn query_of(&self, token: u32) -> (u32, u32) {
        self.count_divisor.div_mod(token)
    }

    /// The offset of a query's first head.
    pub fn query(&self, sequence: u32, query: u32) -> usize {
        sequence as usize * self.queries_sequence + query as usize * self.queries_query
    }

    /// The offset of the first row of a sequence, or of all pages.
    pub fn keys(&self, sequence: u32) -> usize {
        sequence as usize * self.keys_sequence
    }
}

/// Queries and the rows that they score.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct IndexInputs<F: Float, P: Int, N: Size> {
    /// Queries and rows, whose vectors are contiguous.
    pub queries: Box<[Vector<F, N>]>,
    pub keys: Box<[Vector<F, N>]>,
    /// Of the rows, where they are in pages.
    pub pages: ComptimeOption<PageTable>,
    /// `[batch, count, heads]`.
    pub weights: Box<[f32]>,
    /// The position of the first query of each sequence, if rows are visible only from the end of
    /// their blocks of `ratio` positions on.
    pub start: ComptimeOption<Box<[P]>>,
    /// The rotation of the queries, where they are not rotated yet.
    pub rotation: ComptimeOption<Positions<P>>,
    pub sizes: IndexSizes,
}

#[cube]
impl<F: Float, P: Int, N: Size> IndexInputs<F, P, N> {
    /// The offset of a row of a sequence, whose rows begin at `first`.
    pub fn key(&self, first: usize, sequence: u32, row: u32) -> usize {
        let stride = self.sizes.keys_row;
        let paged: ComptimeOption<usize> = self
            .pages
            .as_ref()
            .map(|pages| first + pages.row(sequence, row) as usize * stride);
        paged.unwrap_or_else(|| first + row as usize * stride)
    }
}

/// The number of rows that are visible to a query: all of them or, if the positions of first
/// queries are given, those whose blocks are complete.
#[cube]
pub(super) fn visible_rows<P: Int>(
    start: &ComptimeOption<Box<[P]>>,
    sizes: &IndexSizes,
    sequence: u32,
    query: u32,
) -> u32 {
    let mut visible = sizes.rows;
    #[comptime]
    if let ComptimeOption::Some(start) = start {
        let given = start[sequence as usize];
        // A start that does not fit 32 bits would be cast to another position.
        let limit = comptime!(i32::MAX as u32) - sizes.count;
        let active = given >= P::from_int(0) && given < P::cast_from(limit);
        let position = select(active, u32::cast_from(given), 0u32) + query;
        visible = select(active, sizes.ratio.div(position + 1), 0u32);
    }
    visible
}

/// Stores the score of row `own`: the sum of its `partials`, which are `stride` apart from `at` on,
/// in their order, or [`MASKED`] if the row is not visible.
#[cube]
pub(super) fn store_score(
    partials: &[f32],
    at: u32,
    scores: &mut [f32],
    token: u32,
    own: u32,
    visible: u32,
    sizes: &IndexSizes,
    #[comptime] stride: u32,
) {
    let mut score = partials[at as usize];
    #[unroll]
    for plane in 1..INDEX_PLANES {
        score += partials[(at + comptime!(plane * stride)) as usize];
    }
    let score = select(own < visible, score * sizes.scale, MASKED);
    scores[token as usize * sizes.rows as usize + own as usize] = score;
}

/// Computes indexer scores. Every unit has a row, and the planes of a cube take heads in a strided
/// loop. The partial sums of a row are added in one order, so no score depends on how many others
/// there are.
///
/// - `scores`: `[batch, count, rows]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn index_kernel<F: Float, P: Int, N: Size>(
    inputs: &IndexInputs<F, P, N>,
    scores: &mut [f32],
    #[comptime] vectors: u32,
    #[comptime] units: u32,
    #[define(F, P)] _dtypes: [ElemType; 2],
) {
    let mut partials = Shared::<[f32]>::new_slice(comptime!((INDEX_PLANES * units) as usize));
    let sizes = &inputs.sizes;
    let own = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let token = CUBE_POS_Y;
    let (heads, rows) = (sizes.heads, sizes.rows);
    let (sequence, of_sequence) = sizes.query_of(token);
    let keys_at = inputs.key(sizes.keys(sequence), sequence, min(own, rows - 1));
    let visible = visible_rows::<P>(&inputs.start, sizes, sequence, of_sequence);
    // If none of the cube's rows is visible, none is read.
    let any_visible = CUBE_POS_X * CUBE_DIM_X < visible;
    let mut key = Array::<Vector<f32, N>>::new(comptime!(vectors as usize));
    #[unroll]
    for v in 0..comptime!(vectors as usize) {
        key[v] = Vector::new(0.0f32);
        if any_visible {
            key[v] = Vector::cast_from(inputs.keys[keys_at + v]);
        }
    }
    let query = sizes.query(sequence, of_sequence);
    let mut score = 0.0f32;
    let mut head = UNIT_POS_Y;
    while head < heads && any_visible {
        let query_head = query + head as usize * sizes.queries_head;
        let mut sums = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for v in 0..comptime!(vectors as usize) {
            sums += Vector::<f32, N>::cast_from(inputs.queries[query_head + v]) * key[v];
        }
        let mut dot = sums.extract(0usize);
        #[unroll]
        for i in 1..N::value() {
            dot += sums.extract(i);
        }
        let weight = inputs.weights[(token * heads + head) as usize];
        score += weight * select(dot < 0.0f32, 0.0f32, dot);
        head += INDEX_PLANES;
    }
    partials[(UNIT_POS_Y * units + UNIT_POS_X) as usize] = score;
    sync_cube();
    if UNIT_POS_Y == 0 && own < rows {
        store_score(
            &partials[..],
            UNIT_POS_X,
            scores,
            token,
            own,
            visible,
            sizes,
            units,
        );
    }
}
