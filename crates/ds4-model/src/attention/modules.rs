//! The parts of an attention.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_ds4_ops::attention::RowRounding;

use super::compressor::Compressor;
use super::indexer::Indexer;
use crate::config::{AttentionKind, SharedRows};
use crate::linear::{PackedLinear, WeightStack};
use crate::norm::RmsNorm;

/// Attention of many heads over one shared key/value row per position.
///
/// Every query attends to the positions of its sliding window and, where there is a compressor, to
/// rows that represent whole blocks of earlier positions: all complete ones, or those that the
/// indexer picks.
#[derive(Module, Debug)]
pub struct Attention {
    /// `wq_a`: `[q_lora_rank, d_model]`.
    pub query_a: PackedLinear,
    /// Norm of the low-rank query.
    pub query_norm: RmsNorm,
    /// `wq_b`: `[heads · head_dim, q_lora_rank]`.
    pub query_b: PackedLinear,
    /// `wkv`: `[head_dim, d_model]`.
    pub key_value: PackedLinear,
    /// Norm of the key/value row.
    pub key_value_norm: RmsNorm,
    /// `wo_a`: a matrix for the heads of each group,
    /// `[o_groups, o_lora_rank, heads / o_groups · head_dim]`.
    pub output_a: WeightStack,
    /// `wo_b`: `[d_model, o_groups · o_lora_rank]`.
    pub output_b: PackedLinear,
    /// Sink of each head, in logit units: f32 `[heads]`.
    pub sinks: Param<Tensor<1>>,
    /// Compressor of the rows beyond the window.
    pub compressor: Option<Compressor>,
    /// Picks among the compressed rows.
    pub indexer: Option<Indexer>,
    /// Number of heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Trailing channels of a head that are rotated.
    pub rotated: usize,
    /// Head groups of the output projection.
    pub o_groups: usize,
    /// Rank of each group's output projection.
    pub o_lora_rank: usize,
    /// Epsilon of the query heads' norm.
    pub norm_epsilon: f64,
    /// Whether query heads are normalised.
    pub query_norm_heads: bool,
    /// Whose compressed rows it reads, where layers share them.
    #[module(skip)]
    pub shared: Option<SharedRows>,
    /// How key/value rows are rounded before they are stored. Other rows follow from that.
    #[module(skip)]
    pub rounding: RowRounding,
}

impl Attention {
    /// What is attended besides the window.
    pub fn kind(&self) -> AttentionKind {
        if let Some(shared) = self.shared {
            return AttentionKind::Shared(shared);
        }
        match &self.compressor {
            None => AttentionKind::Window,
            Some(compressor) if compressor.overlap => AttentionKind::CompressedSparse {
                ratio: compressor.ratio,
            },
            Some(compressor) => AttentionKind::HeavilyCompressed {
                ratio: compressor.ratio,
            },
        }
    }
}
