//! From host weights to modules: which tensor goes where, and in which form.

use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};

use super::{Checkpoint, CheckpointError, HostExperts, LoadProgress, Loader, load_all};
use crate::attention::{Attention, AttentionConfig, Compressor, CompressorConfig, Indexer};
use crate::block::{Block, BlockConfig};
use crate::config::{AttentionKind, ModelConfig};
use crate::hyper_connection::{HyperConnection, HyperConnectionConfig, HyperHead};
use crate::linear::{Fp4Weight, Fp8Weight, PackedLinear, WeightStack};
use crate::model::Model;
use crate::moe::{MoeLayer, MoeLayerConfig, SharedExpert};
use crate::mtp::{MtpLayer, MtpLayerConfig};
use crate::norm::RmsNorm;
use crate::router::{HashSelection, Router, ScoreSelection, Selection};

/// How to load a model.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadOptions {
    /// Dtype of activations and caches, and of weights that are not packed. What the released model computes in f32 (routers,
    /// compressors, hyper-connections, the output matrix) is computed in f32 whatever it is, by matrices in the dtype of their files.
    pub dtype: FloatDType,
    /// Whether FP8 and FP4 weights are decoded once, at load, to [`dtype`](Self::dtype), and 16-bit matrices that are read in f32 become
    /// f32: several times the memory, much faster where decoding is slow. Else they stay as they are, and are decoded as they are used.
    pub expand: bool,
    /// Whether to load the MTP layer, if there is one.
    pub mtp: bool,
    /// Whether key/value rows and indexer channels make the FP8 and FP4 round trips that the released model was trained with.
    pub quantized_cache: bool,
}

impl Default for LoadOptions {
    /// f32 activations, packed weights, the MTP layer, no round trips.
    fn default() -> Self {
        Self {
            dtype: FloatDType::F32,
            expand: false,
            mtp: true,
            quantized_cache: false,
        }
    }
}

impl Checkpoint {
    /// Loads the model onto `device`.
    ///
    /// # Errors
    ///
    /// If tensors are missing, unexpected, mis-shaped or hold what they must not (all of them, in one error), or the device or the model
    /// cannot do what `options` ask for.
    pub fn load(&self, options: &LoadOptions, device: &Device) -> Result<Model, CheckpointError> {
        self.load_with(Loader::new(self), options, device)
    }

    /// Loads the model like [`load`](Self::load), reporting how far it has come.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_with_progress(
        &self,
        options: &LoadOptions,
        device: &Device,
        progress: impl LoadProgress,
    ) -> Result<Model, CheckpointError> {
        self.load_with(Loader::new(self).with_progress(progress), options, device)
    }

    fn load_with(
        &self,
        mut loader: Loader<'_>,
        options: &LoadOptions,
        device: &Device,
    ) -> Result<Model, CheckpointError> {
        if !device.supports_dtype(DType::from(options.dtype)) {
            return Err(CheckpointError::UnsupportedDtype {
                dtype: options.dtype,
                device: format!("{device:?}"),
            });
        }
        let config = self.config();
        let indexed = config
            .layers
            .iter()
            .any(|kind| matches!(kind, AttentionKind::CompressedSparse { .. }));
        if options.quantized_cache && indexed && !config.index_head_dim.is_power_of_two() {
            return Err(CheckpointError::QuantizedIndexer {
                index_head_dim: config.index_head_dim,
            });
        }
        if !options.mtp {
            loader.skip_prefix("mtp.");
        }
        let mut builder = Builder {
            loader: &mut loader,
            options,
            device,
        };
        let model = builder.model(self.config());
        loader.finish(model)
    }
}

/// Makes modules of a checkpoint's tensors. A method gives `None` once anything was wrong; the loader remembers what.
///
/// Every method asks for all its tensors before it gives up, so that the loader's error names all that is wrong.
struct Builder<'l, 'a> {
    loader: &'l mut Loader<'a>,
    options: &'l LoadOptions,
    device: &'l Device,
}

impl Builder<'_, '_> {
    fn model(&mut self, config: &ModelConfig) -> Option<Model> {
        let matrix = [config.vocab_size, config.hidden_size];
        let embedding = self.dense("embed.weight", matrix, self.options.dtype);
        let layers = load_all(
            (0..config.layers.len())
                .map(|layer| self.block(&format!("layers.{layer}."), &config.block(layer))),
        );
        let head = self.hyper_head("", &config.hyper_connection());
        let norm = self.norm("norm", config.hidden_size, config.rms_norm_eps);
        let output = self.stored("head.weight", matrix).map(parameter);
        let mtp = if self.options.mtp && config.num_mtp_layers > 0 {
            self.mtp("mtp.0.", &config.mtp()).map(Some)
        } else {
            Some(None)
        };
        Some(Model {
            embedding: embedding?,
            layers: layers?,
            head: head?,
            norm: norm?,
            output: output?,
            mtp: mtp?,
            flash_head: None,
            streams: config.hc_mult,
        })
    }

