//! Packed formats of other tools, and checkpoints that are written in another form.

use burn::tensor::Device;
use serde_json::json;

use super::super::{Dtype, Form, LoadOptions};
use super::variants::{DSPARK, RANDOM, TINY, Variant, decoded, run};
use super::{Checkpoint, CheckpointError, StoredTensor, repository, stored, stored_f32};
use crate::weights::StackValues;

/// The E4M3 code of a power of two.
fn power_code(exponent: i32) -> u8 {
    match exponent {
        -6..=8 => ((exponent + 7) << 3) as u8,
        _ => 1 << (exponent + 9),
    }
}

/// The routed experts of the trunk in NVFP4, and the same in F32. Scales are those of FP4 times a
/// factor, or any.
fn nvfp4(names: [&str; 3], is_any: bool, factor: f32) -> [Variant; 2] {
    let mut released = Variant::of(TINY);
    released.config["quantization_config"]["moe_quant_algo"] = json!("NVFP4");
    let packed = released.tensors.clone();
    let (mut made, mut dense) = (Vec::new(), Vec::new());
    for weight in packed.iter().filter(|tensor| tensor.dtype == "I8") {
        let prefix = weight.name.strip_suffix(".weight").unwrap();
        let name = format!("{prefix}.scale");
        let scale = packed.iter().find(|tensor| tensor.name == name).unwrap();
        let most = i32::from(*scale.bytes.iter().max().unwrap()) - 127;
        let codes = scale
            .bytes
            .iter()
            .enumerate()
            .flat_map(|(index, code)| match is_any {
                true => [8 + (index * 7 % 96) as u8, 9 + (index * 11 % 96) as u8],
                false => [power_code(i32::from(*code) - 127 - most + 8); 2],
            });
        let blocks = [scale.shape[0], 2 * scale.shape[1]];
        let scale = stored(&name, "F8_E4M3", &blocks, &codes.collect::<Vec<_>>());
        let factor = factor * 2f32.powi(most - 8);
        dense.push(decoded(weight, &scale, factor));
        let [end, of_block, of_all] = names.map(|end| format!("{prefix}.{end}"));
        let (shape, factor) = match of_all.ends_with("global_scale") {
            true => (&[1][..], factor.recip()),
            false => (&[][..], factor),
        };
        made.extend([
            stored(&end, "U8", &weight.shape, &weight.bytes),
            stored(&of_block, scale.dtype, &scale.shape, &scale.bytes),
            stored_f32(&of_all, shape, &[factor]),
            stored_f32(&format!("{prefix}.input_scale"), &[], &[0.01]),
        ]);
    }
    let is_other = |tensor: &StoredTensor| !tensor.name.contains(".ffn.experts.");
    let others: Vec<_> = packed.into_iter().filter(is_other).collect();
    [made, dense].map(|tensors| Variant {
        config: released.config.clone(),
        tensors: [others.clone(), tensors].concat(),
    })
}

const MODELOPT: [&str; 3] = ["weight", "weight_scale", "weight_scale_2"];
const COMPRESSED: [&str; 3] = ["weight_packed", "weight_scale", "weight_global_scale"];

/// Bytes on a device, and the packed format of the experts.
fn held(checkpoint: &Checkpoint) -> (usize, String) {
    let bytes = checkpoint.weight_bytes(&LoadOptions::default(), &Device::flex());
    let formats = checkpoint.packed_formats().into_keys();
    (bytes.unwrap(), formats.last().unwrap_or_default())
}

