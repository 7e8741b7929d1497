use serde_json::json;

use super::*;
use crate::config::{CacheFormat, CandidateParams, DsparkParams, EngramParams, SharedRows};

/// The released values.
fn nested() -> Value {
    let text = r#"{
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41",
        "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
        "image_token_id": 129264,
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0", "expert_dtype": "fp4"
        },
        "text_config": {
            "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120,
            "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": 1,
            "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024,
            "o_groups": 8, "moe_intermediate_size": 2304, "n_routed_experts": 384,
            "n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc", "norm_topk_prob": true, "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0, "hidden_act": "silu", "rms_norm_eps": 1e-20,
            "sliding_window": 128, "compress_ratios":
                [0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1,
                1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
            "kv_source_layer_ids": [2, 8, 14, 20],
            "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
            "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048,
            "candidate_block_size": 8, "index_n_heads": 32, "index_head_dim": 128,
            "index_topk": 512, "rope_theta": 10000, "compress_rope_theta": 160000,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                "original_max_position_embeddings": 65536
            },
            "max_position_embeddings": 1048576, "hc_mult": 4, "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6, "engram_layer_ids": [1, 14],
            "engram_num_embeddings": [384006168, 384016682], "engram_max_ngram_size": 4,
            "engram_n_heads": 8, "engram_head_dim": 256, "engram_vocab_size": 16000000,
            "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092,
            "num_nextn_predict_layers": 3, "dspark_block_size": 5,
            "dspark_noise_token_id": 128799, "dspark_markov_rank": 256,
            "dspark_target_layer_ids": [37, 38, 39], "dspark_n_routed_experts": 128,
            "dspark_num_experts_per_tok": 3, "tie_word_embeddings": false, "attention_bias": false
        },
        "vision_config": {"model_type": "deepseek_v41_vision", "hidden_size": 1024}
    }"#;
    serde_json::from_str(text).unwrap()
}

/// The released configuration.
pub(crate) fn flash() -> ModelConfig {
    parse(&nested())
}

/// The same facts as the `inference` folder has them.
fn flat() -> Value {
    let mut config = nested()["text_config"].clone();
    let keys = config.as_object_mut().unwrap();
    let lacking = "model_type max_position_embeddings rope_scaling topk_method hidden_act \
                   num_key_value_heads tie_word_embeddings attention_bias";
    for key in lacking.split_whitespace() {
        keys.remove(key).unwrap();
    }
    let renamed = "hidden_size=dim num_hidden_layers=n_layers num_attention_heads=n_heads \
                   qk_rope_head_dim=rope_head_dim moe_intermediate_size=moe_inter_dim \
                   num_experts_per_tok=n_activated_experts scoring_func=score_func \
                   routed_scaling_factor=route_scale rms_norm_eps=norm_eps \
                   sliding_window=window_size kv_source_layer_ids=kv_source_layers \
                   index_source_layer_ids=index_source_layers \
                   candidate_source_layer_id=candidate_source_layer \
                   engram_pad_token_id=engram_pad_id num_nextn_predict_layers=n_mtp_layers \
                   dspark_num_experts_per_tok=dspark_n_activated_experts";
    for pair in renamed.split_whitespace() {
        let (nested, flat) = pair.split_once('=').unwrap();
        let value = keys.remove(nested).unwrap();
        keys.insert(flat.to_owned(), value);
    }
    let yarn = json!({
        "rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "original_seq_len": 65536,
        "gate_temp": 1.0,
    });
    with(config, yarn)
}

fn text(changes: Value) -> Value {
    let mut config = nested();
    config["text_config"] = with(config["text_config"].clone(), changes);
    config
}

fn shared(layer: usize, ratio: usize, rows_of: usize, picks_of: usize) -> AttentionKind {
    AttentionKind::Shared(SharedRows {
        layer,
        ratio,
        rows_of,
        picks_of,
    })
}

#[test]
fn the_released_values_say_what_each_layer_is_built_of() {
    let config = parse(&nested());
    assert_eq!(config.layers.len(), 40);
    for (layer, expected) in [
        (0, WINDOW),
        (1, WINDOW),
        (2, shared(2, 2, 2, 2)),
        (7, shared(7, 2, 2, 2)),
        (8, shared(8, 2, 8, 8)),
        (19, shared(19, 2, 14, 14)),
        (20, shared(20, 1, 20, 20)),
        (23, shared(23, 1, 20, 20)),
        (24, shared(24, 1, 20, 24)),
        (39, shared(39, 1, 20, 36)),
    ] {
        assert_eq!(config.layers[layer], expected, "layer {layer}");
    }
    let makers = config.layers.iter().filter(|kind| kind.compresses());
    assert_eq!(makers.count(), 4);
    let candidates = CandidateParams {
        layer: 20,
        blocks: 2048,
        block_size: 8,
    };
    assert_eq!(config.candidates, Some(candidates));
    let engram = EngramParams {
        layers: vec![1, 14],
        rows: vec![384006168, 384016682],
        max_ngram: 4,
        heads: 8,
        head_dim: 256,
        vocab_size: 16000000,
        pad_token_id: 2,
        compressed_vocab_size: 99092,
    };
    assert_eq!(engram.columns(), 24);
    assert_eq!(config.engram, Some(engram));
    let drafter = DsparkParams {
        block_size: 5,
        target_layers: vec![37, 38, 39],
        taps_inputs: true,
        noise_token_id: 128799,
        markov_rank: 256,
        layers: 3,
        experts: Some([128, 3]),
    };
    assert_eq!(config.dspark, Some(drafter));
    assert!(config.late_pre_mix && !config.query_norm);
    assert_eq!(config.cache_format, CacheFormat::Whole);
    assert_eq!((config.weight_block, config.rms_norm_eps), (32, 1e-20));
    assert_eq!((config.num_hash_layers, config.num_mtp_layers), (0, 0));
    let sizes = [config.hidden_size, config.index_n_heads, config.q_lora_rank];
    assert_eq!(sizes, [5120, 32, 1280]);
    assert_eq!(config.yarn, ModelConfig::new().yarn);
}