    fn mtp(&mut self, prefix: &str, config: &MtpLayerConfig) -> Option<MtpLayer> {
        let connection = &config.block.hyper_connection;
        let (d, epsilon) = (connection.d_model, config.block.norm_epsilon);
        let embedding_norm = self.norm(&format!("{prefix}enorm"), d, epsilon);
        let embedding_projection = self.linear(&format!("{prefix}e_proj"), d, d);
        let stream_norm = self.norm(&format!("{prefix}hnorm"), d, epsilon);
        let stream_projection = self.linear(&format!("{prefix}h_proj"), d, d);
        let block = self.block(prefix, &config.block);
        let head = self.hyper_head(prefix, connection);
        let norm = self.norm(&format!("{prefix}norm"), d, epsilon);
        Some(MtpLayer {
            embedding_norm: embedding_norm?,
            embedding_projection: embedding_projection?,
            stream_norm: stream_norm?,
            stream_projection: stream_projection?,
            block: block?,
            head: head?,
            norm: norm?,
            flash_head: None,
        })
    }

    fn block(&mut self, prefix: &str, config: &BlockConfig) -> Option<Block> {
        let connection = &config.hyper_connection;
        let (d, epsilon) = (connection.d_model, config.norm_epsilon);
        let attention_connection = self.connection(&format!("{prefix}hc_attn"), connection);
        let attention_norm = self.norm(&format!("{prefix}attn_norm"), d, epsilon);
        let attention = self.attention(&format!("{prefix}attn."), &config.attention);
        let moe_connection = self.connection(&format!("{prefix}hc_ffn"), connection);
        let moe_norm = self.norm(&format!("{prefix}ffn_norm"), d, epsilon);
        let moe = self.moe(&format!("{prefix}ffn."), &config.moe);
        Some(Block {
            attention_connection: attention_connection?,
            attention_norm: attention_norm?,
            attention: attention?,
            moe_connection: moe_connection?,
            moe_norm: moe_norm?,
            moe: moe?,
        })
    }

    fn connection(
        &mut self,
        prefix: &str,
        config: &HyperConnectionConfig,
    ) -> Option<HyperConnection> {
        let n = config.streams;
        let outputs = (2 + n) * n;
        let f32 = FloatDType::F32;
        let function = self.dense(&format!("{prefix}_fn"), [outputs, n * config.d_model], f32);
        let base = self.dense(&format!("{prefix}_base"), [outputs], f32);
        let scale = self.tensor::<1>(&format!("{prefix}_scale"), [3], f32);
        let scale = scale.map(|scale| {
            let parts = scale.split(1, 0).into_iter().zip([n, n, n * n]);
            Tensor::cat(parts.map(|(part, times)| part.expand([times])).collect(), 0)
        });
        Some(HyperConnection {
            function: function?,
            base: base?,
            scale: parameter(scale?),
            sinkhorn_iterations: config.sinkhorn_iterations,
            epsilon: config.epsilon,
            norm_epsilon: config.norm_epsilon,
        })
    }

    fn hyper_head(&mut self, prefix: &str, config: &HyperConnectionConfig) -> Option<HyperHead> {
        let n = config.streams;
        let f32 = FloatDType::F32;
        let function = self.dense(&format!("{prefix}hc_head_fn"), [n, n * config.d_model], f32);
        let base = self.dense(&format!("{prefix}hc_head_base"), [n], f32);
        let scale = self.dense(&format!("{prefix}hc_head_scale"), [1], f32);
        Some(HyperHead {
            function: function?,
            base: base?,
            scale: scale?,
            epsilon: config.epsilon,
            norm_epsilon: config.norm_epsilon,
        })
    }

