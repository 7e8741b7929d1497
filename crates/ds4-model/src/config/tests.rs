use serde_json::{Value, json};

use super::{AttentionKind, ConfigErrorKind, ModelConfig, YarnConfig};
use crate::repository::path;

const WINDOW: AttentionKind = AttentionKind::Window;

fn sparse(ratio: usize) -> AttentionKind {
    AttentionKind::CompressedSparse { ratio }
}

fn heavy(ratio: usize) -> AttentionKind {
    AttentionKind::HeavilyCompressed { ratio }
}

fn released() -> Value {
    let text = std::fs::read_to_string(path("assets/ds4-tiny/config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn transformers() -> Value {
    let text = std::fs::read_to_string(path("tests/fixtures/layer-goldens/config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn with(mut config: Value, changes: Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn without(mut config: Value, keys: &[&str]) -> Value {
    for key in keys {
        assert!(
            config.as_object_mut().unwrap().remove(*key).is_some(),
            "{key}"
        );
    }
    config
}

fn parse(config: &Value) -> ModelConfig {
    ModelConfig::from_json_str(&config.to_string()).unwrap()
}

fn problems(config: &Value) -> (Vec<String>, Vec<String>) {
    let error = ModelConfig::from_json_str(&config.to_string()).unwrap_err();
    match error.kind {
        ConfigErrorKind::Invalid {
            missing,
            contradictory,
        } => (missing, contradictory),
        other => panic!("{other}"),
    }
}

/// Nothing is missing, and the contradictions name all of `parts`.
#[track_caller]
fn assert_contradictions(config: Value, parts: &[&str]) {
    let (missing, contradictory) = problems(&config);
    assert_eq!(missing, Vec::<String>::new());
    let all = contradictory.join("\n");
    for part in parts {
        assert!(
            all.contains(part),
            "`{part}` not in {contradictory:?} of {config}"
        );
    }
}

#[test]
fn the_released_dialect_is_read() {
    let config = ModelConfig::from_json_file(&path("assets/ds4-tiny/config.json")).unwrap();
    let expected = ModelConfig {
        vocab_size: 1024,
        hidden_size: 256,
        layers: vec![
            WINDOW,
            sparse(4),
            heavy(16),
            sparse(4),
            heavy(16),
            sparse(4),
        ],
        num_mtp_layers: 1,
        dspark: None,
        num_attention_heads: 8,
        head_dim: 64,
        rope_head_dim: 16,
        q_lora_rank: 128,
        o_groups: 2,
        o_lora_rank: 64,
        sliding_window: 64,
        index_n_heads: 4,
        index_head_dim: 32,
        index_topk: 32,
        n_routed_experts: 32,
        num_experts_per_tok: 6,
        n_shared_experts: 1,
        moe_intermediate_size: 64,
        num_hash_layers: 2,
        routed_scaling_factor: 1.5,
        swiglu_limit: Some(10.0),
        hc_mult: 4,
        hc_sinkhorn_iters: 20,
        hc_eps: 1e-6,
        rms_norm_eps: 1e-6,
        rope_theta: 10000.0,
        compress_rope_theta: 40000.0,
        yarn: Some(YarnConfig {
            factor: 4.0,
            original_max_position_embeddings: 1024,
            beta_fast: 32.0,
            beta_slow: 1.0,
        }),
        max_position_embeddings: 4096,
        bos_token_id: 0,
        eos_token_id: 1,
    };
    assert_eq!(config, expected);
}

#[test]
fn the_transformers_dialect_is_read() {
    let expected = ModelConfig {
        vocab_size: 128,
        hidden_size: 64,
        layers: vec![WINDOW, sparse(4), heavy(8), sparse(4)],
        num_mtp_layers: 1,
        dspark: None,
        num_attention_heads: 4,
        head_dim: 32,
        rope_head_dim: 8,
        q_lora_rank: 24,
        o_groups: 2,
        o_lora_rank: 16,
        sliding_window: 8,
        index_n_heads: 4,
        index_head_dim: 16,
        index_topk: 3,
        n_routed_experts: 8,
        num_experts_per_tok: 3,
        n_shared_experts: 1,
        moe_intermediate_size: 32,
        num_hash_layers: 2,
        routed_scaling_factor: 1.5,
        swiglu_limit: Some(10.0),
        hc_mult: 4,
        hc_sinkhorn_iters: 20,
        hc_eps: 1e-6,
        rms_norm_eps: 1e-6,
        rope_theta: 10000.0,
        compress_rope_theta: 160000.0,
        yarn: Some(YarnConfig {
            factor: 16.0,
            original_max_position_embeddings: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
        }),
        max_position_embeddings: 4096,
        bos_token_id: 0,
        eos_token_id: 1,
    };
    assert_eq!(parse(&transformers()), expected);

    // Without the released names that the file also holds, nothing changes.
    let only = without(
        transformers(),
        &[
            "qk_rope_head_dim",
            "rope_theta",
            "compress_rope_theta",
            "partial_rotary_factor",
        ],
    );
    let only = with(only, json!({"partial_rotary_factor": 0.25}));
    assert_eq!(parse(&only), expected);
}

#[test]
fn the_defaults_are_a_valid_model() {
    ModelConfig::new().validate().unwrap();
}

#[test]
fn without_layer_types_the_ratio_decides() {
    let config = without(released(), &["layer_types", "compress_rate_hca"]);
    let config = with(config, json!({"compress_ratios": [128, 0, 4, 8, 2, 4, 0]}));
    let layers = parse(&config).layers;
    assert_eq!(
        layers,
        vec![heavy(128), WINDOW, sparse(4), heavy(8), heavy(2), sparse(4)]
    );
}

#[test]
fn the_entry_of_the_mtp_layer_may_be_left_out() {
    let config = with(released(), json!({"compress_ratios": [0, 4, 16, 4, 16, 4]}));
    assert_eq!(parse(&config), parse(&released()));
}

#[test]
fn unknown_keys_are_ignored() {
    let config = with(
        released(),
        json!({"hidden_dropout": 0.5, "quantization_config": null}),
    );
    assert_eq!(parse(&config), parse(&released()));
}

#[test]
fn a_swiglu_limit_of_zero_or_less_is_no_clamp() {
    for limit in [json!(0), json!(0.0), json!(-1.0)] {
        let config = with(released(), json!({"swiglu_limit": limit}));
        assert_eq!(parse(&config).swiglu_limit, None);
    }
}

#[test]
fn a_rope_scaling_of_null_or_default_is_no_yarn_but_an_absent_one_is_missing() {
    let config = with(released(), json!({"rope_scaling": null}));
    assert_eq!(parse(&config).yarn, None);
    let config = with(
        released(),
        json!({"rope_scaling": {"rope_type": "default"}}),
    );
    assert_eq!(parse(&config).yarn, None);
    let (missing, _) = problems(&without(released(), &["rope_scaling"]));
    assert_eq!(missing, ["rope_scaling or rope_parameters.compress"]);
}

#[test]
fn the_first_of_a_list_of_end_tokens_is_the_end_token() {
    for (listed, first) in [(json!([7]), 7), (json!([1, 7]), 1)] {
        let config = with(released(), json!({"eos_token_id": listed}));
        assert_eq!(parse(&config).eos_token_id, first);
    }
    assert_contradictions(
        with(released(), json!({"eos_token_id": []})),
        &["eos_token_id", "[]"],
    );
}

#[test]
fn all_missing_keys_are_named_in_one_sorted_error() {
    let (missing, contradictory) = problems(&json!({}));
    let expected = [
        "bos_token_id",
        "compress_ratios or layer_types",
        "compress_rope_theta or rope_parameters.compress.rope_theta",
        "eos_token_id",
        "hc_eps",
        "hc_mult",
        "hc_sinkhorn_iters",
        "head_dim",
        "hidden_size",
        "index_head_dim",
        "index_n_heads",
        "index_topk",
        "max_position_embeddings",
        "model_type",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_attention_heads",
        "num_experts_per_tok",
        "num_hash_layers or mlp_layer_types",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_nextn_predict_layers",
        "o_groups",
        "o_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim or partial_rotary_factor",
        "rms_norm_eps",
        "rope_scaling or rope_parameters.compress",
        "rope_theta or rope_parameters.main.rope_theta",
        "routed_scaling_factor",
        "scoring_func",
        "sliding_window",
        "swiglu_limit",
        "vocab_size",
    ];
    assert_eq!(missing, expected);
    assert_eq!(contradictory, Vec::<String>::new());
}

#[test]
fn a_null_counts_as_missing() {
    let (missing, contradictory) = problems(&with(released(), json!({"head_dim": null})));
    assert_eq!(missing, ["head_dim"]);
    assert_eq!(contradictory, Vec::<String>::new());
}

#[test]
fn parts_of_the_scaling_and_rates_are_named_when_missing() {
    let config = with(
        released(),
        json!({"rope_scaling": {"type": "yarn", "factor": 4}}),
    );
    let (missing, contradictory) = problems(&config);
    let expected = ["beta_fast", "beta_slow", "original_max_position_embeddings"]
        .map(|key| format!("rope_scaling.{key} or rope_parameters.compress.{key}"));
    assert_eq!(missing, expected);
    assert_eq!(contradictory, Vec::<String>::new());

    let (missing, _) = problems(&without(transformers(), &["compress_rates"]));
    let expected = [
        "compress_rates.compressed_sparse_attention or compress_rate_csa",
        "compress_rates.heavily_compressed_attention or compress_rate_hca",
    ];
    assert_eq!(missing, expected);
}

#[test]
fn missing_and_contradictory_keys_come_in_one_error() {
    let config = without(released(), &["vocab_size", "o_lora_rank"]);
    let config = with(
        config,
        json!({"num_key_value_heads": 8, "scoring_func": "softmax"}),
    );
    let (missing, contradictory) = problems(&config);
    assert_eq!(missing, ["o_lora_rank", "vocab_size"]);
    assert_eq!(
        contradictory,
        [
            "num_key_value_heads is 8, only 1 is supported",
            "scoring_func is \"softmax\", only \"sqrtsoftplus\" is supported"
        ]
    );
    let text = ModelConfig::from_json_str(&config.to_string())
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("missing: o_lora_rank, vocab_size. contradictory: num_key"),
        "{text}"
    );
}

#[test]
fn contradictory_keys_are_named() {
    let cases: Vec<(Value, &[&str])> = vec![
        (
            json!({"num_hidden_layers": 7}),
            &["layer_types has 6 entries", "7"],
        ),
        (json!({"compress_rate_hca": 32}), &["32", "16"]),
        (
            json!({"compress_ratios": [0, 4, 16, 4, 16, 4, 4]}),
            &["compress_ratios[6] is 4", "a layer that drafts"],
        ),
        (
            json!({"compress_ratios": [0, 4, 16, 16, 16, 4, 0]}),
            &[
                "compress_ratios[3] is 16",
                "layer_types[3]",
                "compressed_sparse_attention",
            ],
        ),
        (
            json!({"num_nextn_predict_layers": 3, "compress_ratios": [0, 4, 16, 4, 16, 4]}),
            &["num_nextn_predict_layers", "3", "at most one"],
        ),
        (
            json!({"o_groups": 3}),
            &["num_attention_heads 8", "o_groups 3"],
        ),
        (
            json!({"qk_rope_head_dim": 15}),
            &["qk_rope_head_dim", "15", "pairs"],
        ),
        (
            json!({"num_experts_per_tok": 33}),
            &["num_experts_per_tok 33", "n_routed_experts 32"],
        ),
        (json!({"num_hash_layers": 7}), &["num_hash_layers 7", "6"]),
        (
            json!({"scoring_func": "sigmoid"}),
            &["scoring_func", "sigmoid"],
        ),
        (json!({"topk_method": "greedy"}), &["topk_method", "greedy"]),
        (
            json!({"norm_topk_prob": false}),
            &["norm_topk_prob", "false"],
        ),
        (json!({"hidden_act": "gelu"}), &["hidden_act", "gelu"]),
        (
            json!({"tie_word_embeddings": true}),
            &["tie_word_embeddings"],
        ),
        (json!({"attention_bias": true}), &["attention_bias"]),
        (
            json!({"eos_token_id": 1024}),
            &["eos_token_id 1024", "vocab_size 1024"],
        ),
        (json!({"hidden_size": -256}), &["hidden_size is -256"]),
        (json!({"hidden_size": 256.5}), &["hidden_size is 256.5"]),
        (json!({"hidden_size": "256"}), &["hidden_size is \"256\""]),
        (
            json!({"hidden_size": 1u64 << 40}),
            &["hidden_size is 1099511627776"],
        ),
        (json!({"head_dim": 0}), &["head_dim is 0"]),
        (json!({"rope_theta": 0.5}), &["rope_theta is 0.5"]),
        (json!({"hc_eps": -1e-6}), &["hc_eps"]),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2}}),
            &["linear", "yarn"],
        ),
        (
            json!({"layer_types": "sliding_attention"}),
            &["layer_types", "a list of strings"],
        ),
    ];
    for (changes, parts) in cases {
        assert_contradictions(with(released(), changes), parts);
    }
}

