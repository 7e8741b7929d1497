//! What a model takes on a device, counted from the headers of its checkpoint.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::quant::Activations;
use ds4_model::cache::{Cache, CacheConfig, CacheError, CacheLayout, Rollback};
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::linear::StackValues;
use ds4_model::model::Model;
use safetensors::SafeTensors;
use tempfile::TempDir;

use crate::common::values;
use crate::golden::root;

/// Bytes of all parameters.
fn bytes(model: &Model) -> usize {
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

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(&root().join(name)).expect("it is a checkpoint")
}

#[test]
fn the_bytes_of_the_headers_are_those_of_the_loaded_model() {
    let device = Device::flex();
    let names = [
        "assets/ds4-tiny",
        "assets/ds4-tiny-dspark",
        "tests/fixtures/layer-goldens",
    ];
    for name in names {
        let checkpoint = open(name);
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            for [expand, drafter] in [[false, true], [true, true], [false, false]] {
                let options = LoadOptions {
                    dtype,
                    expand,
                    drafter,
                    ..LoadOptions::default()
                };
                let model = checkpoint.load(&options, &device).expect("it loads");
                let counted = checkpoint.weight_bytes(&options, &device);
                let what = format!("{name}: {options:?}");
                assert_eq!(counted.expect("it would load"), bytes(&model), "{what}");
                let has_drafter = [model.mtp.is_some(), model.dspark.is_some()];
                assert_eq!(has_drafter.contains(&true), drafter, "{what}");
            }
        }
    }
}

#[test]
fn the_bytes_of_a_layout_are_those_of_the_cache() {
    let device = Device::flex();
    let checkpoint = open("assets/ds4-tiny");
    let config = checkpoint.config();
    for layout in [CacheLayout::trunk(config), CacheLayout::mtp(config)] {
        for (rollback, dtype) in [
            (Rollback::Unlimited, FloatDType::F32),
            (Rollback::Bounded(3), FloatDType::BF16),
        ] {
            let options = |batch, capacity| CacheConfig {
                batch,
                capacity,
                rollback,
                dtype,
            };
            let mut cache = Cache::new(layout.clone(), options(2, 100), &device).expect("valid");
            let bytes = |capacity| layout.bytes(options(2, capacity));
            assert_eq!(bytes(100), Ok(cache.bytes()));
            drop(cache.begin(150).expect("it grows"));
            assert_eq!(cache.capacity(), 256);
            assert_eq!(bytes(256), Ok(cache.bytes()));
            let none = layout.bytes(options(0, 100));
            assert_eq!(none, Err(CacheError::Zero { argument: "batch" }));
        }
    }
    // A window of 64, its 16 spare slots and 3 more, a head of 64 channels. The
    // rotary table is not the cache's own.
    let options = CacheConfig {
        capacity: 100,
        rollback: Rollback::Bounded(3),
        ..CacheConfig::default()
    };
    let window = CacheLayout::mtp(config).bytes(options);
    assert_eq!(window, Ok(4 * 64 * (63 + 16 + 3)));
}

fn asset(name: &str) -> Vec<u8> {
    std::fs::read(root().join("assets/ds4-tiny").join(name)).expect("an asset")
}

/// The shipped checkpoint with this file of weights.
fn with_weights(file: &[u8]) -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for (name, bytes) in [
        ("config.json", &asset("config.json")[..]),
        ("model.safetensors", file),
    ] {
        std::fs::write(dir.path().join(name), bytes).expect("the directory is writable");
    }
    dir
}

