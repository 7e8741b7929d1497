//! Checkpoints as large as the released ones with a DSpark drafter: files with a whole header and
//! no contents, of which the system stores next to nothing.

use std::io::{Seek, Write};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Int, Tensor};

use super::super::{Checkpoint, CheckpointError, Form, LoadOptions};
use super::variants::run;
use crate::cache::{CacheConfig, CacheLayout, Rollback};
use crate::config::{AttentionKind, DsparkParams, ModelConfig};
use crate::linear::WeightStack;
use crate::model::ModelSource;
use crate::placement::{Parallel, Place, Placement, Plan};
use crate::repository::path;
use crate::weights::{EngramTable, Initial, WeightSource};

/// Lists the tensors of a release, in its formats, and has none.
#[derive(Default)]
struct Listed {
    tensors: Vec<(String, &'static str, Vec<usize>)>,
    /// Rows and columns of a block of FP8 weights.
    block: usize,
}

impl Listed {
    fn add(&mut self, name: &str, dtype: &'static str, shape: &[usize]) {
        self.tensors.push((name.to_owned(), dtype, shape.to_vec()));
    }

    fn fp8(&mut self, prefix: &str, [out, inp]: [usize; 2]) {
        self.add(&format!("{prefix}.weight"), "F8_E4M3", &[out, inp]);
        let scales = [out.div_ceil(self.block), inp.div_ceil(self.block)];
        self.add(&format!("{prefix}.scale"), "F8_E8M0", &scales);
    }

    fn fp4(&mut self, prefix: &str, [out, inp]: [usize; 2]) {
        self.add(&format!("{prefix}.weight"), "I8", &[out, inp / 2]);
        self.add(&format!("{prefix}.scale"), "F8_E8M0", &[out, inp / 32]);
    }

    /// The header of a file with these tensors, and the bytes behind it.
    fn header(&self) -> (String, u64) {
        let mut end = 0;
        let tensors = self.tensors.iter().map(|(name, dtype, shape)| {
            let size = match *dtype {
                "F32" => 4,
                "BF16" => 2,
                "I64" => 8,
                _ => 1,
            };
            let begin = end;
            end += size * shape.iter().product::<usize>() as u64;
            format!(
                r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#
            )
        });
        let tensors: Vec<String> = tensors.collect();
        (format!("{{{}}}", tensors.join(",")), end)
    }
}

impl ModelSource for Listed {
    type Weights = Self;

    fn weights(&mut self) -> &mut Self {
        self
    }

    fn placement(&self, layers: usize) -> Placement {
        Placement::single(&Device::flex(), layers)
    }

    fn enter(&mut self, _: Place) {}
}

impl WeightSource for Listed {
    fn arranged<const D: usize>(
        &mut self,
        name: &str,
        stored: [usize; D],
        _: [usize; D],
        _: Initial,
        _: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> Option<Param<Tensor<D>>> {
        self.add(name, "F32", &stored);
        None
    }

    fn embedding(&mut self, name: &str, shape: [usize; 2]) -> Option<Param<Tensor<2>>> {
        self.add(name, "BF16", &shape);
        None
    }

    fn stored(&mut self, names: &[String], shape: [usize; 2]) -> Option<Param<Tensor<2>>> {
        names.iter().for_each(|name| self.add(name, "BF16", &shape));
        None
    }

    fn stack(
        &mut self,
        prefix: &str,
        experts: Option<usize>,
        parts: &[&str],
        shape: [usize; 2],
    ) -> Option<WeightStack> {
        for part in parts {
            match experts {
                None => self.fp8(&format!("{prefix}{part}"), shape),
                Some(count) => (0..count)
                    .for_each(|expert| self.fp4(&format!("{prefix}.{expert}{part}"), shape)),
            }
        }
        None
    }

    fn groups(&mut self, prefix: &str, [groups, rank, width]: [usize; 3]) -> Option<WeightStack> {
        self.fp8(prefix, [groups * rank, width]);
        None
    }

    fn lookup(&mut self, prefix: &str, [rows, width]: [usize; 2]) -> Option<EngramTable> {
        self.add(&format!("{prefix}.weight"), "F8_E4M3", &[rows, width]);
        self.add(&format!("{prefix}.scale"), "F8_E8M0", &[rows, width / 32]);
        None
    }

    fn table(&mut self, name: &str, shape: [usize; 2], _: usize) -> Option<Param<Tensor<2, Int>>> {
        self.add(name, "I64", &shape);
        None
    }
}

/// A checkpoint of all tensors of a configuration, whose contents are zeros that take no space.
pub(super) fn checkpoint(config: ModelConfig) -> Checkpoint {
    let mut listed = Listed {
        block: config.weight_block,
        ..Listed::default()
    };
    assert!(config.build(&mut listed, false).is_none());
    let (header, bytes) = listed.header();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let start = file.stream_position().unwrap();
    file.as_file().set_len(start + bytes).unwrap();
    let mut checkpoint = Checkpoint {
        dir: file.path().parent().unwrap().to_path_buf(),
        config,
        dialect: Default::default(),
        shards: Vec::new(),
        entries: Default::default(),
        stacks: Default::default(),
    };
    checkpoint
        .add_shard(file.path(), &Default::default())
        .unwrap();
    checkpoint.check_dspark().unwrap();
    checkpoint
}

/// Bytes of all parameters.
fn bytes(model: &impl Module) -> usize {
    struct Bytes(usize);

    impl ModuleVisitor for Bytes {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let tensor = param.val();
            self.0 += tensor.shape().num_elements() * tensor.dtype().size();
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            let tensor = param.val();
            self.0 += tensor.shape().num_elements() * tensor.dtype().size();
        }
    }