#[test]
fn contradictory_transformers_keys_are_named() {
    let rope = |changes: Value| {
        let mut rope = transformers()["rope_parameters"].clone();
        for (key, value) in changes.as_object().unwrap() {
            rope["compress"][key] = value.clone();
        }
        json!({ "rope_parameters": rope })
    };
    let cases: Vec<(Value, &[&str])> = vec![
        (
            json!({"mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"]}),
            &["mlp_layer_types[2]", "hash_moe"],
        ),
        (
            json!({"mlp_layer_types": ["hash_moe", "dense", "moe", "moe"]}),
            &["mlp_layer_types[1]", "dense"],
        ),
        (
            json!({"mlp_layer_types": ["hash_moe", "moe", "moe"]}),
            &["mlp_layer_types has 3 entries", "4"],
        ),
        (
            json!({"num_hash_layers": 3}),
            &["num_hash_layers is 3", "2"],
        ),
        (
            json!({"qk_rope_head_dim": 16}),
            &["qk_rope_head_dim is 16", "is 8"],
        ),
        (
            json!({"partial_rotary_factor": 0.5}),
            &["partial_rotary_factor is 0.5", "0.25"],
        ),
        (
            json!({"compress_rate_hca": 16}),
            &["compress_rates.heavily_compressed_attention is 8", "16"],
        ),
        (
            json!({"rope_theta": 5000.0}),
            &["rope_theta is 5000.0", "10000.0"],
        ),
        (
            rope(json!({"attention_factor": 1.2})),
            &["attention_factor is 1.2"],
        ),
        (rope(json!({"rope_theta": 1e5})), &["160000.0", "100000.0"]),
    ];
    for (changes, parts) in cases {
        assert_contradictions(with(transformers(), changes), parts);
    }
}