    fn attention(&mut self, prefix: &str, config: &AttentionConfig) -> Option<Attention> {
        let AttentionConfig {
            d_model,
            heads,
            head_dim,
            rotated,
            q_lora_rank,
            o_groups,
            o_lora_rank,
            norm_epsilon,
            ..
        } = *config;
        let group_width = heads / o_groups * head_dim;
        let query_a = self.linear(&format!("{prefix}wq_a"), q_lora_rank, d_model);
        let query_norm = self.norm(&format!("{prefix}q_norm"), q_lora_rank, norm_epsilon);
        let query_b = self.linear(&format!("{prefix}wq_b"), heads * head_dim, q_lora_rank);
        let key_value = self.linear(&format!("{prefix}wkv"), head_dim, d_model);
        let key_value_norm = self.norm(&format!("{prefix}kv_norm"), head_dim, norm_epsilon);
        let output_a = self.groups(
            &format!("{prefix}wo_a"),
            [o_groups, o_lora_rank, group_width],
        );
        let output_b = self.linear(&format!("{prefix}wo_b"), d_model, o_groups * o_lora_rank);
        let sinks = self.dense(&format!("{prefix}attn_sink"), [heads], FloatDType::F32);

        let compressor = config.kind.ratio().map(|ratio| {
            let overlap = matches!(config.kind, AttentionKind::CompressedSparse { .. });
            let compressor = CompressorConfig::new(d_model, head_dim, rotated, ratio, overlap)
                .with_norm_epsilon(norm_epsilon);
            self.compressor(&format!("{prefix}compressor."), &compressor)
        });
        let indexer = match config.kind {
            AttentionKind::CompressedSparse { ratio } => {
                Some(self.indexer(&format!("{prefix}indexer."), config, ratio))
            }
            _ => None,
        };
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
            quantized_cache: self.options.quantized_cache,
        })
    }

    fn compressor(&mut self, prefix: &str, config: &CompressorConfig) -> Option<Compressor> {
        let series = 1 + usize::from(config.overlap);
        let width = series * config.width;
        let f32 = FloatDType::F32;
        let values = self.stored(&format!("{prefix}wkv.weight"), [width, config.d_model]);
        let scores = self.stored(&format!("{prefix}wgate.weight"), [width, config.d_model]);
        let bias = self.tensor::<2>(&format!("{prefix}ape"), [config.ratio, width], f32);
        let norm = self.norm(&format!("{prefix}norm"), config.width, config.norm_epsilon);
        let bias = bias.map(|bias| Tensor::cat(vec![bias.zeros_like(), bias], 1));
        Some(Compressor {
            projection: parameter(above(values?, scores?)),
            position_bias: parameter(bias?),
            norm: norm?,
            rotated: config.rotated,
            ratio: config.ratio,
            overlap: config.overlap,
        })
    }

    fn indexer(&mut self, prefix: &str, config: &AttentionConfig, ratio: usize) -> Option<Indexer> {
        let (heads, width) = (config.index_heads, config.index_head_dim);
        let query = self.linear(&format!("{prefix}wq_b"), heads * width, config.q_lora_rank);
        let head_weights = self
            .stored(
                &format!("{prefix}weights_proj.weight"),
                [heads, config.d_model],
            )
            .map(parameter);
        let compressor = CompressorConfig::new(config.d_model, width, config.rotated, ratio, true)
            .with_norm_epsilon(config.norm_epsilon);
        let compressor = self.compressor(&format!("{prefix}compressor."), &compressor);
        Some(Indexer {
            query: query?,
            head_weights: head_weights?,
            compressor: compressor?,
            heads,
            width,
            top_k: config.index_top_k,
        })
    }

    fn moe(&mut self, prefix: &str, config: &MoeLayerConfig) -> Option<MoeLayer> {
        let MoeLayerConfig {
            d_model,
            d_expert,
            experts,
            ..
        } = *config;
        let router = self.router(&format!("{prefix}gate."), config);
        let stack = format!("{prefix}experts");
        let gate_up = self
            .loader
            .experts_gate_up(&stack, experts, d_expert, d_model);
        let gate_up = gate_up.map(|host| self.weight_stack(host));
        let down = self.loader.experts_down(&stack, experts, d_model, d_expert);
        let down = down.map(|host| self.weight_stack(host));
        let shared = self.shared(&format!("{prefix}shared_experts"), config);
        Some(MoeLayer {
            router: router?,
            gate_up: gate_up?,
            down: down?,
            shared: shared?,
            swiglu_limit: config.swiglu_limit.unwrap_or(f64::INFINITY),
        })
    }

    fn router(&mut self, prefix: &str, config: &MoeLayerConfig) -> Option<Router> {
        let f32 = FloatDType::F32;
        let k = config.experts_per_token;
        let gate = self
            .stored(&format!("{prefix}weight"), [config.experts, config.d_model])
            .map(parameter);
        let selection = match config.hash_vocabulary {
            Some(vocabulary) => {
                let table = self.loader.ids(
                    &format!("{prefix}tid2eid"),
                    &[vocabulary, k],
                    config.experts,
                );
                table.map(|table| {
                    let table = TensorData::new(table, [vocabulary, k]);
                    Selection::Hash(HashSelection {
                        table: int_parameter(Tensor::from_data(table, self.device)),
                    })
                })
            }
            None => {
                let bias = self.dense(&format!("{prefix}bias"), [config.experts], f32);
                bias.map(|bias| Selection::Score(ScoreSelection { bias }))
            }
        };
        Some(Router {
            gate: gate?,
            selection: selection?,
            experts_per_token: k,
            scale: config.scale,
        })
    }

    fn shared(&mut self, prefix: &str, config: &MoeLayerConfig) -> Option<SharedExpert> {
        let (d, inner) = (config.d_model, config.d_expert * config.shared_experts);
        let gate_up = self.loader.expert_gate_up(prefix, inner, d);
        let gate_up = gate_up.map(|host| self.weight_stack(host));
        let down = self.loader.linear(&format!("{prefix}.w2"), d, inner);
        let down = down.map(|host| self.weight_stack(host.into()));
        Some(SharedExpert {
            gate_up: gate_up?,
            down: down?,
            swiglu_limit: config.swiglu_limit.unwrap_or(f64::INFINITY),
        })
    }

    fn norm(&mut self, prefix: &str, width: usize, epsilon: f64) -> Option<RmsNorm> {
        let weight = self.dense(&format!("{prefix}.weight"), [width], FloatDType::F32)?;
        Some(RmsNorm { weight, epsilon })
    }

    fn dense<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        dtype: FloatDType,
    ) -> Option<Param<Tensor<D>>> {
        self.tensor(name, shape, dtype).map(parameter)
    }

    fn tensor<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        dtype: FloatDType,
    ) -> Option<Tensor<D>> {
        let data = self.loader.dense(name, &shape)?;
        Some(self.float_tensor(data, dtype))
    }

    fn linear(&mut self, prefix: &str, out: usize, inp: usize) -> Option<PackedLinear> {
        let host = self.loader.linear(prefix, out, inp)?;
        Some(PackedLinear {
            weight: self.weight_stack(host.into()),
        })
    }

    /// A matrix that the released model reads in f32. Products with it are as exact in the dtype of its file, and read less; where the
    /// device lacks that dtype, or weights are to be expanded, it is f32.
    fn stored(&mut self, name: &str, shape: [usize; 2]) -> Option<Tensor<2>> {
        let data = self.loader.dense(name, &shape)?;
        let dtype = data.dtype();
        let held = !self.options.expand && self.device.supports_dtype(dtype);
        let dtype = if held { dtype.into() } else { FloatDType::F32 };
        Some(self.float_tensor(data, dtype))
    }

    /// The linear maps of equal groups of channels, which the file has as one: `[groups, rank, width]`.
    fn groups(&mut self, prefix: &str, [groups, rank, width]: [usize; 3]) -> Option<WeightStack> {
        let host = self.loader.linear(prefix, groups * rank, width)?;
        Some(match host.into_groups(groups) {
            Ok(host) => self.weight_stack(host),
            Err(host) => {
                let whole = self.weight_stack(host.into()).dense(self.options.dtype);
                WeightStack::Dense(parameter(whole.reshape([groups, rank, width])))
            }
        })
    }

    fn weight_stack(&self, host: HostExperts) -> WeightStack {
        let stack = match host {
            HostExperts::Dense(data) => {
                WeightStack::Dense(parameter(self.float_tensor(data, self.options.dtype)))
            }
            HostExperts::Fp8 {
                shape,
                parts,
                words,
                scales,
            } => WeightStack::Fp8(self.fp8(shape, parts, words, scales)),
            HostExperts::Fp4 {
                shape,
                words,
                scales,
            } => WeightStack::Fp4(self.fp4(shape, words, scales)),
        };
        if !self.options.expand {
            return stack;
        }
        WeightStack::Dense(parameter(stack.dense(self.options.dtype)))
    }

    fn fp8(
        &self,
        [matrices, out, inp]: [usize; 3],
        parts: usize,
        words: Vec<u32>,
        scales: Vec<f32>,
    ) -> Fp8Weight {
        let words = TensorData::new(words, [matrices, out, inp.div_ceil(4)]);
        let blocks = parts * (out / parts).div_ceil(128);
        let scales = TensorData::new(scales, [matrices, blocks, inp.div_ceil(128)]);
        Fp8Weight {
            words: self.words(words),
            scales: parameter(self.float_tensor(scales, FloatDType::F32)),
            parts,
            columns: inp,
        }
    }

    fn fp4(
        &self,
        [matrices, out, inp]: [usize; 3],
        words: Vec<u32>,
        scales: Vec<u32>,
    ) -> Fp4Weight {
        let words = TensorData::new(words, [matrices, out, inp.div_ceil(8)]);
        let scale_bytes = out * inp.div_ceil(32);
        let scales = word_aligned(scales, matrices, scale_bytes);
        Fp4Weight {
            words: self.words(words),
            scales: self.words(TensorData::new(scales, [matrices, scale_bytes.div_ceil(4)])),
            columns: inp,
        }
    }

    fn words<const D: usize>(&self, data: TensorData) -> Param<Tensor<D, Int>> {
        let (flat, shape) = flat(data);
        let device = (self.device, DType::U32);
        int_parameter(Tensor::<1, Int>::from_data(flat, device).reshape::<D, _>(shape))
    }

    fn float_tensor<const D: usize>(&self, data: TensorData, dtype: FloatDType) -> Tensor<D> {
        let (flat, shape) = flat(data);
        let device = (self.device, dtype.into());
        Tensor::<1>::from_data(flat, device).reshape::<D, _>(shape)
    }
}