#[test]
fn nvfp4_folds_to_fp4_where_it_was_made_of_that_and_else_expands_with_one_rounding() {
    let released = Variant::of(TINY);
    let (_dir, opened) = released.open().unwrap();
    let expected = (released.logits(), held(&opened).0);
    for names in [MODELOPT, COMPRESSED] {
        let [variant, _] = nvfp4(names, false, 1.0);
        let (_dir, checkpoint) = variant.open().unwrap();
        assert_eq!(
            held(&checkpoint),
            (expected.1, "NVFP4, folded to FP4".to_owned())
        );
        assert!(run(&checkpoint).1 == expected.0, "{names:?}");
        let (_dir, back) = variant.converted(Form::Released);
        assert!(run(&back).1 == expected.0);
        assert_eq!(held(&back), held(&opened));
        let [variant, dense] = nvfp4(names, true, 0.75);
        let (_dir, checkpoint) = variant.open().unwrap();
        let (bytes, format) = held(&checkpoint);
        assert!(
            bytes > 2 * expected.1 && format == "NVFP4, expanded",
            "{format}"
        );
        let logits = dense.logits();
        assert!(logits.iter().all(|logit| logit.is_finite()));
        assert!(run(&checkpoint).1 == logits);
        assert!(run(&variant.converted(Form::Released).1).1 == logits);
    }
    // One expert that does not fold has its whole stack expanded, and that is foreseen.
    let [mut variant, _] = nvfp4(MODELOPT, false, 1.0);
    let mut tensors = variant.tensors.iter_mut();
    let scale = tensors.find(|of| of.name == "layers.1.ffn.experts.5.w3.weight_scale");
    scale.unwrap().bytes[3] ^= 1;
    let (_dir, checkpoint) = variant.open().unwrap();
    let expanded = 2 * checkpoint.config().n_routed_experts;
    assert_eq!(checkpoint.packed_formats()["NVFP4, expanded"], expanded);
    let model = checkpoint.load(&LoadOptions::default(), &Device::flex());
    let StackValues::Dense(dense) = &model.unwrap().layers[1].moe.gate_up.values else {
        panic!("packed");
    };
    let more = held(&checkpoint).0 - expected.1;
    assert!(more > 3 * dense.shape().num_elements());
    for form in [Form::Released, Form::Transformers] {
        assert!(run(&variant.converted(form).1).1 == variant.logits());
    }
    // Neither a power of two, nor scales alike in pairs.
    let [variant, dense] = nvfp4(MODELOPT, false, 1.1);
    assert!(variant.logits() == dense.logits());
}

#[test]
fn scales_are_bytes_or_floats_and_of_blocks_rows_parts_of_rows_or_all() {
    let expected = Variant::of(TINY).logits();
    for kind in ["U8", "BF16"] {
        let mut variant = Variant::of(TINY);
        for tensor in &mut variant.tensors {
            if let Some(prefix) = tensor.name.strip_suffix(".scale") {
                let is_fp8 = !prefix.contains(".ffn.experts.");
                tensor.name = format!("{prefix}.weight_scale");
                tensor.dtype = if is_fp8 { "BF16" } else { kind };
                if tensor.dtype == "BF16" {
                    let bits = tensor.bytes.iter().map(|code| u16::from(*code) << 7);
                    tensor.bytes = bits.flat_map(u16::to_le_bytes).collect();
                }
            }
        }
        let formats = variant.open().unwrap().1.packed_formats();
        let is_folded = |of: &String| of.ends_with(", folded to FP4");
        assert_eq!(formats.keys().any(is_folded), kind == "BF16");
        assert!(variant.logits() == expected);
    }
    for (height, width) in [(1, 0), (usize::MAX, 0), (1, 32)] {
        let [mut variant, mut dense] = [TINY, TINY].map(Variant::of);
        let codes = variant.tensors.iter();
        let codes = codes.filter(|tensor| tensor.dtype == "F8_E4M3");
        for weight in codes.cloned().collect::<Vec<_>>() {
            let name = weight.name.replace(".weight", ".scale");
            let rows = weight.shape[0].div_ceil(height);
            let columns = weight.shape[1].checked_div(width).unwrap_or(1);
            let scales = (0..rows * columns).map(|row| 0.01 + row as f32 * 1e-5);
            let mut scale = stored_f32(&name, &[rows, columns], &scales.collect::<Vec<_>>());
            for changed in [&mut variant, &mut dense] {
                changed.tensors.retain(|tensor| tensor.name != name);
            }
            dense.tensors.retain(|tensor| tensor.name != weight.name);
            dense.tensors.push(decoded(&weight, &scale, 1.0));
            scale.shape.truncate(2 - usize::from(height > 1));
            variant.tensors.push(scale);
        }
        assert!(variant.logits() == dense.logits(), "{height} {width}");
    }
}