#[test]
fn an_unknown_layer_type_is_named() {
    let types = json!([
        "sliding_attention",
        "linear_attention",
        "heavily_compressed_attention",
        "sliding_attention"
    ]);
    let (_, contradictory) = problems(&with(transformers(), json!({"layer_types": types})));
    assert_eq!(
        contradictory,
        ["layer_types[1] is unknown: `linear_attention`"]
    );
}

#[test]
fn sizes_whose_product_overflows_are_refused() {
    let huge = json!({
        "n_routed_experts": 1 << 20,
        "moe_intermediate_size": 1 << 24,
        "hidden_size": 1 << 24,
    });
    let (_, contradictory) = problems(&with(released(), huge));
    assert_eq!(contradictory.len(), 1, "{contradictory:?}");
    assert!(contradictory[0].contains("n_routed_experts, moe_intermediate_size, hidden_size"));
}

#[test]
fn another_architecture_is_refused_by_name() {
    let config = with(released(), json!({"model_type": "deepseek_v3"}));
    let error = ModelConfig::from_json_str(&config.to_string()).unwrap_err();
    assert!(matches!(
        &error.kind,
        ConfigErrorKind::UnsupportedArchitecture { model_type } if model_type == "deepseek_v3"
    ));
    assert!(error.to_string().contains("`deepseek_v3`"), "{error}");
}

