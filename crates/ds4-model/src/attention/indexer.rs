use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_ds4_ops::attention::{CompressedKeys, FEW_TOKENS, RowRounding, index_scores};
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
    /// The tokens' projections by the indexer's compressor: f32 `[batch, positions, 4 · width]`.
    pub(super) projections: Tensor<3>,
    /// The heads' weights: f32 `[batch, positions, heads]`.
    pub(super) head_weights: Tensor<3>,
    /// The query's low-rank representation: `[batch, positions, q_lora_rank]`.
    pub(super) query: Tensor<3>,
    pub(super) rotation: &'a Rotation,
    pub(super) step: &'a CompressedStep,
    pub(super) quantized: bool,
}

impl Indexer {
    /// Stores the new indexer rows and picks among `rows` (`[batch, rows, head_dim]`) for every query.
    pub(super) fn forward(
        &self,
        input: IndexerInput<'_>,
        rows: Tensor<3>,
        cache: &mut CompressedCache,
        trace: &Trace,
    ) -> CompressedKeys {
        let IndexerInput {
            projections,
            head_weights,
            query,
            rotation,
            step,
            quantized,
        } = input;
        let rounding = if quantized {
            RowRounding::Index
        } else {
            RowRounding::None
        };
        self.compressor
            .forward(projections, step, rotation, cache, rounding);

        let [batch, count, _] = query.dims();
        let [_, available, _] = rows.dims();
        let bias = step.bias.clone();
        if available <= self.top_k {
            // Every visible row is picked.
            return CompressedKeys {
                rows,
                bias,
                picks: None,
            };
        }

        let scores = self.scores(head_weights, query, rotation, quantized, cache.rows.all());
        trace.record("scores", &scores);
        let scores = (scores + bias.clone()).reshape([batch * count, available]);

        // Fewer rows are touched by gathering each query's picks, or by masking all rows once for all queries. Few queries always
        // pick: what is masked takes up columns, and in other columns a softmax may round differently.
        if batch * count > FEW_TOKENS && count * self.top_k > available {
            let picked = topk::top_k_mask(scores, self.top_k).reshape([batch, count, available]);
            let unpicked = mask(picked.bool_not());
            return CompressedKeys {
                rows,
                bias: bias + unpicked,
                picks: None,
            };
        }
        let picks = topk::top_k_ids(scores, Windows::All, self.top_k);
        trace.record("picks", &picks);
        CompressedKeys {
            rows,
            bias,
            picks: Some(picks.reshape([batch, count, self.top_k])),
        }
    }

    /// Scores of all stored rows, in f32: `[batch, positions, rows]`.
    fn scores(
        &self,
        head_weights: Tensor<3>,
        query: Tensor<3>,
        rotation: &Rotation,
        quantized: bool,
        keys: Tensor<3>,
    ) -> Tensor<3> {
        let [batch, count, _] = query.dims();
        let queries = self
            .query
            .forward(query)
            .reshape([batch, count, self.heads, self.width]);
        let queries = rotation.apply(queries);
        let queries = if quantized {
            quantize_index(queries)
        } else {
            queries
        };
        let scale = (self.width as f64).powf(-0.5) * (self.heads as f64).powf(-0.5);
        let weights = head_weights * scale;
        index_scores(queries, keys, weights).expect("keys of a cache that was made for the model")
    }
}
