use super::*;

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
