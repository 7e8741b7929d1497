//! Configurations as other tools write them, and keys that they leave out.

use serde_json::{Value, json};

use super::*;

/// A configuration of V4-Flash's constants.
fn constants() -> Value {
    with(
        released(),
        json!({
            "compress_rope_theta": 160000,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "max_position_embeddings": 1048576,
            "num_hash_layers": 3,
        }),
    )
}

#[test]
fn what_is_the_same_in_every_release_may_be_left_out() {
    let whole = constants();
    let expected = parse(&whole);
    let keys = [
        "bos_token_id",
        "compress_rope_theta",
        "eos_token_id",
        "hc_eps",
        "hc_mult",
        "hc_sinkhorn_iters",
        "index_head_dim",
        "index_n_heads",
        "max_position_embeddings",
        "n_shared_experts",
        "num_experts_per_tok",
        "num_hash_layers",
        "num_key_value_heads",
        "num_nextn_predict_layers",
        "rope_theta",
        "scoring_func",
        "swiglu_limit",
        "topk_method",
        "norm_topk_prob",
        "tie_word_embeddings",
    ];
    for key in keys {
        assert_eq!(parse(&without(whole.clone(), &[key])), expected, "{key}");
    }
    assert_eq!(parse(&without(whole.clone(), &keys)), expected);
    let mut bare = whole;
    let scaling = bare["rope_scaling"].as_object_mut().unwrap();
    assert!(scaling.remove("beta_fast").is_some() && scaling.remove("beta_slow").is_some());
    assert_eq!(parse(&bare), expected);
}

#[test]
fn the_scaling_is_read_under_either_name_flat_or_for_two_kinds_of_layers() {
    let expected = parse(&released());
    let yarn = released()["rope_scaling"].clone();
    let nested = |theta: bool| {
        let (mut main, mut compress) = (json!({"rope_type": "default"}), yarn.clone());
        if theta {
            main["rope_theta"] = json!(10000);
            compress["rope_theta"] = json!(40000);
        }
        json!({"main": main, "compress": compress})
    };
    let flat = with(
        yarn.clone(),
        json!({"rope_type": "yarn", "rope_theta": 10000}),
    );
    for (name, holder) in [
        ("rope_scaling", yarn.clone()),
        ("rope_scaling", nested(false)),
        ("rope_scaling", nested(true)),
        ("rope_parameters", yarn.clone()),
        ("rope_parameters", flat),
        ("rope_parameters", nested(true)),
    ] {
        let config = without(released(), &["rope_scaling"]);
        let config = with(config, json!({ (name): holder }));
        assert_eq!(parse(&config), expected, "{config}");
    }
    // Bases that only the objects have, and none that contradicts them.
    let config = without(
        released(),
        &["rope_scaling", "rope_theta", "compress_rope_theta"],
    );
    for name in ["rope_scaling", "rope_parameters"] {
        let config = with(config.clone(), json!({ (name): nested(true) }));
        assert_eq!(parse(&config), expected, "{config}");
    }
    let other = json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5000}});
    assert_contradictions(
        with(released(), other),
        &["rope_parameters.rope_theta is 5000"],
    );
}

#[test]
fn keys_of_other_frameworks_do_not_matter() {
    let keys = json!({
        "torch_dtype": "float16",
        "expert_dtype": "fp8",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV4Config"},
        "quantization_config": {"quant_method": "compressed-tensors"},
        "vision_n_layers": 32,
        "vision_dim": 1024,
        "image_token_id": 128815,
        "n_group": 8,
        "topk_group": 4,
        "ep_size": 1,
        "use_cache": false,
    });
    assert_eq!(parse(&with(released(), keys)), parse(&released()));
    let config = without(released(), &["torch_dtype"]);
    let config = with(config, json!({"dtype": "bfloat16"}));
    assert_eq!(parse(&config), parse(&released()));
    let config = without(released(), &["layer_types"]);
    assert_eq!(parse(&config), parse(&released()));
}
