//! The first layers of V4-Flash, and its MTP layer or DSpark drafter.

use burn::tensor::Tensor;
use burn_ds4_ops::OpError;
use burn_ds4_ops::flash_head::{FlashHead, FlashHeadOptions};
use ds4_model::block::Block;
use ds4_model::config::{DsparkParams, ModelConfig};
use ds4_model::flash_head::{DEFAULT_CAPACITY, ProbedHead};
use ds4_model::linear::{StackValues, WeightStack};
use ds4_model::model::Model;

/// The configuration of V4-Flash, reduced to the first layers: two with a window only, then CSA and
/// HCA alternately; the first three look their experts up by token id. Widths and numbers of heads
/// are divided by `shrink`.
pub fn config(layers: usize, experts: usize, vocabulary: usize, shrink: usize) -> ModelConfig {
    let config = ModelConfig::new();
    let config = ModelConfig {
        vocab_size: vocabulary,
        n_routed_experts: experts,
        hidden_size: config.hidden_size / shrink,
        num_attention_heads: config.num_attention_heads / shrink,
        q_lora_rank: config.q_lora_rank / shrink,
        o_lora_rank: config.o_lora_rank / shrink,
        index_n_heads: config.index_n_heads / shrink,
        moe_intermediate_size: config.moe_intermediate_size / shrink,
        ..config
    };
    first(&config, layers)
}

/// The same with the DSpark drafter of V4-Flash-0731, which reads the last three layers.
pub fn with_dspark(mut config: ModelConfig) -> ModelConfig {
    let layers = config.layers.len();
    config.num_mtp_layers = 0;
    config.dspark = Some(DsparkParams {
        block_size: 5,
        target_layers: last(layers),
        noise_token_id: config.vocab_size as u32 - 1,
        markov_rank: 256,
        layers: 3,
        taps_inputs: false,
        experts: None,
    });
    config
}

/// A clustered head of the model's output matrix, which takes as long as any other: rows of random
/// weights have no clusters, so that any will do.
pub fn draft_head(model: &Model, probes: Option<usize>) -> Result<ProbedHead, OpError> {
    let output = model.output.val();
    let [vocabulary, _] = output.dims();
    let clusters = vocabulary.div_ceil(DEFAULT_CAPACITY);
    let assignments: Vec<u32> = (0..vocabulary).map(|id| (id % clusters) as u32).collect();
    let centroids = output.clone().slice_dim(0, 0..clusters);
    let head = FlashHead::new(output, &assignments, centroids, FlashHeadOptions::default())?;
    ProbedHead::new(head, probes.unwrap_or(ProbedHead::default_probes(clusters)))
}

fn last(layers: usize) -> Vec<usize> {
    (layers.saturating_sub(3)..layers).collect()
}

/// The model with its first layers alone. What drafts reads the last ones of those.
pub fn first_layers(model: &Model, layers: usize) -> Model {
    let mut model = Model {
        layers: model.layers[..layers].to_vec(),
        config: first(model.config(), layers),
        placement: model.placement.first_layers(layers),
        ..model.clone()
    };
    if let Some(dspark) = &mut model.dspark {
        dspark.params.target_layers = last(layers);
    }
    model
}

/// The configuration of the first layers alone.
fn first(config: &ModelConfig, layers: usize) -> ModelConfig {
    let mut config = config.clone();
    config.layers.truncate(layers);
    config.num_hash_layers = config.num_hash_layers.min(layers);
    config
}

/// Bytes of the block's weights that are read for that many tokens, as many of the routed experts'
/// as tokens use that choose at random.
pub fn bytes(block: &Block, tokens: usize) -> f64 {
    let attention = &block.attention;
    let experts = block.moe.router.experts_per_token;
    let [known, _, _] = block.moe.gate_up.weights().dims();
    let fraction = 1.0 - (1.0 - experts as f64 / known as f64).powi(tokens as i32);
    let indexer = attention.indexer.as_ref();
    let packed = [
        &attention.query_a.weight,
        &attention.query_b.weight,
        &attention.key_value.weight,
        &attention.output_a,
        &attention.output_b.weight,
        &block.moe.shared.gate_up,
        &block.moe.shared.down,
    ];
    let packed = packed
        .into_iter()
        .chain(indexer.map(|indexer| &indexer.query.weight));
    let compressors = [
        attention.compressor.as_ref(),
        indexer.and_then(|indexer| indexer.compressor.as_ref()),
    ];
    let compressors = compressors.into_iter().flatten();
    let dense = [
        &block.moe.router.gate,
        &block.attention_connection.function,
        &block.moe_connection.function,
    ];
    let dense = dense
        .into_iter()
        .chain(compressors.map(|compressor| &compressor.projection))
        .chain(indexer.map(|indexer| &indexer.head_weights));
    let routed = stack_bytes(&block.moe.gate_up) + stack_bytes(&block.moe.down);
    packed.map(stack_bytes).sum::<f64>()
        + dense.map(|weight| tensor_bytes(&weight.val())).sum::<f64>()
        + fraction * routed
}

fn stack_bytes(stack: &WeightStack) -> f64 {
    let four = |words: usize| 4.0 * words as f64;
    match &stack.values {
        StackValues::Dense(weight) => tensor_bytes(&weight.val()),
        StackValues::Fp8(weight) => {
            four(weight.words.shape().num_elements() + weight.scales.shape().num_elements())
        }
        StackValues::Fp4(weight) => {
            four(weight.words.shape().num_elements() + weight.scales.shape().num_elements())
        }
    }
}

fn tensor_bytes<const D: usize>(tensor: &Tensor<D>) -> f64 {
    (tensor.shape().num_elements() * tensor.dtype().size()) as f64
}