#[test]
fn what_would_not_load_has_no_size() {
    let names = [
        ("layers.1.attn.wkv.scale", "layers.1.attn.wkv.scales"),
        // Vectors of 128 and of 256 elements.
        ("layers.0.attn.q_norm.weight", "layers.0.attn_norm.weight"),
        ("layers.0.attn_norm.weight", "layers.0.attn.q_norm.weight"),
        // Norms have no FP8.
        ("layers.2.attn.wkv.weight", "norm.weight"),
        ("norm.weight", "layers.2.attn.wkv.weight"),
    ];
    let file = asset("model.safetensors");
    let file = SafeTensors::deserialize(&file).expect("the asset is valid");
    let tensors = file.iter().map(|(name, tensor)| {
        let renamed = names.iter().find(|(from, _)| *from == name);
        (renamed.map_or(name, |(_, to)| *to).to_owned(), tensor)
    });
    let file = safetensors::serialize(tensors.collect::<Vec<_>>(), None);
    let dir = with_weights(&file.expect("valid tensors"));
    let checkpoint = Checkpoint::open(dir.path()).expect("the headers are valid");
    let (options, device) = (LoadOptions::default(), Device::flex());
    let counted = checkpoint.weight_bytes(&options, &device);
    let counted = counted.expect_err("a damaged checkpoint").to_string();
    for (from, to) in names {
        assert!(counted.contains(from) && counted.contains(to), "{counted}");
    }
    let loaded = checkpoint.load(&options, &device);
    assert_eq!(loaded.expect_err("damaged").to_string(), counted);
}

#[test]
fn contents_are_not_looked_at_where_only_sizes_are_wanted() {
    let mut file = asset("model.safetensors");
    let tensors = SafeTensors::deserialize(&file).expect("the asset is valid");
    let codes = tensors.tensor("layers.1.attn.wkv.weight");
    let codes = codes.expect("the asset has it").data().as_ptr();
    let at = codes as usize - file.as_ptr() as usize;
    // Not a number.
    file[at] = 0x7f;
    let dir = with_weights(&file);
    let checkpoint = Checkpoint::open(dir.path()).expect("the headers are valid");
    let (options, device) = (LoadOptions::default(), Device::flex());
    let counted = checkpoint.weight_bytes(&options, &device);
    let whole = open("assets/ds4-tiny").weight_bytes(&options, &device);
    assert_eq!(counted.expect("valid headers"), whole.expect("an asset"));
    let loaded = checkpoint.load(&options, &device);
    let error = loaded.expect_err("codes that are not numbers").to_string();
    assert!(error.contains("layers.1.attn.wkv.weight"), "{error}");
}

#[test]
fn random_packed_weights_have_the_formats_of_a_checkpoint_and_finite_logits() {
    let device = Device::flex();
    let cases = [
        ("assets/ds4-tiny", FloatDType::F32),
        ("assets/ds4-tiny", FloatDType::BF16),
        ("assets/ds4-tiny-dspark", FloatDType::BF16),
    ];
    for (name, dtype) in cases {
        let checkpoint = open(name);
        let options = LoadOptions {
            dtype,
            ..LoadOptions::default()
        };
        let expected = checkpoint.weight_bytes(&options, &device);
        let model = checkpoint
            .config()
            .init_packed(dtype, Activations::Exact, &device);
        assert_eq!(
            bytes(&model),
            expected.expect("an asset"),
            "{name}, {dtype:?}"
        );
        let layer = &model.layers[1];
        assert!(matches!(layer.moe.gate_up.values, StackValues::Fp4(_)));
        assert!(matches!(
            layer.moe.shared.gate_up.values,
            StackValues::Fp8(_)
        ));
        assert!(matches!(
            layer.attention.output_a.values,
            StackValues::Fp8(_)
        ));

        let mut cache = model.new_cache(CacheConfig::default()).expect("defaults");
        let ids = TensorData::new((1..70).collect::<Vec<i32>>(), [1, 69]);
        let logits = model.forward(Tensor::from_data(ids, &device), &mut cache);
        let logits = values(logits.expect("it fits the context"));
        let mean_square = logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32;
        // The weights keep the size of what they multiply, and the output norm's is 1.
        assert!(
            (0.5..2.0).contains(&mean_square),
            "{dtype:?}: {mean_square}"
        );
    }
}
