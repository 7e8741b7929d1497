//! Everything that is wrong is reported at once.

use crate::checkpoint::{
    Checkpoint, CheckpointError, Dtype, InvalidReason, Loader, UnexpectedTensor, load_all,
};
use crate::config::ModelConfig;
use crate::repository;

use super::*;

#[test]
fn all_kinds_of_errors_come_in_one_sorted_report() {
    let tensors = [
        stored_f32("right", &[1], &[1.0]),
        stored_f32("z.wrong", &[2], &[1.0, 2.0]),
        stored_f32("a.wrong", &[1, 2], &[1.0, 2.0]),
        stored("z.left", "U8", &[1], &[0]),
        stored("a.left", "BF16", &[2], &[0; 4]),
        stored("typed", "U8", &[1], &[0]),
        stored("nan.weight", "F8_E4M3", &[1, 3], &[0, 0x7f, 0xff]),
        stored("nan.scale", "F8_E8M0", &[1, 1], &[255]),
    ];
    let errors = report(&tensors, |loader| {
        let right = loader.dense("right", &[1]);
        let z = loader.dense("z.wrong", &[3]);
        let a = loader.dense("a.wrong", &[2, 1]);
        let gone = loader.linear("z.gone", 4, 2);
        let ids = loader.ids("a.gone", &[5], 9);
        let typed = loader.dense("typed", &[1]);
        let nan = loader.linear("nan", 1, 3);
        Some((right?, z?, a?, gone?, ids?, typed?, nan?))
    });
    assert_eq!(
        errors.missing,
        [missing("a.gone", &[5]), missing("z.gone.weight", &[4, 2])]
    );
    assert_eq!(
        errors.unexpected,
        [
            UnexpectedTensor {
                name: "a.left".into(),
                shape: vec![2],
                dtype: Dtype::BF16
            },
            UnexpectedTensor {
                name: "z.left".into(),
                shape: vec![1],
                dtype: Dtype::U8
            },
        ]
    );
    assert_eq!(
        errors.mis_shaped,
        [
            mis_shaped("a.wrong", &[2, 1], &[1, 2]),
            mis_shaped("z.wrong", &[3], &[2])
        ]
    );
    assert_eq!(
        errors.invalid,
        [
            invalid(
                "nan.scale",
                InvalidReason::NonFiniteScales { count: 1, first: 0 }
            ),
            invalid("nan.weight", InvalidReason::NanCodes { count: 2, first: 1 }),
            invalid(
                "typed",
                InvalidReason::Dtype {
                    actual: Dtype::U8,
                    expected: "BF16, F16 or F32"
                }
            ),
        ]
    );
    let text = errors.to_string();
    for part in [
        "missing (2):\n  a.gone [5]\n  z.gone.weight [4, 2]",
        "unexpected (2):\n  a.left BF16 [2]\n  z.left U8 [1]",
        "mis-shaped (2):\n  a.wrong is [1, 2], expected [2, 1]\n  z.wrong is [2], expected [3]",
        "nan.weight has 2 NaN codes, the first at element 1",
        "typed has dtype U8, expected BF16, F16 or F32",
    ] {
        assert!(text.contains(part), "`{part}` not in {text}");
    }
}

#[test]
fn where_only_the_drafter_is_missing_the_message_says_what_does_without() {
    let hint = "`--drafter none`";
    for (names, has_hint) in [
        (&["mtp.0.norm", "mtp.2.ffn.gate"][..], true),
        (&["mtp.0.norm", "norm"], false),
    ] {
        let errors = report(&[], |loader| {
            load_all(names.iter().map(|name| loader.dense(name, &[1])))
        });
        let text = errors.to_string();
        assert_eq!(text.contains(hint), has_hint, "{text}");
    }
}