/// A configuration with a drafter.
fn with_dspark(changes: Value) -> Value {
    let config = released();
    let mut ratios = config["compress_ratios"].as_array().unwrap().clone();
    ratios.extend([json!(0), json!(0)]);
    let keys = json!({
        "compress_ratios": ratios,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [3, 4, 5],
        "dspark_noise_token_id": 2,
        "dspark_markov_rank": 64,
    });
    with(with(config, keys), changes)
}

#[test]
fn the_dspark_drafter_takes_the_place_of_the_mtp_layer() {
    for stated in [json!({}), json!({"n_mtp_layers": 3})] {
        let config = ModelConfig::from_json_str(&with_dspark(stated).to_string()).unwrap();
        let dspark = config.dspark.unwrap();
        assert_eq!(config.num_mtp_layers, 0);
        assert_eq!(config.layers.len(), 6);
        assert_eq!(dspark.layers, 3);
        assert_eq!((dspark.block_size, dspark.markov_rank), (5, 64));
        assert_eq!(dspark.target_layers, [3, 4, 5]);
        assert_eq!(dspark.noise_token_id, 2);
    }
}

#[test]
fn the_drafters_of_the_releases_are_read() {
    // V4-Flash-0731 and V4-Pro-0813: layers, width, rank and target layers.
    for (layers, hidden, rank, targets) in [(43, 4096, 256, 40..43), (61, 7168, 512, 58..61)] {
        let ratio = |layer| match layer {
            0 | 1 => 0,
            layer if layer < layers => [4, 128][layer % 2],
            _ => 0,
        };
        let ratios: Vec<usize> = (0..layers + 3).map(ratio).collect();
        let targets: Vec<usize> = targets.collect();
        let keys = json!({
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "vocab_size": 129280,
            "compress_ratios": ratios,
            "dspark_target_layer_ids": targets,
            "dspark_noise_token_id": 128799,
            "dspark_markov_rank": rank,
        });
        let config = without(with_dspark(keys), &["layer_types", "compress_rate_hca"]);
        let config = parse(&config);
        let dspark = config.dspark.unwrap();
        assert_eq!(config.layers.len(), layers);
        assert_eq!((dspark.layers, dspark.block_size), (3, 5));
        assert_eq!(dspark.target_layers, targets);
    }
}

