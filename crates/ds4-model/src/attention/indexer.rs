use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::attention::{RowRounding, VisibleBlocks, index_scores};
use burn_ds4_ops::topk::{self, Windows};

use super::compressor::{Compressor, CompressorConfig, quantize_index};
use crate::cache::{CompressedCache, CompressedStep, mask};
use crate::linear::{PackedLinear, PackedLinearConfig, random};
use crate::rope::Rotation;
use crate::trace::Trace;

/// Configuration of [`Indexer`].
#[derive(Config, Debug)]
pub struct IndexerConfig {
    /// Width of a token.
    pub d_model: usize,
    /// Width of the query's low-rank representation.
    pub q_lora_rank: usize,
    /// Number of heads.
    pub heads: usize,
    /// Width of a head and of an indexer row.
    pub width: usize,
    /// Trailing channels of a head that are rotated.
    pub rotated: usize,
    /// Tokens per row.
    pub ratio: usize,
    /// Rows to pick per query.
    pub top_k: usize,
    /// Epsilon of the row's norm.
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
}

impl IndexerConfig {
    /// Initializes the indexer with random weights.
    pub fn init(&self, device: &Device) -> Indexer {
        Indexer {
            query: PackedLinearConfig::new(self.q_lora_rank, self.heads * self.width).init(device),
            head_weights: random([self.heads, self.d_model], device),
            compressor: CompressorConfig::new(
                self.d_model,
                self.width,
                self.rotated,
                self.ratio,
                true,
            )
            .with_norm_epsilon(self.norm_epsilon)
            .init(device),
            heads: self.heads,
            width: self.width,
            top_k: self.top_k,
        }
    }
}

/// The lightning indexer: scores compressed rows with a few narrow heads, and picks the best for each query.
#[derive(Module, Debug)]
pub struct Indexer {
    /// Projection to the heads' queries: `[heads · width, q_lora_rank]`.
    pub query: PackedLinear,
    /// Projection to the heads' weights: `[heads, d_model]`.
    pub head_weights: Param<Tensor<2>>,
    /// Compressor of the indexer's own rows.
    pub compressor: Compressor,
    /// Number of heads.
    pub heads: usize,
    /// Width of a head.
    pub width: usize,
    /// Rows to pick per query.
    pub top_k: usize,
}

/// What the indexer works on.
pub(super) struct IndexerInput<'a> {
    /// The heads' weights: f32 `[batch, positions, heads]`.
    pub(super) head_weights: Tensor<3>,
    /// The heads' queries, where it [chooses](Indexer::chooses): `[batch, positions, heads, width]`.
    pub(super) queries: Option<Tensor<4>>,
    pub(super) rotation: &'a Rotation,
    /// Of a step of many positions.
    pub(super) step: Option<&'a CompressedStep>,
    pub(super) quantized: bool,
}

/// What a query sees of the compressed rows that are complete.
#[derive(Clone, Debug)]
pub(super) enum Picks {
    /// All.
    All,
    /// What this mask leaves: f32 `[batch, positions, rows]`.
    Masked(Tensor<3>),
    /// The rows of these numbers: `[batch, positions, picks]`.
    Some(Tensor<3, Int>),
}

impl Indexer {
    /// Whether there can be more compressed rows than are picked.
    pub(super) fn chooses(&self, cache: &CompressedCache) -> bool {
        cache.rows.slots() > self.top_k
    }

    /// What becomes of the indexer's rows before they are stored.
    pub(super) fn rounding(quantized: bool) -> RowRounding {
        if quantized {
            RowRounding::Index
        } else {
            RowRounding::None
        }
    }

    /// Picks among the compressed rows for every query, by the indexer's own rows, of which there are as many.
    pub(super) fn pick(
        &self,
        input: IndexerInput<'_>,
        cache: &CompressedCache,
        trace: &Trace,
    ) -> Picks {
        let IndexerInput {
            head_weights,
            queries,
            rotation,
            step,
            quantized,
        } = input;
        let Some(queries) = queries else {
            // Every visible row is picked.
            return Picks::All;
        };
        let [batch, count, _, _] = queries.dims();
        let available = cache.rows.slots();
        let ratio = self.compressor.ratio;

        let visible = step.is_none().then(|| VisibleBlocks {
            start: rotation.start.clone(),
            ratio,
        });
        let keys = cache.rows.all();
        let scores = self.scores(head_weights, queries, rotation, quantized, keys, visible);
        trace.record("scores", &scores);
        let Some(step) = step else {
            let scores = scores.reshape([batch * count, available]);
            let windows = Windows::Blocks {
                starts: rotation.start.clone(),
                ratio,
                next_n: count,
            };
            let picks = topk::top_k_ids(scores, windows, self.top_k);
            trace.record("picks", &picks);
            return Picks::Some(picks.reshape([batch, count, self.top_k]));
        };

        // Fewer rows are touched by gathering each query's picks, or by masking all rows once for all queries.
        let scores = (scores + step.bias.clone()).reshape([batch * count, available]);
        if count * self.top_k > available {
            let picked = topk::top_k_mask(scores, self.top_k).reshape([batch, count, available]);
            return Picks::Masked(mask(picked.bool_not()));
        }
        let picks = topk::top_k_ids(scores, Windows::All, self.top_k);
        trace.record("picks", &picks);
        Picks::Some(picks.reshape([batch, count, self.top_k]))
    }

    /// Scores of all stored rows, in f32: `[batch, positions, rows]`.
    fn scores(
        &self,
        head_weights: Tensor<3>,
        queries: Tensor<4>,
        rotation: &Rotation,
        quantized: bool,
        keys: Tensor<3>,
        visible: Option<VisibleBlocks>,
    ) -> Tensor<3> {
        let queries = rotation.apply(queries);
        let queries = if quantized {
            quantize_index(queries)
        } else {
            queries
        };
        let scale = (self.width as f64).powf(-0.5) * (self.heads as f64).powf(-0.5);
        index_scores(queries, keys, head_weights, scale, visible)
            .expect("keys of a cache that was made for the model")
    }
}
