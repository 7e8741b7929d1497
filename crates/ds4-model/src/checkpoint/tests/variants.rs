//! Checkpoints as they are in the wild, each made of one in the released form, with whose weights
//! they must give the same logits.

use burn::tensor::{Device, Int, Tensor, TensorData};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::directory::is_apart;
use super::super::{CheckpointTensor, Dialect, Dtype, Form, LoadOptions, names};
use super::{
    Checkpoint, CheckpointError, StoredTensor, repository, safetensors, stored, stored_f32,
};
use crate::cache::CacheConfig;
use crate::model::Model;

/// All in F32; FP4 in the experts and FP8 elsewhere; that with a DSpark drafter.
pub(super) const RANDOM: &str = "tests/fixtures/layer-goldens";
pub(super) const TINY: &str = "assets/ds4-tiny";
pub(super) const DSPARK: &str = "assets/ds4-tiny-dspark";

/// What a checkpoint is written from.
pub(super) struct Variant {
    pub(super) config: Value,
    pub(super) tensors: Vec<StoredTensor>,
}

pub(super) fn kept(tensor: CheckpointTensor<'_>) -> StoredTensor {
    let dtype = match tensor.dtype {
        Dtype::F32 => "F32",
        Dtype::BF16 => "BF16",
        Dtype::I64 => "I64",
        Dtype::I8 => "I8",
        Dtype::F8_E4M3 => "F8_E4M3",
        Dtype::F8_E8M0 => "F8_E8M0",
        other => panic!("{other}"),
    };
    stored(tensor.name, dtype, tensor.shape, tensor.bytes)
}

impl Variant {
    pub(super) fn of(dir: &str) -> Self {
        let dir = repository::path(dir);
        let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
        Self {
            config: serde_json::from_str(&text).unwrap(),
            tensors: Checkpoint::open(&dir)
                .unwrap()
                .tensors()
                .map(kept)
                .collect(),
        }
    }

    pub(super) fn named(mut self, name: impl Fn(&str) -> String) -> Self {
        for tensor in &mut self.tensors {
            tensor.name = name(&tensor.name);
        }
        self
    }

    pub(super) fn without(mut self, prefix: &str) -> Self {
        self.tensors
            .retain(|tensor| !tensor.name.starts_with(prefix));
        self
    }

    pub(super) fn open(&self) -> Result<(TempDir, Checkpoint), CheckpointError> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), self.config.to_string()).unwrap();
        let file = safetensors(&self.tensors);
        std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
        let checkpoint = Checkpoint::open(dir.path())?;
        Ok((dir, checkpoint))
    }

    /// Written in another form, in a directory `target`.
    pub(super) fn converted(&self, form: Form) -> (TempDir, Checkpoint) {
        let (dir, checkpoint) = self.open().unwrap();
        let target = dir.path().join("target");
        let written = checkpoint.convert(form, &target, 400_000, |_, _| {});
        (dir, written.unwrap())
    }

    /// The checkpoint, the model with decoded weights and its logits.
    fn run(&self) -> (Checkpoint, Model, Vec<f32>) {
        let (_dir, checkpoint) = self.open().unwrap();
        let (model, logits) = run(&checkpoint);
        (checkpoint, model, logits)
    }

    pub(super) fn logits(&self) -> Vec<f32> {
        self.run().2
    }
}

pub(super) fn run(checkpoint: &Checkpoint) -> (Model, Vec<f32>) {
    let options = LoadOptions {
        expand: true,
        ..LoadOptions::default()
    };
    let device = Device::flex();
    let model = checkpoint.load(&options, &device).unwrap();
    let ids: Vec<i64> = (0..21).map(|position| position * 37 % 128).collect();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, 21]), &device);
    let mut cache = model.new_cache(CacheConfig::default()).unwrap();
    let logits = model.forward(ids, &mut cache).unwrap().into_data();
    (model, logits.try_to_vec::<f32>().unwrap())
}

