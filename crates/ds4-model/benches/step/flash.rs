//! The first layers of V4-Flash with random weights, packed as the released ones are. They are drawn on the device: the host never
//! holds one.

use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor};
use ds4_model::attention::Attention;
use ds4_model::block::{Block, BlockConfig};
use ds4_model::config::ModelConfig;
use ds4_model::linear::{Fp4Weight, Fp8Weight, WeightStack};
use ds4_model::model::Model;
use ds4_model::moe::{MoeLayer, MoeLayerConfig, SharedExpertConfig};
use ds4_model::norm::RmsNormConfig;
use ds4_model::router::RouterConfig;

/// Every kind of layer is among the first four: two with a window only, CSA, HCA; three look their experts up by token id.
const LAYERS: usize = 4;
const FP8_BLOCK: usize = 128;
const FP4_BLOCK: usize = 32;

/// The configuration of V4-Flash, cut down to the first layers.
pub fn config(vocabulary: usize) -> ModelConfig {
    let mut config = ModelConfig::new().with_vocab_size(vocabulary);
    config.layers.truncate(LAYERS);
    config.with_num_mtp_layers(0)
}

/// A model as a checkpoint would give it with that dtype of activations.
pub fn model(config: &ModelConfig, dtype: FloatDType, device: &Device) -> Model {
    device.seed(0);
    let (vocabulary, width) = (config.vocab_size, config.hidden_size);
    let layers = (0..config.layers.len()).map(|layer| block(&config.block(layer), device));
    let output = floats([vocabulary, width], deviation(width), device);
    Model {
        embedding: parameter(floats([vocabulary, width], 1.0, device).cast(dtype)),
        layers: layers.collect(),
        head: config.hyper_connection().init_head(device),
        norm: RmsNormConfig::new(width).init(device),
        output: parameter(output.cast(stored(device))),
        mtp: None,
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

fn block(config: &BlockConfig, device: &Device) -> Block {
    let connection = &config.hyper_connection;
    let norm = || RmsNormConfig::new(connection.d_model).init(device);
    let mut attention = config.attention.init(device);
    pack(&mut attention, device);
    Block {
        attention_connection: connection.init(device),
        attention_norm: norm(),
        attention,
        moe_connection: connection.init(device),
        moe_norm: norm(),
        moe: moe(&config.moe, device),
    }
}

/// Replaces the linear maps by packed ones, and puts dense matrices into the dtype of a released file.
fn pack(attention: &mut Attention, device: &Device) {
    let linears = [
        &mut attention.query_a,
        &mut attention.query_b,
        &mut attention.key_value,
        &mut attention.output_b,
    ];
    let queries = attention.indexer.as_mut().map(|indexer| &mut indexer.query);
    for linear in linears.into_iter().chain(queries) {
        let shape = linear.weight.weights().dims();
        linear.weight = fp8(shape, 1, device);
    }
    attention.output_a = fp8(attention.output_a.weights().dims(), 1, device);
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
        *weight = parameter(weight.val().cast(stored(device)));
    }
}

fn moe(config: &MoeLayerConfig, device: &Device) -> MoeLayer {
    let (d, inner, experts) = (config.d_model, config.d_expert, config.experts);
    let router = RouterConfig::new(d, experts, config.experts_per_token).with_scale(config.scale);
    let wide = inner * config.shared_experts;
    // Of a width that costs nothing: its weights are replaced.
    let mut shared = SharedExpertConfig::new(1, 1)
        .with_swiglu_limit(config.swiglu_limit)
        .init(device);
    shared.gate_up = fp8([1, 2 * wide, d], 2, device);
    shared.down = fp8([1, d, wide], 1, device);
    let mut router = match config.hash_vocabulary {
        Some(vocabulary) => router.init_hash(vocabulary, device),
        None => router.init_score(device),
    };
    router.gate = parameter(router.gate.val().cast(stored(device)));
    MoeLayer {
        router,
        gate_up: fp4([experts, 2 * inner, d], device),
        down: fp4([experts, d, inner], device),
        shared,
        swiglu_limit: config.swiglu_limit.unwrap_or(f64::INFINITY),
    }
}

/// Any codes but NaN.
fn fp8([count, rows, columns]: [usize; 3], parts: usize, device: &Device) -> WeightStack {
    let blocks = parts * (rows / parts).div_ceil(FP8_BLOCK);
    let scale = deviation(columns) / 32.0;
    let words = bits([count, rows, columns.div_ceil(4)], device);
    let scales = Tensor::<3>::random(
        [count, blocks, columns.div_ceil(FP8_BLOCK)],
        Distribution::Uniform(0.5 * scale, 1.5 * scale),
        (device, DType::F32),
    );
    WeightStack::Fp8(Fp8Weight {
        words: int_parameter(words.bitwise_and_scalar(0xf7f7_f7f7_u32)),
        scales: parameter(scales),
        parts,
        columns,
    })
}

/// Any codes.
fn fp4([count, rows, columns]: [usize; 3], device: &Device) -> WeightStack {
    let scales = (rows * columns.div_ceil(FP4_BLOCK)).div_ceil(4);
    let lowest = 124 - (columns as f64).sqrt().log2().round() as u32;
    let scales = bits([count, scales], device).bitwise_and_scalar(0x0303_0303_u32);
    WeightStack::Fp4(Fp4Weight {
        words: int_parameter(bits([count, rows, columns.div_ceil(8)], device)),
        scales: int_parameter(scales.add_scalar(lowest * 0x0101_0101)),
        columns,
    })
}

/// Words of which every bit is random. Devices draw integers as f32, which holds half of them.
fn bits<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    let half = || {
        let distribution = Distribution::Uniform(0.0, 65_536.0);
        // In one row: a device may leave gaps between several, and kernels would copy them each time.
        let words: usize = shape.iter().product();
        Tensor::<1, Int>::random([words], distribution, (device, DType::U32))
    };
    half().mul_scalar(1_u32 << 16).add(half()).reshape(shape)
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
