//! Configurations of the parts of a model.

use crate::attention::AttentionConfig;
use crate::block::BlockConfig;
use crate::config::{AttentionKind, ModelConfig};
use crate::dspark::DsparkConfig;
use crate::engram::EngramConfig;
use crate::hyper_connection::HyperConnectionConfig;
use crate::moe::MoeLayerConfig;
use crate::mtp::MtpLayerConfig;

impl ModelConfig {
    /// Configuration of a trunk layer.
    ///
    /// # Panics
    ///
    /// If `layer` is not smaller than the number of layers.
    pub fn block(&self, layer: usize) -> BlockConfig {
        let hash = layer < self.num_hash_layers;
        let block = self.block_of(self.layers[layer], hash.then_some(self.vocab_size));
        block.with_engram(self.engram_of(layer))
    }

    /// Configuration of the MTP layer.
    pub fn mtp(&self) -> MtpLayerConfig {
        MtpLayerConfig::new(self.block_of(AttentionKind::Window, None))
    }

    /// Configuration of the DSpark drafter, if there is one.
    pub fn dspark(&self) -> Option<DsparkConfig> {
        let params = self.dspark.clone()?;
        let mut block = self.block_of(AttentionKind::Window, None);
        if let Some([experts, per_token]) = params.experts {
            (block.moe.experts, block.moe.experts_per_token) = (experts, per_token);
        }
        Some(DsparkConfig::new(block, self.vocab_size, params))
    }

    /// Configuration of every hyper-connection.
    pub fn hyper_connection(&self) -> HyperConnectionConfig {
        HyperConnectionConfig::new(self.hidden_size)
            .with_streams(self.hc_mult)
            .with_sinkhorn_iterations(self.hc_sinkhorn_iters)
            .with_epsilon(self.hc_eps)
            .with_norm_epsilon(self.rms_norm_eps)
            .with_late(self.late_pre_mix)
    }

    fn engram_of(&self, layer: usize) -> Option<EngramConfig> {
        let params = self.engram.as_ref()?;
        let index = params.layers.iter().position(|own| *own == layer)?;
        let (d, n, columns) = (self.hidden_size, self.hc_mult, params.columns());
        let config = EngramConfig::new(d, n, columns, params.head_dim, params.rows[index], layer);
        Some(config.with_norm_epsilon(self.rms_norm_eps))
    }

    fn block_of(&self, kind: AttentionKind, hash_vocabulary: Option<usize>) -> BlockConfig {
        let attention = AttentionConfig::new(
            self.hidden_size,
            self.num_attention_heads,
            self.head_dim,
            self.rope_head_dim,
            self.q_lora_rank,
            self.o_groups,
            self.o_lora_rank,
            kind,
        )
        .with_index_heads(self.index_n_heads)
        .with_index_head_dim(self.index_head_dim)
        .with_index_top_k(self.index_topk)
        .with_candidates(self.candidates)
        .with_query_norm(self.query_norm)
        .with_cache_format(self.cache_format)
        .with_norm_epsilon(self.rms_norm_eps);
        let moe = MoeLayerConfig::new(
            self.hidden_size,
            self.moe_intermediate_size,
            self.n_routed_experts,
            self.num_experts_per_tok,
        )
        .with_shared_experts(self.n_shared_experts)
        .with_scale(self.routed_scaling_factor)
        .with_swiglu_limit(self.swiglu_limit)
        .with_hash_vocabulary(hash_vocabulary);
        BlockConfig::new(attention, moe, self.hyper_connection())
            .with_norm_epsilon(self.rms_norm_eps)
    }
}