/// Names among the modules of `transformers`, and the released ones.
const NAMES: &str = "\
model.embed_tokens.weight embed.weight
lm_head.weight head.weight
model.norm.weight norm.weight
model.hc_head.hc_fn hc_head_fn
model.layers.2.input_layernorm.weight layers.2.attn_norm.weight
model.layers.2.post_attention_layernorm.weight layers.2.ffn_norm.weight
model.layers.2.attn_hc.scale layers.2.hc_attn_scale
model.layers.2.ffn_hc.base layers.2.hc_ffn_base
model.layers.2.self_attn.sinks layers.2.attn.attn_sink
model.layers.2.self_attn.q_a_proj.weight layers.2.attn.wq_a.weight
model.layers.2.self_attn.q_a_norm.weight layers.2.attn.q_norm.weight
model.layers.2.self_attn.q_b_proj.weight_scale_inv layers.2.attn.wq_b.scale
model.layers.2.self_attn.kv_proj.weight layers.2.attn.wkv.weight
model.layers.2.self_attn.kv_norm.weight layers.2.attn.kv_norm.weight
model.layers.2.self_attn.o_a_proj.weight layers.2.attn.wo_a.weight
model.layers.2.self_attn.o_b_proj.weight layers.2.attn.wo_b.weight
model.layers.2.self_attn.compressor.kv_proj.weight layers.2.attn.compressor.wkv.weight
model.layers.2.self_attn.compressor.gate_proj.weight layers.2.attn.compressor.wgate.weight
model.layers.2.self_attn.compressor.position_bias layers.2.attn.compressor.ape
model.layers.2.self_attn.compressor.kv_norm.weight layers.2.attn.compressor.norm.weight
model.layers.2.self_attn.compressor.indexer.q_b_proj.weight layers.2.attn.indexer.wq_b.weight
model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight \
layers.2.attn.indexer.weights_proj.weight
model.layers.2.self_attn.compressor.indexer.gate_proj.weight \
layers.2.attn.indexer.compressor.wgate.weight
model.layers.2.self_attn.compressor.indexer.kv_norm.weight \
layers.2.attn.indexer.compressor.norm.weight
model.layers.2.mlp.gate.weight layers.2.ffn.gate.weight
model.layers.2.mlp.gate.tid2eid layers.2.ffn.gate.tid2eid
model.layers.2.mlp.gate.e_score_correction_bias layers.2.ffn.gate.bias
model.layers.2.mlp.experts.7.up_proj.weight layers.2.ffn.experts.7.w3.weight
model.layers.2.mlp.experts.gate_up_proj layers.2.ffn.experts.gate_up_proj
model.layers.2.mlp.shared_experts.down_proj.weight layers.2.ffn.shared_experts.w2.weight";

#[test]
fn names_of_transformers_with_experts_apart_or_in_one_tensor_give_the_same_logits() {
    for line in NAMES.lines() {
        let (other, released) = line.split_once(' ').unwrap();
        assert_eq!(names::released(other).unwrap().0, released);
        assert_eq!(names::transformers(released), other);
    }
    let expected = Variant::of(RANDOM).logits();
    // It writes nothing of the MTP layer, which its configuration still names.
    let variant = Variant::of(RANDOM).without("mtp.");
    let (_dir, stacked) = variant.converted(Form::Transformers);
    assert!(stacked.shards.len() > 3);
    let apart = variant.named(names::transformers).open().unwrap();
    for checkpoint in [&apart.1, &stacked] {
        assert_eq!(checkpoint.dialect(), Dialect::Transformers);
        assert_eq!(checkpoint.config().num_mtp_layers, 0);
        let (model, logits) = run(checkpoint);
        assert!(model.mtp.is_none());
        assert!(logits == expected);
    }
}

#[test]
fn a_stack_of_other_experts_and_one_whose_blocks_reach_over_its_parts_stay_whole() {
    let variant = Variant::of(RANDOM).without("mtp.");
    let (dir, _) = variant.converted(Form::Transformers);
    let path = dir.path().join("target/config.json");
    let mut config = variant.config;
    config["n_routed_experts"] = json!(4);
    std::fs::write(path, config.to_string()).unwrap();
    let checkpoint = Checkpoint::open(&dir.path().join("target")).unwrap();
    let error = checkpoint.load(&LoadOptions::default(), &Device::flex());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("ffn.experts.gate_up_proj"), "{error}");
    // As many experts, but for one that there is not.
    let other = Variant::of(RANDOM).named(|name| name.replace(".experts.7.", ".experts.8."));
    let (_dir, checkpoint) = other.converted(Form::Transformers);
    assert!(
        checkpoint
            .tensor("layers.0.ffn.experts.8.w1.weight")
            .is_some()
    );
    assert!(names::stack_of("layers.0.ffn.experts.07.w1.weight").is_none());
    assert!(!is_apart(2, 2, 32) && is_apart(2, 64, 32) && is_apart(2, 2, 128));
}

