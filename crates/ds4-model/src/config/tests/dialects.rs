use serde_json::json;

use super::*;

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
        ..ModelConfig::new()
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
        ..ModelConfig::new()
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
