//! The structure that a model has.

use burn::config::Config;

/// Most tokens that are drafted per step.
pub const MAX_DRAFTS: usize = 8;

/// Which attention a layer runs besides its sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionKind {
    /// Sliding window only (compression ratio 0).
    Window,
    /// Compressed sparse attention (CSA): overlapping blocks of `ratio` tokens, of which the
    /// lightning indexer picks some.
    CompressedSparse {
        /// Tokens per compressed row.
        ratio: usize,
    },
    /// Heavily compressed attention (HCA): disjoint blocks of `ratio` tokens, all visible ones
    /// attended.
    HeavilyCompressed {
        /// Tokens per compressed row.
        ratio: usize,
    },
    /// Sparse attention over compressed rows that several layers share: disjoint blocks, of which
    /// an indexer picks some (DeepSeek-V4.1).
    Shared(SharedRows),
}

/// Whose compressed rows a layer reads, and whose picks among them it takes. It names itself where
/// it has the compressor, or the indexer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SharedRows {
    /// The layer.
    pub layer: usize,
    /// Tokens per compressed row. A row of one token has no gate.
    pub ratio: usize,
    /// The layer whose compressor makes the rows, and the indexer's keys.
    pub rows_of: usize,
    /// The layer whose indexer picks among them.
    pub picks_of: usize,
}

impl SharedRows {
    /// Whether the layer has the compressor.
    pub fn makes_rows(self) -> bool {
        self.rows_of == self.layer
    }

    /// Whether the layer has an indexer.
    pub fn picks(self) -> bool {
        self.picks_of == self.layer
    }
}

/// Two-level picking: one indexer keeps the best blocks of compressed rows, and those of later
/// layers pick within them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CandidateParams {
    /// The layer whose indexer chooses the blocks. Its own picks may be any rows.
    pub layer: usize,
    /// Blocks that it keeps per query.
    pub blocks: usize,
    /// Rows of a block.
    pub block_size: usize,
}

/// How rows of caches are rounded, where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheFormat {
    /// FP8 per 64 channels that are not rotated; the indexer's rows FP4 per 32 channels after a
    /// Hadamard transform. Whether rows are rounded is an option of loading.
    Content,
    /// Window rows FP8 per 32 channels, all of them; compressed rows FP4 per 16 channels with E4M3
    /// scales; the indexer's keys and queries FP4 per 32 channels. Rows are always rounded: the
    /// model was trained with it.
    Whole,
}

/// N-gram tables beside the layers, which change the streams before some of them.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct EngramParams {
    /// The layers, ascending.
    pub layers: Vec<usize>,
    /// Rows of the table of each.
    pub rows: Vec<usize>,
    /// Tokens of the longest n-gram; the shortest has two.
    pub max_ngram: usize,
    /// Rows that an n-gram of each size is hashed to.
    pub heads: usize,
    /// Width of a row.
    pub head_dim: usize,
    /// The primes that hashes are taken modulo begin here.
    pub vocab_size: usize,
    /// Token in the places before a text.
    pub pad_token_id: u32,
    /// Ids that tokens of like texts have in common.
    pub compressed_vocab_size: usize,
}

impl EngramParams {
    /// Rows that a token reads of a table.
    pub fn columns(&self) -> usize {
        (self.max_ngram - 1) * self.heads
    }
}

impl AttentionKind {
    /// Tokens per compressed row, `None` where nothing is compressed.
    pub fn ratio(self) -> Option<usize> {
        match self {
            Self::Window => None,
            Self::CompressedSparse { ratio } | Self::HeavilyCompressed { ratio } => Some(ratio),
            Self::Shared(shared) => Some(shared.ratio),
        }
    }

    /// Whether the layer makes compressed rows.
    pub fn compresses(self) -> bool {
        match self {
            Self::Window => false,
            Self::CompressedSparse { .. } | Self::HeavilyCompressed { .. } => true,
            Self::Shared(shared) => shared.makes_rows(),
        }
    }
}

/// YaRN frequency scaling of the compressed layers' rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct YarnConfig {
    /// Context extension factor.
    pub factor: f64,
    /// Context length before the extension.
    pub original_max_position_embeddings: usize,
    /// Rotations over the original context above which a frequency stays as it is.
    pub beta_fast: f64,
    /// Rotations over the original context below which a frequency is divided by `factor`.
    pub beta_slow: f64,
}

/// The DSpark drafter of a model, which drafts a block of tokens in one forward pass.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DsparkParams {
    /// Tokens of a block, and drafts that it proposes.
    pub block_size: usize,
    /// Trunk layers that are tapped for the drafter, ascending.
    pub target_layers: Vec<usize>,
    /// Whether the taps are what enters these layers; otherwise they are what leaves them.
    #[serde(default)]
    pub taps_inputs: bool,
    /// Token in all places of a block but the first.
    pub noise_token_id: u32,
    /// Rank of the Markov head.
    pub markov_rank: usize,
    /// Layers of the drafter.
    pub layers: usize,
    /// Routed experts of each layer, and those of them that a token has, if not as in the trunk.
    #[serde(default)]
    pub experts: Option<[usize; 2]>,
}