#[test]
fn keys_of_a_drafter_that_cannot_be_are_named() {
    for (changes, named) in [
        (
            json!({"dspark_n_routed_experts": 128}),
            "dspark_n_routed_experts",
        ),
        (json!({"n_mtp_layers": 2}), "layers of the DSpark drafter 2"),
        (json!({"dspark_block_size": 0}), "dspark_block_size is 0"),
        (json!({"dspark_block_size": 9}), "dspark_block_size is 9"),
        (json!({"dspark_block_size": null}), "dspark_block_size"),
        (
            json!({"dspark_markov_rank": -1}),
            "dspark_markov_rank is -1",
        ),
        (
            json!({"dspark_noise_token_id": 1024}),
            "dspark_noise_token_id 1024",
        ),
        (json!({"dspark_target_layer_ids": [4, 3]}), "[4, 3]"),
        (
            json!({"dspark_target_layer_ids": []}),
            "dspark_target_layer_ids is []",
        ),
        (json!({"dspark_target_layer_ids": [5, 6]}), "[5, 6]"),
    ] {
        let error = ModelConfig::from_json_str(&with_dspark(changes).to_string()).unwrap_err();
        assert!(error.to_string().contains(named), "{named}: {error}");
    }
    let alone = with(released(), json!({"dspark_markov_rank": 256}));
    let error = ModelConfig::from_json_str(&alone.to_string()).unwrap_err();
    assert!(error.to_string().contains("dspark_block_size"), "{error}");
}