#[test]
fn layers_of_a_drafter_that_the_configuration_does_not_tell_are_counted() {
    let released = repository::path("assets/ds4-tiny-dspark");
    let text = std::fs::read_to_string(released.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let told = ModelConfig::from_json_str(&text).unwrap();
    let entries = config["compress_ratios"].as_array_mut().unwrap();
    entries.truncate(told.layers.len());
    config.as_object_mut().unwrap().remove("n_mtp_layers");
    let error = ModelConfig::from_json_str(&config.to_string()).unwrap_err();
    assert!(error.to_string().contains("n_mtp_layers"), "{error}");

    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    write("config.json", config.to_string().as_bytes());
    std::fs::copy(
        released.join("model.safetensors"),
        dir.path().join("model.safetensors"),
    )
    .unwrap();
    assert_eq!(Checkpoint::open(dir.path()).unwrap().config, told);
    // There is nothing to draft with.
    write("model.safetensors", &safetensors(&[]));
    assert_eq!(Checkpoint::open(dir.path()).unwrap().config.dspark, None);
}

#[test]
fn long_lists_are_shortened_in_the_message_only() {
    let errors = report(&[], |loader| {
        load_all((0..173).map(|i| loader.dense(&format!("t{i:03}"), &[1])))
    });
    assert_eq!(errors.missing.len(), 173);
    let text = errors.to_string();
    assert!(text.contains("missing (173):"), "{text}");
    assert!(
        text.contains("t019 [1]") && !text.contains("t020"),
        "{text}"
    );
    assert!(text.ends_with("and 153 more"), "{text}");
}

#[test]
fn an_expert_of_another_format_is_named() {
    let mut tensors = Vec::new();
    for expert in 0..4 {
        let name = format!("experts.{expert}.w2.weight");
        if expert == 2 {
            tensors.push(stored(&name, "BF16", &[1, 2], &[0; 4]));
        } else {
            tensors.push(stored_f32(&name, &[1, 2], &[0.0; 2]));
        }
    }
    let errors = report(&tensors, |loader| loader.experts_down("experts", 4, 1, 2));
    let reason = InvalidReason::MixedFormats {
        actual: "BF16",
        common: "F32",
    };
    assert_eq!(errors.invalid, [invalid("experts.2.w2.weight", reason)]);
}

#[test]
fn gate_and_up_of_different_formats_are_named() {
    let tensors = [
        stored("shared.w1.weight", "BF16", &[1, 2], &[0; 4]),
        stored_f32("shared.w3.weight", &[1, 2], &[0.0; 2]),
    ];
    let errors = report(&tensors, |loader| loader.expert_gate_up("shared", 1, 2));
    let reason = InvalidReason::MixedFormats {
        actual: "BF16",
        common: "F32",
    };
    assert_eq!(errors.invalid, [invalid("shared.w1.weight", reason)]);
}

#[test]
fn every_missing_expert_is_named() {
    let tensors = [
        stored_f32("experts.0.w1.weight", &[1, 1], &[1.0]),
        stored_f32("experts.1.w3.weight", &[1, 1], &[1.0]),
    ];
    let errors = report(&tensors, |loader| {
        loader.experts_gate_up("experts", 2, 1, 1)
    });
    assert_eq!(
        errors.missing,
        [
            missing("experts.0.w3.weight", &[1, 1]),
            missing("experts.1.w1.weight", &[1, 1])
        ]
    );
    assert_eq!(errors.unexpected, []);
}

#[test]
fn of_very_many_experts_the_first_are_named_and_the_others_counted() {
    let experts = 1 << 40;
    let tensors = [
        stored_f32("experts.1.w1.weight", &[1, 1], &[1.0]),
        stored_f32("experts.1.w3.weight", &[1, 1], &[1.0]),
        stored_f32("experts.500000.w3.weight", &[1, 1], &[1.0]),
        stored_f32("experts.1099511627776.w1.weight", &[1, 1], &[1.0]),
    ];
    let errors = report(&tensors, |loader| {
        loader.experts_gate_up("experts", experts, 1, 1)
    });
    // 20 experts of which there is nothing, and one of which there is a half.
    let named = (0..22).filter(|expert| *expert != 1);
    let named = named.take(20).flat_map(|expert| {
        ["w1", "w3"].map(|part| missing(&format!("experts.{expert}.{part}.weight"), &[1, 1]))
    });
    let half = missing("experts.500000.w1.weight", &[1, 1]);
    let mut expected: Vec<MissingTensor> = named.chain([half]).collect();
    expected.sort();
    assert_eq!(errors.missing, expected);
    assert_eq!(errors.more_missing, 2 * (experts - 22));
    let unexpected = errors.unexpected.iter().map(|tensor| &*tensor.name);
    let beyond = ["experts.1099511627776.w1.weight"];
    assert_eq!(unexpected.collect::<Vec<_>>(), beyond);

    let text = errors.to_string();
    let count = 2 * experts - 3;
    assert!(text.contains(&format!("missing ({count}):")), "{text}");
    let more = format!("\n  and {} more\n", count - 20);
    assert!(text.contains(&more), "{text}");
}

#[cfg(feature = "flex")]
#[test]
fn a_model_that_no_memory_holds_is_refused() {
    let checkpoint = checkpoint_of(&[]);
    let device = burn::tensor::Device::flex();
    checkpoint.check_memory(1, &device).unwrap();
    let error = checkpoint.check_memory(usize::MAX, &device).unwrap_err();
    assert!(
        matches!(
            error,
            CheckpointError::OutOfMemory {
                bytes: usize::MAX,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn names_in_messages_cannot_control_a_terminal() {
    let tensors = [stored_f32(r"a\u001b[31m\nb", &[1], &[1.0])];
    let errors = report(&tensors, |loader| loader.dense("gone", &[1]));
    assert_eq!(errors.unexpected[0].name, "a\u{1b}[31m\nb");
    let text = errors.to_string();
    let line = r"a\u{1b}[31m\nb F32 [1]";
    assert!(
        text.ends_with(&format!("unexpected (1):\n  {line}")),
        "{text}"
    );
}

#[test]
fn copies_and_skipped_prefixes_are_not_unexpected() {
    let checkpoint = checkpoint_of(&[
        stored_f32("norm", &[1], &[1.0]),
        stored_f32("mtp.0.emb.tok_emb.weight", &[1], &[1.0]),
        stored_f32("mtp.0.head.weight", &[1], &[1.0]),
        stored_f32("mtp.0.norm.weight", &[1], &[1.0]),
    ]);
    let mut loader = Loader::new(&checkpoint);
    let norm = loader.dense("norm", &[1]);
    let Err(CheckpointError::Weights(errors)) = loader.finish(norm) else {
        panic!("loaded");
    };
    assert_eq!(errors.unexpected.len(), 1);
    assert_eq!(errors.unexpected[0].name, "mtp.0.norm.weight");

    let mut loader = Loader::new(&checkpoint);
    loader.skip_prefix("mtp.");
    assert!(loader.contains("norm") && !loader.contains("norm.weight"));
    let norm = loader.dense("norm", &[1]);
    loader.finish(norm).unwrap();
}

#[test]
fn tensors_without_elements_are_refused() {
    // A side of zero lets the other side be anything, also more than can be counted with.
    let tensors = [
        stored("w.weight", "F32", &[usize::MAX, 0], &[]),
        stored("experts.0.w1.weight", "F32", &[usize::MAX, 0], &[]),
        stored("experts.0.w3.weight", "F32", &[usize::MAX, 0], &[]),
    ];
    let errors = report(&tensors, |loader| {
        let dense = loader.dense("w.weight", &[usize::MAX, 0]);
        let linear = loader.linear("w", usize::MAX, 0);
        let experts = loader.experts_gate_up("experts", 1, usize::MAX, 0);
        Some((dense?, linear?, experts?))
    });
    assert_eq!(
        errors.invalid,
        [
            invalid("experts.0.w1.weight", InvalidReason::Empty),
            invalid("experts.0.w3.weight", InvalidReason::Empty),
            invalid("w.weight", InvalidReason::Empty),
        ]
    );
}