    let mut bytes = Bytes(0);
    model.visit(&mut bytes);
    bytes.0
}

/// The drafter of a release.
fn dspark(layers: usize, markov_rank: usize) -> Option<DsparkParams> {
    Some(DsparkParams {
        block_size: 5,
        target_layers: (layers - 3..layers).collect(),
        noise_token_id: 128_799,
        markov_rank,
        layers: 3,
        taps_inputs: false,
        experts: None,
    })
}

/// V4-Flash-0731.
fn flash() -> ModelConfig {
    ModelConfig {
        num_mtp_layers: 0,
        dspark: dspark(43, 256),
        ..ModelConfig::new()
    }
}

/// V4-Pro-0813: layers of other sizes, the first two with long blocks.
fn pro() -> ModelConfig {
    let layer = |layer| match layer {
        0 | 1 => AttentionKind::HeavilyCompressed { ratio: 128 },
        layer if layer % 2 == 0 => AttentionKind::CompressedSparse { ratio: 4 },
        _ => AttentionKind::HeavilyCompressed { ratio: 128 },
    };
    ModelConfig {
        hidden_size: 7168,
        layers: (0..61).map(layer).collect(),
        num_mtp_layers: 0,
        dspark: dspark(61, 512),
        num_attention_heads: 128,
        q_lora_rank: 1536,
        o_groups: 16,
        index_topk: 1024,
        n_routed_experts: 384,
        moe_intermediate_size: 3072,
        routed_scaling_factor: 2.5,
        ..ModelConfig::new()
    }
}

#[test]
fn a_drafter_of_the_sizes_of_a_release_is_counted_and_planned_for() {
    // Tensors of the whole file, as published; of Pro, none are known.
    for (config, count) in [(flash(), Some(72_317)), (pro(), None)] {
        config.validate().unwrap();
        let (d, rank) = (
            config.hidden_size,
            config.dspark.as_ref().unwrap().markov_rank,
        );
        let layout = CacheLayout::dspark(&config);
        let checkpoint = checkpoint(config);
        if let Some(count) = count {
            assert_eq!(checkpoint.tensors().len(), count);
        }
        for (name, shape) in [
            ("mtp.0.main_proj.weight", vec![d, 3 * d]),
            ("mtp.2.markov_head.markov_w1.weight", vec![129_280, rank]),
            ("mtp.2.markov_head.markov_w2.weight", vec![129_280, rank]),
            ("mtp.2.confidence_head.proj.weight", vec![1, d + rank]),
            ("mtp.2.hc_head_fn", vec![4, 4 * d]),
            ("mtp.1.attn.wkv.weight", vec![512, d]),
        ] {
            assert_eq!(checkpoint.tensor(name).expect(name).shape, shape, "{name}");
        }
        let bytes = |drafter| {
            let options = LoadOptions {
                drafter,
                ..LoadOptions::default()
            };
            checkpoint.weight_bytes(&options, &Device::flex()).unwrap()
        };
        // The packed experts of the stages are the most of it.
        let config = checkpoint.config();
        let experts = 3 * config.n_routed_experts * 3 * d * config.moe_intermediate_size;
        let (drafter, experts) = (bytes(true) - bytes(false), experts / 2 + experts / 32);
        assert!(
            (experts..experts + experts / 4).contains(&drafter),
            "{drafter}"
        );
        // Each stage has a ring of a window, however long the text is.
        let ring = |capacity| {
            layout.bytes(CacheConfig {
                capacity,
                rollback: Rollback::Bounded(5),
                ..CacheConfig::default()
            })
        };
        let [short, long] = [1 << 12, 1 << 13].map(|capacity| ring(capacity).unwrap());
        assert_eq!(long, short);
    }
}

#[test]
fn v41_has_the_tensors_of_its_release() {
    let config = crate::config::v41_flash();
    let checkpoint = checkpoint(config);
    // Those of the text, but for routing biases of images: one in each layer, of three that draft.
    assert_eq!(checkpoint.tensors().len(), 95_819 - 43);
    for (name, shape) in [
        ("layers.39.attn.wq_b.weight", vec![32_768, 1280]),
        ("layers.39.attn.wq_b.scale", vec![1024, 40]),
        ("layers.20.attn.compressor.wkv.weight", vec![512, 5120]),
        ("layers.14.attn.compressor.wgate.weight", vec![512, 5120]),
        ("layers.20.attn.indexer.wk.weight", vec![128, 512]),
        ("layers.36.attn.indexer.weights_proj.weight", vec![32, 5120]),
        ("layers.36.attn.indexer.wq_b.weight", vec![4096, 1280]),
        ("layers.1.engram.embed.scale", vec![384_006_168, 8]),
        ("layers.14.engram.wkv.scale", vec![800, 192]),
        ("layers.14.engram.q_weight", vec![4, 5120]),
        ("mtp.2.ffn.gate.weight", vec![128, 5120]),
        ("mtp.0.main_proj.scale", vec![160, 480]),
    ] {
        assert_eq!(checkpoint.tensor(name).expect(name).shape, shape, "{name}");
    }
    for name in [
        "layers.20.attn.compressor.wgate.weight",
        "layers.2.attn.compressor.ape",
        "layers.24.attn.indexer.wk.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "hc_head_fn",
        "mtp.2.hc_head_fn",
    ] {
        assert!(checkpoint.tensor(name).is_none(), "{name}");
    }
    let options = LoadOptions::default();
    let bytes = checkpoint.model_bytes(&options, &Device::flex(), 4096);
    let drafter = bytes.unwrap().drafter.expect("a drafter");
    // 128 experts of FP4 in each stage are the most of it.
    let experts = 3 * 128 * 3 * 5120 * 2304 / 32 * 17;
    assert!((experts..experts * 2).contains(&drafter.weights));
    let names = ["first", "second"].map(String::from);
    let bytes = checkpoint
        .model_bytes(&options, &Device::flex(), 4096)
        .unwrap();
    let plan = |parallel, split| Plan::new(checkpoint.config(), &bytes, &names, parallel, split);
    let divided = plan(Parallel::Layers, None).unwrap();
    assert_eq!(divided.runs, [0..20, 20..40]);
    for (parallel, split) in [
        (Parallel::Layers, Some(&[19, 21][..])),
        (Parallel::Tensor, None),
    ] {
        let error = plan(parallel, split).unwrap_err().to_string();
        assert!(error.contains("kv_source_layer_ids"), "{error}");
        assert!(error.contains("[0, 1, 2, 8, 14, 20]"), "{error}");
    }
    let target = tempfile::tempdir().unwrap();
    let written = checkpoint.convert(Form::Transformers, target.path(), 1 << 30, |_, _| {});
    let error = written.unwrap_err().to_string();
    assert!(error.contains("names of transformers"), "{error}");
}

#[test]
fn a_checkpoint_of_v41_that_was_converted_computes_the_same() {
    let source = Checkpoint::open(&path("tests/fixtures/v41-goldens")).unwrap();
    let (_, expected) = run(&source);
    for form in [Form::Released, Form::Dense] {
        let target = tempfile::tempdir().unwrap();
        let written = source.convert(form, target.path(), 200_000, |_, _| {});
        let written = written.unwrap();
        assert_eq!(written.config(), source.config());
        let formats = written.packed_formats();
        match form {
            Form::Dense => assert!(formats.is_empty(), "{formats:?}"),
            _ => assert_eq!(formats, source.packed_formats()),
        }
        assert_eq!(run(&written).1, expected, "{form:?}");
    }
}

#[test]
fn random_packed_weights_of_pro_with_its_drafter_have_the_bytes_of_its_file() {
    // An eighth as wide, with few layers and experts.
    let config = ModelConfig {
        vocab_size: 1024,
        hidden_size: 896,
        layers: pro().layers[..4].to_vec(),
        dspark: Some(DsparkParams {
            noise_token_id: 3,
            ..dspark(4, 512).unwrap()
        }),
        num_attention_heads: 16,
        q_lora_rank: 192,
        o_lora_rank: 128,
        n_routed_experts: 8,
        moe_intermediate_size: 384,
        ..pro()
    };
    let device = Device::flex();
    let model = config.init_packed(
        burn::tensor::FloatDType::F32,
        burn_ds4_ops::quant::Activations::Exact,
        &device,
    );
    let dspark = model.dspark.as_ref().unwrap();
    assert_eq!(dspark.projection.weight.weights().dims(), [1, 896, 3 * 896]);
    assert_eq!(dspark.markov_output.val().dims(), [1024, 512]);
    let checkpoint = checkpoint(config);
    let counted = checkpoint.weight_bytes(&LoadOptions::default(), &device);
    assert_eq!(counted.unwrap(), bytes(&model));
}

#[test]
fn layers_of_a_drafter_that_the_file_does_not_have_are_named() {
    let stored = flash();
    let of = |layers| {
        let params = stored.dspark.clone().unwrap();
        ModelConfig {
            layers: stored.layers[..8].to_vec(),
            n_routed_experts: 8,
            dspark: Some(DsparkParams {
                layers,
                target_layers: vec![5, 6, 7],
                ..params
            }),
            ..stored.clone()
        }
    };
    for (layers, named) in [(2, "mtp.2.attn.wkv.weight"), (4, "mtp.3.attn.wkv.weight")] {
        let mut checkpoint = checkpoint(of(3));
        checkpoint.config = of(layers);
        let error = checkpoint.weight_bytes(&LoadOptions::default(), &Device::flex());
        let error = error.unwrap_err().to_string();
        assert!(error.contains(named), "{layers} layers: {error}");
    }
}

#[test]
fn random_packed_weights_of_v41_are_as_those_of_a_file_on_a_device() {
    use burn_ds4_ops::quant::Activations;

    let stored = Checkpoint::open(&path("tests/fixtures/v41-goldens")).unwrap();
    let (config, device) = (stored.config().clone(), Device::flex());
    let dtype = burn::tensor::FloatDType::F32;
    let model = config.init_packed(dtype, Activations::Released, &device);
    let options = LoadOptions {
        activations: Activations::Released,
        ..LoadOptions::default()
    };
    let loaded = stored.load(&options, &device).unwrap();
    // What is expanded for speed rounds as what stays packed.
    let options = LoadOptions {
        expand: true,
        ..options
    };
    let expanded = stored.load(&options, &device).unwrap();
    for model in [&model, &loaded, &expanded] {
        let layer = &model.layers[0];
        for weight in [&layer.attention.query_a.weight, &layer.moe.gate_up] {
            assert_eq!(weight.activations, Activations::Released32);
        }
    }
    assert_eq!(bytes(&model), bytes(&loaded));
    let counted = config.packed_bytes(dtype, std::slice::from_ref(&device), 1);
    assert_eq!(counted.weights(), bytes(&model));
}

#[test]
fn engram_ids_are_looked_for_before_weights_are_read() {
    let (from, dir) = (path("tests/fixtures/v41-goldens"), tempfile::tempdir());
    let dir = dir.unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(file), dir.path().join(file)).unwrap();
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let mut reports = 0;
    let progress = |_, _| reports += 1;
    let options = LoadOptions::default();
    let loaded = checkpoint.load_with_progress(&options, &Device::flex(), progress);
    let error = loaded.unwrap_err();
    assert!(matches!(error, CheckpointError::EngramIds(_)), "{error}");
    assert_eq!(reports, 0);
}