#[test]
fn every_form_gives_the_same_logits_and_is_in_its_own_formats() {
    for dir in [TINY, DSPARK, RANDOM] {
        let source = Variant::of(dir);
        let expected = source.logits();
        for form in [Form::Released, Form::Dense, Form::Transformers] {
            let (_dir, checkpoint) = source.converted(form);
            assert!(checkpoint.shards.len() > 3);
            let (model, logits) = run(&checkpoint);
            assert!(logits == expected, "{dir} {form:?}");
            assert_eq!(model.dspark.is_some(), dir == DSPARK);
            assert_eq!(model.mtp.is_some(), dir != DSPARK);
            let is_packed = form != Form::Dense && dir != RANDOM;
            assert_eq!(
                !checkpoint.packed_formats().is_empty(),
                is_packed,
                "{dir} {form:?}"
            );
            let config = std::fs::read_to_string(checkpoint.dir().join("config.json")).unwrap();
            assert_eq!(config.contains("quantization_config"), is_packed);
        }
    }
}

/// FP8 and FP4 in one stack, an NVFP4 gate that folds with an up that does not, and F4 whose rows
/// share a byte.
#[test]
fn a_conversion_keeps_what_a_loader_would_refuse_and_gate_and_up_alike() {
    let file = repository::path("fuzz/corpus/header/mixed-stacks.safetensors");
    let dir = super::checkpoint_of_bytes(&std::fs::read(file).unwrap());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let expected = r#"{"FP4": 1, "FP8 with F32 scales": 1, "NVFP4, expanded": 2}"#;
    assert_eq!(format!("{:?}", checkpoint.packed_formats()), expected);
    for form in [Form::Released, Form::Dense, Form::Transformers] {
        let target = dir.path().join(format!("{form:?}"));
        let written = checkpoint.convert(form, &target, 100, |_, _| {}).unwrap();
        let kept = written.packed_formats().into_values().sum::<usize>();
        assert_eq!(kept, if form == Form::Dense { 0 } else { 2 });
        let odd = written.tensor("layers.0.attn.wkv.weight").unwrap();
        assert_eq!((odd.dtype, odd.shape), (Dtype::F4, &[2, 3][..]));
    }
}

#[test]
fn an_interrupted_conversion_goes_on_and_nothing_is_overwritten() {
    let (dir, source) = Variant::of(TINY).open().unwrap();
    let target = |name: &str| dir.path().join(name);
    let convert = |name, form| source.convert(form, &target(name), 1_000_000, |_, _| {});
    let interrupted = std::panic::catch_unwind(|| {
        let stop = |done, _| assert!(done < 3_000_000, "interrupted");
        source.convert(Form::Released, &target("a"), 1_000_000, stop)
    });
    assert!(interrupted.is_err());
    let first = target("a").join("model-00001-of-00012.safetensors");
    let written = first.metadata().unwrap().modified().unwrap();
    // A part of the next shard, as of a process that was killed.
    let part = target("a").join("model-00005-of-00012.partial");
    std::fs::write(&part, [1; 100]).unwrap();
    assert!(Checkpoint::open(&target("a")).is_err());
    let exists = |result| matches!(result, Err(CheckpointError::TargetExists { .. }));
    assert!(exists(convert("a", Form::Dense)));
    convert("a", Form::Released).unwrap();
    assert_eq!(first.metadata().unwrap().modified().unwrap(), written);
    // One that was killed before it had told what it writes.
    std::fs::create_dir(target("b")).unwrap();
    std::fs::write(target("b").join("conversion.partial"), "").unwrap();
    convert("b", Form::Released).unwrap();
    let names = |name| {
        let entries = target(name).read_dir().unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names("a"), names("b"));
    for name in names("a") {
        let [one, other] = ["a", "b"].map(|dir| std::fs::read(target(dir).join(&name)).unwrap());
        assert!(one == other, "{name:?}");
    }
    for name in ["a", "."] {
        assert!(exists(convert(name, Form::Released)));
    }
    let stamps = || format!("{:?}", source.stamps());
    let (before, config) = (stamps(), dir.path().join("config.json"));
    std::fs::write(config, "{}").unwrap();
    assert!(stamps() != before);
    let error = convert("model.safetensors/target", Form::Dense).unwrap_err();
    assert!(matches!(error, CheckpointError::Write { .. }), "{error}");
}

