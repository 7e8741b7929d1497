//! The candidates of indexers that pick in two levels.

use burn::tensor::{Bool, IndexingUpdateOp, Int, Tensor};
use burn_ds4_ops::attention::MASKED;
use burn_ds4_ops::topk;

use crate::cache::Step;
use crate::config::CandidateParams;
use crate::trace::Trace;

/// The part of an indexer in two-level picking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Candidates {
    /// All rows are candidates.
    All,
    /// All rows are, and it chooses the candidates of later indexers.
    Source(CandidateParams),
    /// Those that an earlier indexer has chosen are.
    Restricted(CandidateParams),
}

impl Candidates {
    /// That of the indexer of a layer.
    pub(crate) fn of_layer(params: Option<CandidateParams>, layer: usize) -> Self {
        match params {
            Some(params) if layer == params.layer => Self::Source(params),
            Some(params) if layer > params.layer => Self::Restricted(params),
            _ => Self::All,
        }
    }

    /// Scores `[batch, positions, rows]` of rows of `ratio` positions, masked where nothing is
    /// visible, as picks are to be made of them.
    pub(super) fn apply(
        self,
        scores: Tensor<3>,
        ratio: usize,
        step: &Step,
        trace: &Trace,
    ) -> Tensor<3> {
        match self {
            Self::All => scores,
            Self::Source(params) => {
                let chosen = params.choose(scores.clone(), ratio, step);
                if let Some(chosen) = &chosen {
                    let [_, _, rows] = scores.dims();
                    let rows = || params.rows_of(chosen.clone(), rows);
                    trace.record_with("candidates", || rows().int());
                }
                step.handed().candidates = chosen;
                scores
            }
            Self::Restricted(params) => {
                let chosen = step.handed().candidates.clone();
                let Some(chosen) = chosen else {
                    return scores;
                };
                let (shape, size) = (scores.dims(), params.block_size);
                let [batch, count, rows] = shape;
                let hidden = chosen.bool_not();
                if !rows.is_multiple_of(size) {
                    let hidden = params.rows_of(hidden, rows).reshape(shape);
                    return scores.mask_fill(hidden, MASKED);
                }
                // Block by block, so that no mask of all rows is made.
                let blocks = [batch * count, rows / size, size];
                let hidden = hidden.unsqueeze_dim::<3>(2).expand(blocks);
                let scores = scores.reshape(blocks).mask_fill(hidden, MASKED);
                scores.reshape(shape)
            }
        }
    }
}

impl CandidateParams {
    /// The best blocks of each query, the block of the newest visible row among them: `[batch *
    /// positions, blocks]`. `None` where all blocks are.
    fn choose(self, scores: Tensor<3>, ratio: usize, step: &Step) -> Option<Tensor<2, Bool>> {
        let ([batch, count, rows], size) = (scores.dims(), self.block_size);
        let (queries, blocks) = (batch * count, rows.div_ceil(size));
        if blocks <= self.blocks {
            return None;
        }
        let scores = scores.reshape([queries, rows]);
        let scores = match blocks * size - rows {
            0 => scores,
            missing => {
                let like = (&scores.device(), scores.dtype());
                let padding = Tensor::full([queries, missing], MASKED, like);
                Tensor::cat(vec![scores, padding], 1)
            }
        };
        let best = scores.reshape([queries, blocks, size]).max_dim(2);
        let best: Tensor<2> = best.squeeze_dim(2);
        let newest = (step.positions() + 1) / ratio as i64 - 1;
        // Without the numbers of all blocks, whose upload could not be recorded. Where no row is
        // visible, -1 has a column of its own.
        let newest = newest.reshape([queries, 1]) / size as i64 + 1;
        let one = newest.ones_like();
        let like = (&best.device(), newest.dtype());
        let forced = Tensor::<2, Int>::zeros([queries, 1 + blocks], like);
        let forced = forced.scatter(1, newest, one, IndexingUpdateOp::Add);
        let forced = forced.narrow(1, 1, blocks).greater_elem(0);
        let best = best.mask_fill(forced, f32::MAX);
        let seen = best.clone().greater_elem(MASKED / 2.0);
        let kept = topk::top_k_mask(best, self.blocks).expect("numbers of blocks were validated");
        Some(kept.bool_and(seen))
    }

    /// What is said of blocks, `[queries, blocks]`, for each of so many rows: `[queries, rows]`.
    fn rows_of(self, of_blocks: Tensor<2, Bool>, rows: usize) -> Tensor<2, Bool> {
        let ([queries, blocks], size) = (of_blocks.dims(), self.block_size);
        let of_rows = of_blocks.unsqueeze_dim::<3>(2);
        let of_rows = of_rows.expand([queries, blocks, size]);
        of_rows.reshape([queries, blocks * size]).narrow(1, 0, rows)
    }
}
