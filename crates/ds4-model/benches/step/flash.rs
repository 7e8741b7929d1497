//! The first layers of V4-Flash and its MTP layer with random weights, packed as the released ones are. They are made on the device:
//! the host never holds one.
//!
//! Packed words are drawn once, as many as the largest matrices have, and every matrix is a copy with some of its bits turned. So no
//! two matrices share memory: a layer reads more than 200 MB in a step, of which a cache of 50 MB (an H200's) holds nothing when the
//! next layer reads its own.

use std::cell::Cell;

use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor};
use ds4_model::attention::Attention;
use ds4_model::block::{Block, BlockConfig};
use ds4_model::config::ModelConfig;
use ds4_model::linear::{Fp4Weight, Fp8Weight, PackedLinear, WeightStack};
use ds4_model::model::Model;
use ds4_model::moe::{MoeLayer, MoeLayerConfig, SharedExpertConfig};
use ds4_model::mtp::{MtpLayer, MtpLayerConfig};
use ds4_model::norm::RmsNormConfig;
use ds4_model::router::RouterConfig;

const FP8_BLOCK: usize = 128;
const FP4_BLOCK: usize = 32;

/// The configuration of V4-Flash, cut down to the first layers: two with a window only, then CSA and HCA in turn; the first three look
/// their experts up by token id. Widths and numbers of heads are divided by `shrink`.
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

/// The configuration of the first layers alone.
pub fn first(config: &ModelConfig, layers: usize) -> ModelConfig {
    let mut config = config.clone();
    config.layers.truncate(layers);
    config
}

/// A model as a checkpoint would give it with that dtype of activations.
pub fn model(config: &ModelConfig, dtype: FloatDType, device: &Device) -> Model {
    device.seed(0);
    let (vocabulary, width) = (config.vocab_size, config.hidden_size);
    let source = Source::new(config, device);
    let layers = (0..config.layers.len()).map(|layer| source.block(&config.block(layer)));
    let output = floats([vocabulary, width], deviation(width), device);
    Model {
        embedding: parameter(floats([vocabulary, width], 1.0, device).cast(dtype)),
        layers: layers.collect(),
        head: config.hyper_connection().init_head(device),
        norm: RmsNormConfig::new(width).init(device),
        output: parameter(output.cast(stored(device))),
        mtp: Some(source.mtp(&config.mtp())),
        flash_head: None,
        streams: config.hc_mult,
    }
}

/// The dtype in which a released file has dense matrices, if the device has it.
fn stored(device: &Device) -> FloatDType {
    let bf16 = FloatDType::BF16;
    if device.supports_dtype(bf16) {
        bf16
    } else {
        FloatDType::F32
    }
}

/// What packed weights are made of.
struct Source {
    device: Device,
    /// Every bit of them random.
    words: Tensor<1, Int>,
    copies: Cell<u32>,
}

impl Source {
    fn new(config: &ModelConfig, device: &Device) -> Self {
        let (d, inner) = (config.hidden_size, config.moe_intermediate_size);
        let experts = config.n_routed_experts * 2 * inner * d / 8;
        // No other matrix is as large as one from a token to all heads would be.
        let words = experts.max(config.num_attention_heads * config.head_dim * d / 4);
        // Devices draw integers as f32, which holds half the bits.
        let half = || {
            let distribution = Distribution::Uniform(0.0, 65_536.0);
            Tensor::<1, Int>::random([words], distribution, (device, DType::U32))
        };
        Self {
            device: device.clone(),
            words: half().mul_scalar(1_u32 << 16).add(half()),
            copies: Cell::new(0),
        }
    }

    fn block(&self, config: &BlockConfig) -> Block {
        let device = &self.device;
        let connection = &config.hyper_connection;
        let norm = || RmsNormConfig::new(connection.d_model).init(device);
        let mut attention = config.attention.init(device);
        self.pack(&mut attention);
        Block {
            attention_connection: connection.init(device),
            attention_norm: norm(),
            attention,
            moe_connection: connection.init(device),
            moe_norm: norm(),
            moe: self.moe(&config.moe),
        }
    }

    fn mtp(&self, config: &MtpLayerConfig) -> MtpLayer {
        let connection = &config.block.hyper_connection;
        let d = connection.d_model;
        let norm = || RmsNormConfig::new(d).init(&self.device);
        let linear = || PackedLinear {
            weight: self.fp8([1, d, d], 1),
        };
        MtpLayer {
            embedding_norm: norm(),
            embedding_projection: linear(),
            stream_norm: norm(),
            stream_projection: linear(),
            block: self.block(&config.block),
            head: connection.init_head(&self.device),
            norm: norm(),
            flash_head: None,
        }
    }

    /// Replaces the linear maps by packed ones, and puts dense matrices into the dtype of a released file.
    fn pack(&self, attention: &mut Attention) {
        let linears = [
            &mut attention.query_a,
            &mut attention.query_b,
            &mut attention.key_value,
            &mut attention.output_b,
        ];
        let queries = attention.indexer.as_mut().map(|indexer| &mut indexer.query);
        for linear in linears.into_iter().chain(queries) {
            let shape = linear.weight.weights().dims();
            linear.weight = self.fp8(shape, 1);
        }
        attention.output_a = self.fp8(attention.output_a.weights().dims(), 1);
        let compressor = attention.compressor.as_mut();
        let dense = compressor.map(|compressor| &mut compressor.projection);
        let indexer = attention.indexer.as_mut();
        let of_indexer = indexer.map(|indexer| {
            [
                &mut indexer.compressor.projection,
                &mut indexer.head_weights,
            ]
        });
        for weight in dense.into_iter().chain(of_indexer.into_iter().flatten()) {
            *weight = parameter(weight.val().cast(stored(&self.device)));
        }
    }