#[test]
fn the_flat_file_says_the_same() {
    assert_eq!(parse(&flat()), parse(&nested()));
    let both = with(flat(), json!({"hidden_size": 4096}));
    assert_contradictions(both, &["dim is 5120 but hidden_size is 4096"]);
    // The code beside it scales nothing without an original length.
    let unscaled = with(flat(), json!({"original_seq_len": 0}));
    assert_eq!(parse(&unscaled).yarn, None);
    let yarn = &nested()["text_config"]["rope_scaling"];
    let both = with(flat(), json!({"rope_scaling": yarn}));
    assert_eq!(parse(&both), parse(&nested()));
    for other in [with(yarn.clone(), json!({"factor": 8})), Value::Null] {
        let both = with(flat(), json!({"rope_scaling": other}));
        assert_contradictions(both, &["rope_scaling is "]);
    }
}

#[test]
fn a_file_without_what_v41_may_lack_is_read() {
    let drafter = [
        "dspark_block_size",
        "dspark_noise_token_id",
        "dspark_markov_rank",
        "dspark_target_layer_ids",
        "dspark_n_routed_experts",
        "dspark_num_experts_per_tok",
        "num_nextn_predict_layers",
    ];
    let more = ["engram_layer_ids", "candidate_source_layer_id"];
    let mut config = nested();
    let lacking = without(config["text_config"].clone(), &drafter);
    config["text_config"] = without(lacking, &more);
    let read = parse(&config);
    assert_eq!(
        (read.dspark, read.engram, read.candidates),
        (None, None, None)
    );
    assert_eq!(
        parse(&text(json!({"candidate_source_layer_id": -1}))).candidates,
        None
    );
    let (missing, _) = problems(&{
        let mut config = nested();
        config["text_config"] = without(config["text_config"].clone(), &drafter[..6]);
        config
    });
    assert_eq!(missing, ["dspark_block_size"]);
}

#[test]
fn what_contradicts_itself_is_named_with_its_value() {
    let cases = "
kv_source_layer_ids [8, 14, 20] => kv_source_layer_ids is [8, 14, 20], with none for layer 2
kv_source_layer_ids [1, 2, 8, 14, 20] => kv_source_layer_ids has 1
kv_source_layer_ids [2, 8, 14] => compress_ratios[20] is 1, but 2 in layer 14
index_source_layer_ids [2, 8, 20] => layer 14 takes picks of layer 8
index_source_layer_ids [2, 8, 14, 20, 40] => index_source_layer_ids has 40
candidate_source_layer_id 21 => candidate_source_layer_id is 21
candidate_source_layer_id 8 => layer 14 reads rows of another
candidate_source_layer_id true => candidate_source_layer_id is true
candidate_source_layer_id [20] => candidate_source_layer_id is [20]
candidate_source_layer_id 20.5 => candidate_source_layer_id is 20.5
candidate_topk_blocks 64 => candidate_topk_blocks 64 of candidate_block_size 8
engram_layer_ids [14, 1] => engram_layer_ids is [14, 1]
engram_num_embeddings [384006168, 1] => 384016682
engram_max_ngram_size 1 => engram_max_ngram_size is 1
engram_head_dim 100 => engram_head_dim is 100
engram_pad_token_id 200000 => engram_pad_token_id 200000
gate_temp 2.0 => gate_temp is 2.0
dspark_num_experts_per_tok 129 => dspark_num_experts_per_tok is 129
eos_token_id 7 => eos_token_id is 1 but text_config.eos_token_id is 7";
    for case in cases.trim().lines() {
        let (change, part) = case.split_once(" => ").unwrap();
        let (key, value) = change.split_once(' ').unwrap();
        let value: Value = serde_json::from_str(value).unwrap();
        assert_contradictions(text(json!({key: value})), &[part]);
    }
    let blocks = json!({"weight_block_size": [128, 128]});
    let coarse = with(nested(), json!({"quantization_config": blocks}));
    assert_contradictions(coarse, &["weight_block_size is [128, 128]"]);
}

#[test]
fn a_late_pre_mix_has_no_mtp_layer() {
    let config = ModelConfig::new().with_late_pre_mix(true);
    let error = config.validate().unwrap_err().to_string();
    assert!(error.contains("num_mtp_layers is 1"), "{error}");
    config.with_num_mtp_layers(0).validate().unwrap();
}
