//! Compressed rows that several layers share, and the candidates among them.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Bool, Tensor};
use burn_ds4_ops::attention::{
    self as ops, CompressionInputs, MASKED, PagedRows, PooledBlocks, Positions, RowRounding,
};
use burn_ds4_ops::topk;

use super::compressor::Compressor;
use crate::cache::{SharedCaches, Step};
use crate::config::CandidateParams;
use crate::linear::project_f32;
use crate::norm::{RmsNorm, RmsNormConfig};
use crate::trace::Trace;
use crate::weights::WeightSource;

/// Configuration of [`IndexKeys`].
#[derive(Config, Debug)]
pub struct IndexKeysConfig {
    /// Width of a compressed row.
    pub d_row: usize,
    /// Width of a key.
    pub width: usize,
    /// Epsilon of the keys' norm.
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
}

impl IndexKeysConfig {
    /// The keys of the tensors `{prefix}..`.
    pub(super) fn build(&self, source: &mut impl WeightSource, prefix: &str) -> Option<IndexKeys> {
        let shape = [self.width, self.d_row];
        let projection = source.stored(&[format!("{prefix}wk.weight")], shape);
        let norm = RmsNormConfig::new(self.width)
            .with_epsilon(self.norm_epsilon)
            .build(source, &format!("{prefix}k_norm"));
        Some(IndexKeys {
            projection: projection?,
            norm: norm?,
        })
    }
}

/// Makes the keys by which indexers pick among compressed rows, of these rows before they are
/// rotated and rounded.
#[derive(Module, Debug)]
pub struct IndexKeys {
    /// Projection of a row: `[width, row width]`.
    pub projection: Param<Tensor<2>>,
    /// Norm of a key.
    pub norm: RmsNorm,
}

impl Compressor {
    /// Stores rows for the blocks that a step completes, by its projections (f32 `[batch,
    /// positions, values and scores]`), and their keys.
    pub(super) fn append_shared(
        &self,
        projections: Tensor<3>,
        positions: &Positions,
        caches: &mut SharedCaches,
        step: &Step,
        trace: &Trace,
    ) {
        const FITTING: &str = "a cache that was made for the model and has capacity";
        let keys = self.keys.as_ref().expect("rows that are shared have keys");
        let [_, count, width] = projections.dims();
        let latent = match self.ratio {
            // Nothing is pooled.
            1 => self.norm.forward(projections),
            ratio => {
                let device = (&projections.device(), projections.dtype());
                let inputs = CompressionInputs {
                    bias: Tensor::zeros([ratio, width], device),
                    projections,
                    norm: self.norm.weight.val(),
                    epsilon: self.norm.epsilon,
                };
                let raw = caches.rows.raw_mut().take();
                let pooled = ops::pool_blocks(inputs, positions.clone(), raw);
                let PooledBlocks { raw, rows } = pooled.expect(FITTING);
                caches.rows.raw_mut().put(raw);
                rows
            }
        };
        trace.record("latent", &latent);
        let key = keys
            .norm
            .forward(project_f32(latent.clone(), keys.projection.val()));
        for (new, cache, rounding) in [
            (latent, &mut caches.rows, RowRounding::Shared),
            (key, &mut caches.keys, RowRounding::Key),
        ] {
            let rows = PagedRows {
                rows: cache.take_rows(),
                pages: step.pages().cloned(),
            };
            let blocks = (self.ratio, count);
            let stored = ops::store_blocks(new, positions.clone(), blocks, rounding, rows);
            cache.put_rows(stored.expect(FITTING));
        }
    }
}

/// The part of an indexer in two-level picking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Candidates {
    /// It has none: it picks among all rows.
    None,
    /// It chooses the candidates of later indexers.
    Chooses(CandidateParams),
    /// It picks among those that an earlier one has chosen.
    Obeys,
}

impl Candidates {
    /// That of the indexer of a layer.
    pub(crate) fn of_layer(params: Option<CandidateParams>, layer: usize) -> Self {
        match params {
            Some(params) if layer == params.layer => Self::Chooses(params),
            Some(params) if layer > params.layer => Self::Obeys,
            _ => Self::None,
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
            Self::None => scores,
            Self::Chooses(params) => {
                let chosen = params.choose(scores.clone(), ratio, step);
                if let Some(chosen) = &chosen {
                    trace.record_with("candidates", || chosen.clone().int());
                }
                step.handed().candidates = chosen;
                scores
            }
            Self::Obeys => {
                let chosen = step.handed().candidates.clone();
                let Some(chosen) = chosen else {
                    return scores;
                };
                let shape = scores.dims();
                scores.mask_fill(chosen.bool_not().reshape(shape), MASKED)
            }
        }
    }
}

impl CandidateParams {
    /// The rows of the best blocks of each query, the block of the newest visible row among them:
    /// `[batch * positions, rows]`. `None` where all blocks are.
    fn choose(self, scores: Tensor<3>, ratio: usize, step: &Step) -> Option<Tensor<2, Bool>> {
        let ([batch, count, rows], size) = (scores.dims(), self.block_size);
        let (queries, blocks) = (batch * count, rows.div_ceil(size));
        if blocks <= self.blocks {
            return None;
        }
        let scores = scores.reshape([queries, rows]);
        let like = (&scores.device(), scores.dtype());
        let padding = Tensor::full([queries, blocks * size - rows + 1], MASKED, like);
        // One more than is needed, since there may be none.
        let padded = Tensor::cat(vec![scores, padding], 1).narrow(1, 0, blocks * size);
        let best = padded.reshape([queries, blocks, size]).max_dim(2);
        let best: Tensor<2> = best.squeeze_dim(2);
        let newest = (step.positions() + 1) / ratio as i64 - 1;
        let newest = newest.reshape([queries, 1]) / size as i64;
        let numbers = Tensor::arange(0..blocks as i64, &best.device()).unsqueeze::<2>();
        let forced = numbers
            .expand([queries, blocks])
            .equal(newest.expand([queries, blocks]));
        let best = best.mask_fill(forced, f32::MAX);
        let seen = best.clone().greater_elem(MASKED / 2.0);
        let kept = topk::top_k_mask(best, self.blocks).expect("numbers of blocks were validated");
        let kept = kept.bool_and(seen).unsqueeze_dim::<3>(2);
        let kept = kept
            .expand([queries, blocks, size])
            .reshape([queries, blocks * size]);
        Some(kept.narrow(1, 0, rows))
    }
}