/// One row and the shape it is to have: a device may leave gaps between several rows, and kernels would copy them each time.
fn flat<const D: usize>(data: TensorData) -> (TensorData, [usize; D]) {
    let (shape, dtype) = (data.shape().dims::<D>(), data.dtype());
    let length: usize = shape.iter().product();
    (
        TensorData::from_bytes(data.into_bytes(), [length], dtype),
        shape,
    )
}

/// Both matrices as one, the rows of `first` above.
fn above(first: Tensor<2>, second: Tensor<2>) -> Tensor<2> {
    let (first, second) = if first.dtype() == second.dtype() {
        (first, second)
    } else {
        (first.cast(FloatDType::F32), second.cast(FloatDType::F32))
    };
    Tensor::cat(vec![first, second], 0)
}

fn parameter<const D: usize>(tensor: Tensor<D>) -> Param<Tensor<D>> {
    Param::initialized(ParamId::new(), tensor)
}

fn int_parameter<const D: usize>(tensor: Tensor<D, Int>) -> Param<Tensor<D, Int>> {
    Param::initialized(ParamId::new(), tensor)
}

/// Starts the bytes of every matrix, packed one after the other four to a word, at a word of their own.
fn word_aligned(words: Vec<u32>, matrices: usize, bytes: usize) -> Vec<u32> {
    if bytes.is_multiple_of(4) || matrices == 1 {
        return words;
    }
    let flat: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    flat.chunks(bytes)
        .take(matrices)
        .flat_map(|matrix| {
            matrix.chunks(4).map(|chunk| {
                let mut word = [0; 4];
                word[..chunk.len()].copy_from_slice(chunk);
                u32::from_le_bytes(word)
            })
        })
        .collect()
}