#[test]
fn damaged_scales_of_nvfp4_are_told() {
    let name = "layers.0.ffn.experts.0.w1.weight_scale";
    type Change = fn(&mut StoredTensor);
    #[rustfmt::skip]
    let cases: [(&str, Change, &str); 6] = [
        ("_2", |all| all.name.push('x'), "w1.weight_scale_2 []"),
        ("_2", |all| all.bytes.fill(0xff), "1 scales that are not finite"),
        ("_2", |all| all.dtype = "I32", "has dtype I32, expected F32"),
        ("_2", |all| (all.shape, all.bytes) = (vec![2], vec![0; 8]), "is [2], expected []"),
        ("", |of| of.bytes[7] = 0x7f, "1 scales that are not finite, the first at element 7"),
        ("", |of| of.shape.swap(0, 1), "is [16, 64], expected [64, 16]"),
    ];
    for (end, change, expected) in cases {
        let [mut variant, _] = nvfp4(MODELOPT, false, 1.0);
        let mut tensors = variant.tensors.iter_mut();
        change(
            tensors
                .find(|of| of.name == format!("{name}{end}"))
                .unwrap(),
        );
        let (_dir, checkpoint) = variant.open().unwrap();
        let error = checkpoint.load(&LoadOptions::default(), &Device::flex());
        let error = error.unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

/// A snapshot of a hub: links, an index in another order without sizes, an older copy of a tensor
/// in another shard, sizes that are no multiples of 8, and tensors without elements.
#[cfg(unix)]
#[test]
fn a_hubs_cache_gives_the_same_logits() {
    let (dir, _) = Variant::of(TINY).converted(Form::Released);
    let (blobs, cache) = (dir.path().join("target"), dir.path().join("snapshots"));
    std::fs::create_dir(&cache).unwrap();
    for entry in blobs.read_dir().unwrap() {
        let name = entry.unwrap().file_name();
        std::os::unix::fs::symlink(blobs.join(&name), cache.join(name)).unwrap();
    }
    let odd = [
        stored("empty", "BF16", &[0, 4], &[]),
        stored("image_start", "U8", &[3], &[1; 3]),
        stored_f32("norm.weight", &[256], &[9.0; 256]),
    ];
    let file = super::safetensors(&odd).split_off(9);
    let (header, data) = file.split_at(file.len() - 1027);
    let header = String::from_utf8_lossy(header);
    let file = super::with_header(&format!(r#"{{"__metadata__":{{}},{header}"#), data);
    std::fs::write(cache.join("other.safetensors"), file).unwrap();
    let path = cache.join("model.safetensors.index.json");
    let index: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let entries = index["weight_map"].as_object().unwrap().iter().rev();
    let entries: Vec<String> = entries
        .map(|(name, shard)| format!("\"{name}\":{shard}"))
        .collect();
    let others = r#""empty":"other.safetensors","image_start":"other.safetensors","#;
    std::fs::remove_file(&path).unwrap();
    let index = format!("{{\"weight_map\":{{{others}{}}}}}", entries.join(","));
    std::fs::write(&path, index).unwrap();
    let checkpoint = Checkpoint::open(&cache).unwrap();
    assert_eq!(checkpoint.skipped("empty"), Some("empty"));
    assert!(run(&checkpoint).1 == Variant::of(TINY).logits());
    // A link whose file is gone.
    let shard = checkpoint.tensor("head.weight").unwrap().shard;
    std::fs::remove_file(shard.canonicalize().unwrap()).unwrap();
    let error = Checkpoint::open(&cache).unwrap_err();
    assert!(
        matches!(error, CheckpointError::MissingShards { .. }),
        "{error}"
    );
}

#[test]
fn scales_of_blocks_that_the_configuration_does_not_have_are_refused() {
    let mut variant = Variant::of(TINY);
    let mut tensors = variant.tensors.iter_mut();
    let scale = tensors.find(|of| of.name == "layers.0.attn.wq_a.scale");
    let scale = scale.unwrap();
    let (_dir, whole) = Variant::of(TINY).open().unwrap();
    let weight = whole.tensor("layers.0.attn.wq_a.weight").unwrap();
    scale.shape = weight.shape.iter().map(|size| size.div_ceil(32)).collect();
    scale.bytes = vec![127; scale.shape.iter().product()];
    let (_dir, checkpoint) = variant.open().unwrap();
    let loaded = checkpoint.load(&LoadOptions::default(), &Device::flex());
    let error = loaded.unwrap_err().to_string();
    assert!(error.contains("layers.0.attn.wq_a.scale"), "{error}");
}
