use serde_json::{Value, json};

use super::*;

#[test]
fn all_missing_keys_are_named_in_one_sorted_error() {
    let (missing, contradictory) = problems(&json!({}));
    let expected = [
        "compress_ratios or layer_types",
        "head_dim",
        "hidden_size",
        "index_topk",
        "model_type",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_attention_heads",
        "num_hidden_layers",
        "o_groups",
        "o_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim or partial_rotary_factor",
        "rms_norm_eps",
        "rope_scaling or rope_parameters.compress",
        "routed_scaling_factor",
        "sliding_window",
        "vocab_size",
    ];
    assert_eq!(missing, expected);
    assert_eq!(contradictory, Vec::<String>::new());
}

#[test]
fn a_null_counts_as_missing() {
    // Also of a key that may be left out: null may mean something else than the released value.
    for key in ["head_dim", "swiglu_limit", "hc_mult"] {
        let (missing, contradictory) = problems(&with(released(), json!({ (key): null })));
        assert_eq!(missing, [key]);
        assert_eq!(contradictory, Vec::<String>::new());
    }
}

#[test]
fn parts_of_the_scaling_and_rates_are_named_when_missing() {
    let config = with(
        released(),
        json!({"rope_scaling": {"type": "yarn", "factor": 4}}),
    );
    let (missing, contradictory) = problems(&config);
    let key = "original_max_position_embeddings";
    let expected = [format!(
        "rope_scaling.{key} or rope_parameters.compress.{key}"
    )];
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