/// An optional part: absent, complete, or (`None`) wanted and not loadable.
fn all_or_nothing<T>(part: Option<Option<T>>) -> Option<Option<T>> {
    match part {
        None => Some(None),
        Some(part) => part.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "flex")]
    #[test]
    fn matrices_of_two_dtypes_become_f32_and_of_one_stay_as_they_are() {
        let device = Device::flex();
        let ones = |dtype: DType| Tensor::<2>::ones([2, 3], (&device, dtype));
        let both = |first, second| above(ones(first), ones(second));
        let mixed = both(DType::BF16, DType::F16);
        assert_eq!((mixed.dims(), mixed.dtype()), ([4, 3], DType::F32));
        assert_eq!(both(DType::BF16, DType::BF16).dtype(), DType::BF16);
    }

    #[test]
    fn bytes_of_every_matrix_start_at_a_word() {
        // Two matrices of three bytes each: 1 2 3, 4 5 6.
        let packed = vec![0x0403_0201, 0x7f7f_0605];
        assert_eq!(
            word_aligned(packed.clone(), 2, 3),
            [0x0003_0201, 0x0006_0504]
        );
        assert_eq!(word_aligned(packed.clone(), 1, 6), packed);
        assert_eq!(word_aligned(packed.clone(), 2, 4), packed);
    }
}