#[test]
fn a_prefix_of_all_names_and_scales_of_another_name_change_nothing() {
    let expected = Variant::of(TINY).logits();
    for prefix in ["", "model.", "language_model.model."] {
        let variant = Variant::of(TINY).named(|name| match name.strip_suffix(".scale") {
            Some(start) => format!("{prefix}{start}.weight_scale_inv"),
            None => format!("{prefix}{name}"),
        });
        let (checkpoint, model, logits) = variant.run();
        let dialect = match prefix {
            "" => Dialect::Released,
            _ => Dialect::Prefixed,
        };
        assert_eq!(checkpoint.dialect(), dialect);
        assert!(model.mtp.is_some() && logits == expected, "{prefix}");
    }
}

#[test]
fn what_is_for_images_is_skipped_and_the_drafter_is_that_of_the_tensors() {
    let expected = Variant::of(DSPARK).logits();
    for layers in [1, 3] {
        let mut variant = Variant::of(DSPARK);
        variant.config["num_nextn_predict_layers"] = json!(layers);
        variant.config["vision_n_layers"] = json!(2);
        variant.config["vision_patch_size"] = json!(14);
        let of_images = [
            "vision.patch_embed.proj.weight",
            "vision.blocks.0.attn.wqkv.weight",
            "aligner.w1.weight",
            "image_start",
            "image_newline",
            "layers.0.ffn.gate.bias_vl",
            "mtp.1.ffn.gate.bias_vl",
        ];
        let tensors = of_images.map(|name| stored_f32(name, &[1], &[f32::NAN]));
        variant.tensors.extend(tensors);
        // Packs of that release have biases where token ids choose the experts.
        let bias = stored_f32("layers.0.ffn.gate.bias", &[32], &[0.5; 32]);
        variant.tensors.push(bias);
        let (checkpoint, model, logits) = variant.run();
        for (layer, skipped) in [(0, Some("biases")), (3, None)] {
            let name = format!("layers.{layer}.ffn.gate.bias");
            assert_eq!(checkpoint.skipped(&name), skipped);
        }
        let skipped = checkpoint
            .tensors()
            .filter(|tensor| checkpoint.skipped(tensor.name) == Some("images"));
        assert_eq!(skipped.count(), of_images.len());
        assert_eq!(checkpoint.config().dspark.as_ref().unwrap().layers, 3);
        assert!(model.dspark.is_some() && model.mtp.is_none());
        assert!(logits == expected);
    }
}

#[test]
fn a_drafter_without_tensors_is_never_built_and_one_with_some_is_an_error() {
    for dir in [TINY, DSPARK] {
        let expected = Variant::of(dir).logits();
        let (_, model, logits) = Variant::of(dir).without("mtp.").run();
        assert!(model.dspark.is_none() && model.mtp.is_none() && logits == expected);
        let (_dir, checkpoint) = Variant::of(dir).without("mtp.0.attn.").open().unwrap();
        let error = checkpoint.load(&LoadOptions::default(), &Device::flex());
        let error = error.unwrap_err().to_string();
        assert!(error.contains("mtp.0.attn.wkv.weight"), "{error}");
    }
    let mut variant = Variant::of(TINY);
    variant.config["num_nextn_predict_layers"] = json!(0);
    let (_dir, checkpoint) = variant.open().unwrap();
    let error = checkpoint.load(&LoadOptions::default(), &Device::flex());
    assert!(matches!(error, Err(CheckpointError::Weights(_))));
    let stages = Variant::of(DSPARK).named(|name| name.replacen("mtp.", "stages.", 1));
    assert!(stages.run().1.dspark.is_some());
}

/// E4M3, written out by its definition.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let value = match exponent {
        0 => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code < 128 { value } else { -value }
}