/// Configuration of a whole model, DeepSeek-V4 or V4.1. The defaults are those of V4-Flash.
#[derive(Config, Debug, PartialEq)]
pub struct ModelConfig {
    /// Number of token ids.
    #[config(default = 129280)]
    pub vocab_size: usize,
    /// Width of one residual stream.
    #[config(default = 4096)]
    pub hidden_size: usize,
    /// Attention kind of each trunk layer; its length is the number of layers.
    #[config(default = "flash_layers()")]
    pub layers: Vec<AttentionKind>,
    /// Number of multi-token-prediction layers (0 or 1).
    #[config(default = 1)]
    pub num_mtp_layers: usize,
    /// The DSpark drafter, in place of a multi-token-prediction layer.
    #[config(default = "None")]
    pub dspark: Option<DsparkParams>,
    /// Query heads.
    #[config(default = 64)]
    pub num_attention_heads: usize,
    /// Width of a head, and of the single shared key/value head.
    #[config(default = 512)]
    pub head_dim: usize,
    /// Trailing channels of a head that are rotated.
    #[config(default = 64)]
    pub rope_head_dim: usize,
    /// Rank of the query projection.
    #[config(default = 1024)]
    pub q_lora_rank: usize,
    /// Whether query heads are normalised.
    #[config(default = true)]
    pub query_norm: bool,
    /// Head groups of the output projection.
    #[config(default = 8)]
    pub o_groups: usize,
    /// Rank of each group's output projection.
    #[config(default = 1024)]
    pub o_lora_rank: usize,
    /// Positions of the sliding window, the query's own included.
    #[config(default = 128)]
    pub sliding_window: usize,
    /// Heads of the lightning indexer.
    #[config(default = 64)]
    pub index_n_heads: usize,
    /// Width of an indexer head.
    #[config(default = 128)]
    pub index_head_dim: usize,
    /// Compressed rows the indexer selects per query.
    #[config(default = 512)]
    pub index_topk: usize,
    /// Blocks of compressed rows that later indexers pick within.
    #[config(default = "None")]
    pub candidates: Option<CandidateParams>,
    /// How rows of caches are rounded.
    #[config(default = "CacheFormat::Content")]
    pub cache_format: CacheFormat,
    /// N-gram tables.
    #[config(default = "None")]
    pub engram: Option<EngramParams>,
    /// Columns of a block of FP8 weights with one scale, and of the inputs of packed products where
    /// these are rounded: 128 or 32.
    #[config(default = 128)]
    pub weight_block: usize,
    /// Routed experts per layer.
    #[config(default = 256)]
    pub n_routed_experts: usize,
    /// Routed experts per token.
    #[config(default = 6)]
    pub num_experts_per_tok: usize,
    /// Shared experts per layer (their widths add up to one wider expert).
    #[config(default = 1)]
    pub n_shared_experts: usize,
    /// Inner width of an expert.
    #[config(default = 2048)]
    pub moe_intermediate_size: usize,
    /// Leading layers whose experts are looked up by token id.
    #[config(default = 3)]
    pub num_hash_layers: usize,
    /// Factor on the normalised routing weights.
    #[config(default = 1.5)]
    pub routed_scaling_factor: f64,
    /// Clamp of the SwiGLU inputs; `None` for no clamp.
    #[config(default = "Some(10.0)")]
    pub swiglu_limit: Option<f64>,
    /// Residual streams (hyper-connections).
    #[config(default = 4)]
    pub hc_mult: usize,
    /// Whether a hyper-connection collapses the streams by the weights that the one before it has
    /// computed; otherwise by its own. The streams of the last layer are collapsed like that, too,
    /// without a head.
    #[config(default = false)]
    pub late_pre_mix: bool,
    /// Sinkhorn iterations of the hyper-connection mixing matrix.
    #[config(default = 20)]
    pub hc_sinkhorn_iters: usize,
    /// Epsilon of the hyper-connections.
    #[config(default = 1e-6)]
    pub hc_eps: f64,
    /// Epsilon of every RMS norm.
    #[config(default = 1e-6)]
    pub rms_norm_eps: f64,
    /// Rotary base of window-only layers and the MTP layer.
    #[config(default = 10000.0)]
    pub rope_theta: f64,
    /// Rotary base of compressed layers.
    #[config(default = 160000.0)]
    pub compress_rope_theta: f64,
    /// YaRN scaling of compressed layers.
    #[config(default = "Some(flash_yarn())")]
    pub yarn: Option<YarnConfig>,
    /// Longest supported context.
    #[config(default = 1048576)]
    pub max_position_embeddings: usize,
    /// Beginning-of-sequence id.
    #[config(default = 0)]
    pub bos_token_id: u32,
    /// End-of-sequence id.
    #[config(default = 1)]
    pub eos_token_id: u32,
}

fn flash_layers() -> Vec<AttentionKind> {
    (0..43)
        .map(|layer| match layer {
            0 | 1 => AttentionKind::Window,
            layer if layer % 2 == 0 => AttentionKind::CompressedSparse { ratio: 4 },
            _ => AttentionKind::HeavilyCompressed { ratio: 128 },
        })
        .collect()
}

fn flash_yarn() -> YarnConfig {
    YarnConfig {
        factor: 16.0,
        original_max_position_embeddings: 65536,
        beta_fast: 32.0,
        beta_slow: 1.0,
    }
}