#[test]
fn keys_of_a_drafter_with_null_are_not_there() {
    let nulls = json!({
        "dspark_block_size": null,
        "dspark_target_layer_ids": null,
        "dspark_noise_token_id": null,
        "dspark_markov_rank": null,
    });
    let config = ModelConfig::from_json_str(&with(released(), nulls).to_string()).unwrap();
    assert_eq!(
        config,
        ModelConfig::from_json_str(&released().to_string()).unwrap()
    );
}

#[test]
fn the_entry_of_a_drafter_that_was_taken_out_may_be_left() {
    let ratios = released()["compress_ratios"].clone();
    let count = released()["num_hidden_layers"].as_u64().unwrap() as usize;
    assert_eq!(ratios.as_array().unwrap().len(), count + 1);
    let without = json!({"num_nextn_predict_layers": 0});
    let config = ModelConfig::from_json_str(&with(released(), without.clone()).to_string());
    let config = config.unwrap();
    assert_eq!((config.layers.len(), config.num_mtp_layers), (count, 0));
    // One that is no window is not that of a drafter.
    let mut other = ratios;
    other[count] = json!(4);
    let other = with(with(released(), without), json!({"compress_ratios": other}));
    let (_, contradictory) = problems(&other);
    assert!(
        contradictory[0].contains("is 4, expected 0"),
        "{contradictory:?}"
    );
}

#[test]
fn the_first_of_several_ends_is_the_end() {
    let config = with(released(), json!({"eos_token_id": [5, 3]}));
    let config = ModelConfig::from_json_str(&config.to_string()).unwrap();
    assert_eq!(config.eos_token_id, 5);
    for bad in [json!([]), json!([5, "3"]), json!([[5]])] {
        let (_, contradictory) = problems(&with(released(), json!({"eos_token_id": bad})));
        assert!(
            contradictory[0].contains("eos_token_id"),
            "{contradictory:?}"
        );
    }
}

#[test]
fn text_that_is_no_json_object_is_refused() {
    for text in ["", "[]", "3", "{", "{\"vocab_size\": 1e999}", "\u{0}"] {
        let error = ModelConfig::from_json_str(text).unwrap_err();
        assert!(
            matches!(error.kind, ConfigErrorKind::Json(_)),
            "{text}: {error}"
        );
    }
}

#[test]
fn errors_of_a_file_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("config.json");
    let error = ModelConfig::from_json_file(&absent).unwrap_err();
    assert!(matches!(error.kind, ConfigErrorKind::Read(_)), "{error}");
    assert!(error.to_string().contains("config.json"), "{error}");
    std::fs::write(&absent, "{}").unwrap();
    let error = ModelConfig::from_json_file(&absent).unwrap_err();
    assert!(error.to_string().contains("config.json"), "{error}");
    assert_eq!(error.path.as_deref(), Some(absent.as_path()));
}

