use serde_json::{Value, json};

use super::*;

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
