//! Attention of decode steps where the device's memory is the host's, so that reading positions and
//! picks costs nothing. Every query has sums of its own, over the rows that it sees: its bits
//! depend neither on the other queries nor on how many rows there is memory for.

use std::ops::Range;

use super::cached::{CachedOps, Prepared, cached_attention};
use super::index::{index_scores, scored_positions};
use crate::attention::args::{
    BlockVisibility, CachedBlocks, CompressedRows, IndexInputs, PagedRows, Queries, QueryRotation,
    SinkInputs,
};
use crate::attention::options::MASKED;
use crate::dims::{Dims, dims_of};
use crate::matmul::MatmulOps;
use crate::optional::OptionalInt;
use crate::reference::prelude::*;

/// See [`cached_attention`](crate::attention::cached_attention).
pub(in crate::attention) fn cached_attention_by_query<B: CachedOps>(
    queries: Queries<B>,
    window: FloatTensor<B>,
    blocks: CachedBlocks<B>,
) -> FloatTensor<B> {
    if !queries.causal {
        // Where all see the same rows, there is nothing to read.
        return cached_attention(queries, window, blocks, SinkInputs::output);
    }
    let shape = queries.x.shape();
    let [batch, count, _, _] = dims_of(&shape);
    let known = queries.angles.shape()[0];
    let seen = SeenRows::new(&blocks, queries.start.clone(), known, count);
    let prepared = Prepared::new(queries, window);
    let outputs = (0..batch * count).map(|query| {
        let sequence = query / count;
        let own = prepared
            .inputs
            .sequence(sequence)
            .some(query % count..query % count + 1);
        let compressed = seen.of_query(sequence, query);
        SinkInputs { compressed, ..own }.attend()
    });
    let output = B::float_reshape(B::float_cat(outputs.collect(), 0), shape);
    prepared.rotate_back(output)
}

/// See [`index_scores`](crate::attention::index_scores).
pub(in crate::attention) fn index_scores_by_query<B: MatmulOps>(
    inputs: IndexInputs<B>,
) -> FloatTensor<B> {
    let BlockVisibility::From { start, ratio } = inputs.visibility else {
        return index_scores::<B>(inputs);
    };
    let IndexInputs {
        queries,
        keys,
        weights,
        ..
    } = inputs;
    let [batch, count, _, _] = queries.dims();
    let rows = keys.count();
    let visible = visible_blocks::<B>(start, scored_positions(count), count, rows, ratio);
    let shape = Shape::new([batch, count, rows]);
    let mut scores = B::float_full(shape, MASKED.into(), &queries.device(), FloatDType::F32);
    for (at, visible) in visible.into_iter().enumerate().filter(|(_, n)| *n > 0) {
        let (sequence, query) = (at / count, at % count);
        let sequence = sequence..sequence + 1;
        let own = |tensor: &FloatTensor<B>, rows: Range<usize>| {
            slice::<B>(slice::<B>(tensor.clone(), 0, sequence.clone()), 1, rows)
        };
        let query = query..query + 1;
        let seen = index_scores::<B>(IndexInputs {
            queries: own(&queries, query.clone()),
            keys: PagedRows {
                rows: keys.first(at / count, visible),
                pages: OptionalInt::None,
            },
            weights: own(&weights, query.clone()),
            scale: inputs.scale,
            visibility: BlockVisibility::All,
            rotation: QueryRotation::None,
        });
        let place = [sequence.clone(), query, 0..visible].map(Slice::from);
        scores = B::float_slice_assign(scores, &place, seen);
    }
    scores
}

impl<B: MatmulOps> SinkInputs<B> {
    /// The inputs of one sequence, without compressed rows.
    fn sequence(&self, sequence: usize) -> Self {
        let own = |tensor: &FloatTensor<B>| slice::<B>(tensor.clone(), 0, sequence..sequence + 1);
        Self {
            queries: own(&self.queries),
            window: own(&self.window),
            window_bias: own(&self.window_bias),
            compressed: CompressedRows::None,
            sinks: self.sinks.clone(),
            ..*self
        }
    }
}

/// The compressed rows that each query sees, known to the host.
struct SeenRows<B: Backend> {
    /// If there are any.
    rows: Option<PagedRows<B>>,
    /// The pages of all sequences, if rows are in some.
    pages: Option<Vec<i64>>,
    /// Visible rows of each query.
    visible: Vec<usize>,
    /// Those that each query picks, in their order, if not all.
    picks: Option<Vec<i64>>,
}

impl<B: Backend> SeenRows<B> {
    fn new(blocks: &CachedBlocks<B>, start: IntTensor<B>, known: usize, count: usize) -> Self {
        let (rows, picks, ratio) = blocks.parts();
        let available = rows.map_or(0, PagedRows::count);
        let pages = rows.and_then(|rows| rows.pages.as_ref());
        Self {
            rows: rows.cloned(),
            pages: pages.map(read::<B>),
            visible: visible_blocks::<B>(start, known, count, available, ratio),
            picks: picks.map(read::<B>),
        }
    }

    /// For the query number `query` of all sequences, which is of `sequence`.
    fn of_query(&self, sequence: usize, query: usize) -> CompressedRows<B> {
        let visible = self.visible[query];
        let Some(rows) = self.rows.clone().filter(|_| visible > 0) else {
            return CompressedRows::None;
        };
        let rows = match &self.picks {
            None => rows.first(sequence, visible),
            Some(picks) => {
                let number = picks.len() / self.visible.len();
                let picks = &picks[query * number..(query + 1) * number];
                let range = 0..visible as i64;
                let picks = picks.iter().filter(|pick| range.contains(pick));
                let [all, of_page, width] = rows.rows.dims();
                let at = picks.map(|pick| match &self.pages {
                    None => (sequence * of_page) as i64 + pick,
                    Some(pages) => {
                        let (page, of_page) = (*pick as usize / of_page, of_page as i64);
                        let own = pages.len() / rows.pages.as_ref().map_or(1, |own| own.shape()[0]);
                        pages[sequence * own + page] * of_page + pick % of_page
                    }
                });
                let picks: Vec<i32> = at.map(|at| at as i32).collect();
                if picks.is_empty() {
                    return CompressedRows::None;
                }
                let number = picks.len();
                let rows = reshape::<B>(rows.rows, [1, all * of_page, width]);
                let picks = B::int_from_data(TensorData::new(picks, [number]), &rows.device());
                B::float_select(rows, 1, picks)
            }
        };
        let shape = Shape::new([1, 1, rows.shape()[1]]);
        let bias = B::float_zeros(shape, &rows.device(), FloatDType::F32);
        CompressedRows::Shared { rows, bias }
    }
}

/// How many of `rows` compressed rows, of blocks of `ratio` positions, are visible to each of
/// `count` queries of every sequence. A start that is none of the `known` positions is that of a
/// vacant sequence.
fn visible_blocks<B: Backend>(
    start: IntTensor<B>,
    known: usize,
    count: usize,
    rows: usize,
    ratio: usize,
) -> Vec<usize> {
    let starts = read::<B>(&start).into_iter().flat_map(|start| {
        let start = usize::try_from(start).ok().filter(|start| *start < known);
        (0..count)
            .map(move |query| start.map_or(0, |start| ((start + query + 1) / ratio).min(rows)))
    });
    starts.collect()
}

/// What a tensor in the host's memory has.
fn read<B: Backend>(tensor: &IntTensor<B>) -> Vec<i64> {
    let data = read_sync(B::int_into_data(tensor.clone())).expect("numbers that can be read");
    data.iter::<i64>().collect()
}