const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The matrix that codes and scales stand for, with a scale of each row where there are as many.
pub(super) fn decoded(weight: &StoredTensor, scale: &StoredTensor, factor: f32) -> StoredTensor {
    let four_bytes = scale.bytes.as_chunks().0.iter();
    let bytes = scale.bytes.iter();
    let (scales, block): (Vec<f32>, usize) = match scale.dtype {
        "F32" => (
            four_bytes.map(|bytes| f32::from_le_bytes(*bytes)).collect(),
            128,
        ),
        "F8_E4M3" => (bytes.map(|code| e4m3(*code)).collect(), 16),
        _ => (
            bytes
                .map(|code| 2f32.powi(i32::from(*code) - 127))
                .collect(),
            32,
        ),
    };
    let is_fp4 = weight.dtype != "F8_E4M3";
    let [rows, columns] = [
        weight.shape[0],
        weight.shape[1] * if is_fp4 { 2 } else { 1 },
    ];
    let value = |row: usize, column: usize| {
        let height = if is_fp4 || scale.shape[0] == rows {
            1
        } else {
            128
        };
        let width = match scale.shape[1] * 32 == columns {
            true if !is_fp4 => 32,
            _ if is_fp4 => block,
            _ => 128,
        };
        let place = (column / width).min(scale.shape[1] - 1);
        let row_of_scales = (row / height).min(scale.shape[0] - 1);
        let scale = scales[row_of_scales * scale.shape[1] + place];
        let value = match is_fp4 {
            false => e4m3(weight.bytes[row * columns + column]),
            true => {
                let code = weight.bytes[(row * columns + column) / 2] >> (4 * (column % 2));
                let value = E2M1[usize::from(code & 7)];
                if code & 8 == 0 { value } else { -value }
            }
        };
        value * scale * factor
    };
    let values = (0..rows * columns).map(|index| value(index / columns, index % columns));
    stored_f32(&weight.name, &[rows, columns], &values.collect::<Vec<_>>())
}

/// The same model with a dense matrix for each packed one.
pub(super) fn dense(variant: &Variant) -> Variant {
    let scale_of = |name: &str| {
        let name = format!("{}.scale", name.strip_suffix(".weight")?);
        variant.tensors.iter().find(|tensor| tensor.name == name)
    };
    let tensors = variant
        .tensors
        .iter()
        .filter(|tensor| !tensor.name.ends_with(".scale"));
    let tensors = tensors.map(|tensor| match scale_of(&tensor.name) {
        Some(scale) => decoded(tensor, scale, 1.0),
        None => tensor.clone(),
    });
    Variant {
        config: variant.config.clone(),
        tensors: tensors.collect(),
    }
}

/// All F32 without their lower 16 bits, as BF16 or as F32.
fn shortened(variant: Variant, dtype: &'static str) -> Variant {
    let tensors = variant.tensors.into_iter().map(|tensor| {
        if tensor.dtype != "F32" {
            return tensor;
        }
        let words = tensor.bytes.as_chunks::<4>().0.iter();
        let bytes: Vec<u8> = match dtype {
            "BF16" => words.flat_map(|word| [word[2], word[3]]).collect(),
            _ => words.flat_map(|word| [0, 0, word[2], word[3]]).collect(),
        };
        stored(&tensor.name, dtype, &tensor.shape, &bytes)
    });
    Variant {
        tensors: tensors.collect(),
        ..variant
    }
}

#[test]
fn every_tensor_dense_gives_the_logits_of_the_packed_ones() {
    let released = Variant::of(TINY);
    let dense = dense(&released);
    let is_dense = |tensor: &StoredTensor| ["F32", "BF16", "I64"].contains(&tensor.dtype);
    assert!(dense.tensors.iter().all(is_dense));
    assert!(dense.logits() == released.logits());
    let [bf16, f32] = ["BF16", "F32"].map(|dtype| shortened(Variant::of(RANDOM), dtype));
    assert!(bf16.logits() == f32.logits());
}

#[test]
fn experts_of_base_models_give_the_logits_of_what_they_stand_for() {
    let mut base = Variant::of(RANDOM);
    assert!(base.config.get("expert_dtype").is_none());
    let mut scales = Vec::new();
    for (index, tensor) in base.tensors.iter_mut().enumerate() {
        let Some(name) = tensor.name.strip_suffix(".weight") else {
            continue;
        };
        if !name.contains(".ffn.experts.") && !name.ends_with(".wq_b") {
            continue;
        }
        // Codes up to 240 in size, neither NaN nor all alike.
        let codes = 0..tensor.shape.iter().product::<usize>();
        let code = |code: usize| (((code * 7 + index) % 0x78) | ((code % 2) << 7)) as u8;
        tensor.bytes = codes.map(code).collect();
        tensor.dtype = "F8_E4M3";
        let blocks = [tensor.shape[0].div_ceil(128), 1];
        let values = vec![0.003 + index as f32 * 1e-5; blocks[0]];
        scales.push(stored_f32(&format!("{name}.scale"), &blocks, &values));
    }
    assert!(scales.len() > 4 * 8 * 3);
    base.tensors.extend(scales);
    let logits = base.logits();
    assert!(logits.iter().all(|logit| logit.is_finite()));
    assert!(logits == dense(&base).logits());
    for form in [Form::Released, Form::Dense, Form::Transformers] {
        assert!(run(&base.converted(form).1).1 == logits, "{form:?}");
    }
}
