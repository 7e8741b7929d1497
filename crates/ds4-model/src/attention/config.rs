//! How an attention is made.

use burn::config::Config;
use burn::tensor::Device;
use burn_ds4_ops::attention::RowRounding;

use super::candidates::Candidates;
use super::compressor::CompressorConfig;
use super::indexer::IndexerConfig;
use super::modules::Attention;
use crate::config::{AttentionKind, CacheFormat, CandidateParams, SharedRows};
use crate::linear::PackedLinearConfig;
use crate::norm::RmsNormConfig;
use crate::weights::{self, Initial, WeightSource, all_or_nothing};

/// Configuration of [`Attention`].
#[derive(Config, Debug)]
pub struct AttentionConfig {
    /// Width of a token.
    pub d_model: usize,
    /// Number of heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Trailing channels of a head that are rotated.
    pub rotated: usize,
    /// Rank of the query projection.
    pub q_lora_rank: usize,
    /// Head groups of the output projection.
    pub o_groups: usize,
    /// Rank of each group's output projection.
    pub o_lora_rank: usize,
    /// What is attended besides the window.
    pub kind: AttentionKind,
    /// Heads of the indexer.
    #[config(default = 64)]
    pub index_heads: usize,
    /// Width of an indexer head.
    #[config(default = 128)]
    pub index_head_dim: usize,
    /// Rows the indexer picks per query.
    #[config(default = 512)]
    pub index_top_k: usize,
    /// Blocks of compressed rows that later indexers pick within.
    #[config(default = "None")]
    pub candidates: Option<CandidateParams>,
    /// Whether query heads are normalised.
    #[config(default = true)]
    pub query_norm: bool,
    /// How rows are rounded, where they are.
    #[config(default = "CacheFormat::Content")]
    pub cache_format: CacheFormat,
    /// Epsilon of every norm.
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
    /// Whether key/value rows and indexer channels make the round trip through FP8 and FP4 that the
    /// released model was trained with. Those of [`CacheFormat::Whole`] do in any case.
    #[config(default = false)]
    pub quantized_cache: bool,
}

impl AttentionConfig {
    /// Initializes the attention with random weights.
    ///
    /// # Panics
    ///
    /// If the heads cannot be divided into `o_groups`, more channels are rotated than a head has,
    /// blocks of no tokens are compressed, the cache of an indexer whose width is no power of two
    /// is to be quantized, or an indexer is to pick no rows or more than
    /// [`MAX_K`](burn_ds4_ops::topk::MAX_K).
    pub fn init(&self, device: &Device) -> Attention {
        weights::dense(device, |source| self.build(source, ""))
    }

    /// The attention of the tensors `{prefix}..`.
    pub(crate) fn build(&self, source: &mut impl WeightSource, prefix: &str) -> Option<Attention> {
        assert!(
            self.o_groups > 0 && self.heads.is_multiple_of(self.o_groups),
            "heads ({}) must be a multiple of o_groups ({})",
            self.heads,
            self.o_groups
        );
        assert!(
            self.rotated <= self.head_dim && self.rotated.is_multiple_of(2),
            "rotated ({}) must be even and at most head_dim ({})",
            self.rotated,
            self.head_dim
        );
        assert!(
            self.kind.ratio() != Some(0),
            "kind ({:?}) must have a ratio of at least 1",
            self.kind
        );
        assert!(
            !self.quantized_cache
                || !matches!(self.kind, AttentionKind::CompressedSparse { .. })
                || self.index_head_dim.is_power_of_two(),
            "index_head_dim ({}) must be a power of two where quantized_cache is set",
            self.index_head_dim
        );
        let Self {
            d_model,
            heads,
            head_dim,
            rotated,
            q_lora_rank,
            o_groups,
            o_lora_rank,
            norm_epsilon,
            ..
        } = *self;
        let name = |name: &str| format!("{prefix}{name}");
        let linear = |d_input, d_output| PackedLinearConfig::new(d_input, d_output);
        let norm = |width| RmsNormConfig::new(width).with_epsilon(norm_epsilon);
        let query_a = linear(d_model, q_lora_rank).build(source, &name("wq_a"));
        let query_norm = norm(q_lora_rank).build(source, &name("q_norm"));
        let query_b = linear(q_lora_rank, heads * head_dim).build(source, &name("wq_b"));
        let key_value = linear(d_model, head_dim).build(source, &name("wkv"));
        let key_value_norm = norm(head_dim).build(source, &name("kv_norm"));
        let groups = [o_groups, o_lora_rank, heads / o_groups * head_dim];
        let output_a = source.groups(&name("wo_a"), groups);
        let output_b = linear(o_groups * o_lora_rank, d_model).build(source, &name("wo_b"));
        let sinks = source.float(&name("attn_sink"), [heads], Initial::Zeros);
        let overlap = matches!(self.kind, AttentionKind::CompressedSparse { .. });
        let shared = match self.kind {
            AttentionKind::Shared(shared) => Some(shared),
            _ => None,
        };
        let makes_rows = self.kind.ratio().filter(|_| self.kind.compresses());
        let compressor = makes_rows.map(|ratio| {
            CompressorConfig::new(d_model, head_dim, rotated, ratio, overlap)
                .with_keys(shared.map(|_| self.index_head_dim))
                .with_norm_epsilon(norm_epsilon)
                .build(source, prefix)
        });
        let picks = shared.map_or(overlap, SharedRows::picks);
        let indexer = self.kind.ratio().filter(|_| picks).map(|ratio| {
            let (heads, width) = (self.index_heads, self.index_head_dim);
            let top_k = self.index_top_k;
            IndexerConfig::new(d_model, q_lora_rank, heads, width, rotated, ratio, top_k)
                .with_shared(shared.map(|own| Candidates::of_layer(self.candidates, own.layer)))
                .with_norm_epsilon(norm_epsilon)
                .build(source, &name("indexer."))
        });
        Some(Attention {
            query_a: query_a?,
            query_norm: query_norm?,
            query_b: query_b?,
            key_value: key_value?,
            key_value_norm: key_value_norm?,
            output_a: output_a?,
            output_b: output_b?,
            sinks: sinks?,
            compressor: all_or_nothing(compressor)?,
            indexer: all_or_nothing(indexer)?,
            heads,
            head_dim,
            rotated,
            o_groups,
            o_lora_rank,
            norm_epsilon,
            query_norm_heads: self.query_norm,
            shared,
            rounding: match (self.cache_format, self.quantized_cache) {
                (CacheFormat::Whole, _) => RowRounding::Whole,
                (CacheFormat::Content, true) => RowRounding::Content,
                (CacheFormat::Content, false) => RowRounding::None,
            },
        })
    }
}