#[test]
fn values_in_messages_cannot_control_a_terminal() {
    let escape = "\u{1b}]0;\u{7f}\u{9b}\n";
    for changes in [
        json!({"model_type": escape}),
        json!({"scoring_func": escape}),
        json!({"layer_types": [escape]}),
        json!({"hidden_act": [escape]}),
        json!({"head_dim": escape}),
        json!({ (format!("dspark_{escape}")): 1 }),
    ] {
        let config = with(released(), changes);
        let error = ModelConfig::from_json_str(&config.to_string()).unwrap_err();
        let text = error.to_string();
        assert!(!text.contains(char::is_control), "{text:?}");
        assert!(text.contains(r"\u{9b}"), "{text}");
    }
}

#[test]
fn a_config_made_by_hand_is_checked() {
    type Change = fn(&mut ModelConfig);
    let cases: [(Change, &str); 13] = [
        (|config| config.layers.clear(), "num_hidden_layers"),
        (
            |config| config.layers[0] = heavy(0),
            "layer 0 compresses 0 tokens",
        ),
        (|config| config.num_mtp_layers = 2, "num_mtp_layers"),
        (|config| config.o_groups = 7, "o_groups 7"),
        (|config| config.o_groups = 0, "o_groups is 0"),
        (|config| config.rope_head_dim = 514, "head_dim 512"),
        (|config| config.index_head_dim = 32, "index_head_dim 32"),
        (
            |config| config.index_topk = 4097,
            "index_topk is 4097, expected 1 to 4096",
        ),
        (|config| config.hc_mult = usize::MAX, "hc_mult"),
        (|config| config.hc_eps = f64::NAN, "hc_eps is NaN"),
        (
            |config| config.swiglu_limit = Some(-1.0),
            "swiglu_limit is -1",
        ),
        (
            |config| config.rope_theta = f64::INFINITY,
            "rope_theta is inf",
        ),
        (
            |config| config.yarn.as_mut().unwrap().beta_slow = 40.0,
            "beta_fast 32",
        ),
    ];
    for (change, part) in cases {
        let mut config = ModelConfig::new();
        change(&mut config);
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains(part), "`{part}` not in {error}");
    }
}

#[test]
fn the_indexer_may_pick_as_many_rows_as_its_operator_takes() {
    let mut config = ModelConfig::new();
    config.index_topk = 4096;
    config.validate().unwrap();
}

#[test]
fn every_size_must_be_positive() {
    type Field = fn(&mut ModelConfig) -> &mut usize;
    let fields: [(&str, Field); 17] = [
        ("vocab_size", |config| &mut config.vocab_size),
        ("hidden_size", |config| &mut config.hidden_size),
        ("num_attention_heads", |config| {
            &mut config.num_attention_heads
        }),
        ("head_dim", |config| &mut config.head_dim),
        ("rope_head_dim", |config| &mut config.rope_head_dim),
        ("q_lora_rank", |config| &mut config.q_lora_rank),
        ("o_lora_rank", |config| &mut config.o_lora_rank),
        ("sliding_window", |config| &mut config.sliding_window),
        ("index_n_heads", |config| &mut config.index_n_heads),
        ("index_head_dim", |config| &mut config.index_head_dim),
        ("index_topk", |config| &mut config.index_topk),
        ("n_routed_experts", |config| &mut config.n_routed_experts),
        ("num_experts_per_tok", |config| {
            &mut config.num_experts_per_tok
        }),
        ("n_shared_experts", |config| &mut config.n_shared_experts),
        ("moe_intermediate_size", |config| {
            &mut config.moe_intermediate_size
        }),
        ("hc_sinkhorn_iters", |config| &mut config.hc_sinkhorn_iters),
        ("max_position_embeddings", |config| {
            &mut config.max_position_embeddings
        }),
    ];
    for (name, field) in fields {
        let mut config = ModelConfig::new();
        *field(&mut config) = 0;
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("is 0"), "{error}");
    }
}