    fn moe(&self, config: &MoeLayerConfig) -> MoeLayer {
        let device = &self.device;
        let (d, inner, experts) = (config.d_model, config.d_expert, config.experts);
        let router =
            RouterConfig::new(d, experts, config.experts_per_token).with_scale(config.scale);
        let wide = inner * config.shared_experts;
        // Of a width that costs nothing: its weights are replaced.
        let mut shared = SharedExpertConfig::new(1, 1)
            .with_swiglu_limit(config.swiglu_limit)
            .init(device);
        shared.gate_up = self.fp8([1, 2 * wide, d], 2);
        shared.down = self.fp8([1, d, wide], 1);
        let mut router = match config.hash_vocabulary {
            Some(vocabulary) => router.init_hash(vocabulary, device),
            None => router.init_score(device),
        };
        router.gate = parameter(router.gate.val().cast(stored(device)));
        MoeLayer {
            router,
            gate_up: self.fp4([experts, 2 * inner, d]),
            down: self.fp4([experts, d, inner]),
            shared,
            swiglu_limit: config.swiglu_limit.unwrap_or(f64::INFINITY),
        }
    }

    /// Any codes but NaN.
    fn fp8(&self, [count, rows, columns]: [usize; 3], parts: usize) -> WeightStack {
        let blocks = parts * (rows / parts).div_ceil(FP8_BLOCK);
        let scale = deviation(columns) / 32.0;
        let words = self.bits([count, rows, columns.div_ceil(4)]);
        let scales = Tensor::<3>::random(
            [count, blocks, columns.div_ceil(FP8_BLOCK)],
            Distribution::Uniform(0.5 * scale, 1.5 * scale),
            (&self.device, DType::F32),
        );
        WeightStack::Fp8(Fp8Weight {
            words: int_parameter(words.bitwise_and_scalar(0xf7f7_f7f7_u32)),
            scales: parameter(scales),
            parts,
            columns,
        })
    }

    /// Any codes.
    fn fp4(&self, [count, rows, columns]: [usize; 3]) -> WeightStack {
        let scales = (rows * columns.div_ceil(FP4_BLOCK)).div_ceil(4);
        let lowest = 124 - (columns as f64).sqrt().log2().round() as u32;
        let scales = self
            .bits([count, scales])
            .bitwise_and_scalar(0x0303_0303_u32);
        WeightStack::Fp4(Fp4Weight {
            words: int_parameter(self.bits([count, rows, columns.div_ceil(8)])),
            scales: int_parameter(scales.add_scalar(lowest * 0x0101_0101)),
            columns,
        })
    }

    /// Words of which every bit is random, in memory of their own.
    fn bits<const D: usize>(&self, shape: [usize; D]) -> Tensor<D, Int> {
        let copies = self.copies.get().wrapping_add(0x9e37_79b9);
        self.copies.set(copies);
        // In one row until the end: a device may leave gaps between several, and kernels would copy them each time.
        let words = self.words.clone().narrow(0, 0, shape.iter().product());
        words.bitwise_xor_scalar(copies).reshape(shape)
    }
}

/// Bytes of the weights that a block reads of for that many tokens, each of which goes to other routed experts.
pub fn bytes(block: &Block, tokens: usize) -> f64 {
    let attention = &block.attention;
    let experts = block.moe.router.experts_per_token;
    let [known, _, _] = block.moe.gate_up.weights().dims();
    let share = (tokens * experts).min(known) as f64 / known as f64;
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
        indexer.map(|indexer| &indexer.compressor),
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
        + share * routed
}

fn stack_bytes(stack: &WeightStack) -> f64 {
    let four = |words: usize| 4.0 * words as f64;
    match stack {
        WeightStack::Dense(weight) => tensor_bytes(&weight.val()),
        WeightStack::Fp8(weight) => {
            four(weight.words.shape().num_elements() + weight.scales.shape().num_elements())
        }
        WeightStack::Fp4(weight) => {
            four(weight.words.shape().num_elements() + weight.scales.shape().num_elements())
        }
    }
}

fn tensor_bytes<const D: usize>(tensor: &Tensor<D>) -> f64 {
    (tensor.shape().num_elements() * tensor.dtype().size()) as f64
}

fn floats<const D: usize>(shape: [usize; D], deviation: f64, device: &Device) -> Tensor<D> {
    let count: usize = shape.iter().product();
    let normal = Distribution::Normal(0.0, deviation);
    Tensor::<1>::random([count], normal, (device, DType::F32)).reshape(shape)
}

/// Of weights that keep the size of what they are multiplied by.
fn deviation(columns: usize) -> f64 {
    (columns as f64).powf(-0.5)
}

fn parameter<const D: usize>(tensor: Tensor<D>) -> Param<Tensor<D>> {
    Param::initialized(ParamId::new(), tensor)
}

fn int_parameter<const D: usize>(tensor: Tensor<D, Int>) -> Param<Tensor<D, Int>> {
    Param::initialized(ParamId::new(), tensor)
}
