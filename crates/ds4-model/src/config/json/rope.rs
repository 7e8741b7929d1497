//! The rotary embeddings' keys.

use super::keys::{Keys, REAL, SIZE, TEXT};
use crate::config::shape::{ModelConfig, YarnConfig};

pub(super) fn read(keys: &mut Keys, config: &mut ModelConfig) {
    keys.set_if_there(
        &mut config.rope_theta,
        "rope_theta",
        &[
            "rope_theta",
            "rope_parameters.main.rope_theta",
            "rope_parameters.rope_theta",
            "rope_scaling.main.rope_theta",
        ],
        REAL,
    );
    keys.set_if_there(
        &mut config.compress_rope_theta,
        "compress_rope_theta",
        &[
            "compress_rope_theta",
            "rope_parameters.compress.rope_theta",
            "rope_scaling.compress.rope_theta",
        ],
        REAL,
    );
    read_dims(keys, config);
    for path in [
        "rope_parameters.main.rope_type",
        "rope_scaling.main.rope_type",
    ] {
        keys.expect(path, TEXT, "default".to_string());
    }
    // The model's fixed softmax scale does not allow for YaRN's own temperature.
    for path in [
        "rope_parameters.compress.attention_factor",
        "rope_parameters.attention_factor",
        "rope_scaling.compress.attention_factor",
        "rope_scaling.attention_factor",
    ] {
        keys.expect(path, REAL, 1.0);
    }
    config.yarn = read_yarn(keys);
}

/// The objects that may hold the scaling. `transformers` has two in one, of window layers and of
/// compressed ones; each of the two keys may also be written as the other.
fn holders(keys: &Keys) -> [&'static str; 2] {
    let scaling = match keys.has("rope_scaling.compress") {
        true => "rope_scaling.compress",
        false => "rope_scaling",
    };
    let is_flat = ["rope_parameters.type", "rope_parameters.rope_type"];
    let parameters = match is_flat.iter().any(|path| keys.has(path)) {
        true => "rope_parameters",
        false => "rope_parameters.compress",
    };
    [scaling, parameters]
}

fn read_dims(keys: &mut Keys, config: &mut ModelConfig) {
    const FIELD: &str = "rope_head_dim";
    let dims = keys.optional(FIELD, &["qk_rope_head_dim"], SIZE);
    let factor = keys.optional(
        FIELD,
        &[
            "partial_rotary_factor",
            "rope_parameters.main.partial_rotary_factor",
            "rope_parameters.compress.partial_rotary_factor",
            "rope_parameters.partial_rotary_factor",
        ],
        REAL,
    );
    if factor.is_none() {
        keys.need(FIELD, &["qk_rope_head_dim", "partial_rotary_factor"]);
    }
    if let Some(dims) = dims {
        config.rope_head_dim = dims;
    }
    let head = config.head_dim;
    let (Some(factor), false) = (factor, keys.is_bad("head_dim")) else {
        return;
    };
    let exact = factor * head as f64;
    let rounded = exact.round().max(0.0) as usize;
    if (exact - rounded as f64).abs() > 1e-3 {
        keys.contradiction(
            FIELD,
            format!("partial_rotary_factor {factor} of head_dim {head} is {exact} channels"),
        );
    } else if dims.is_some_and(|dims| dims != rounded) {
        let dims = config.rope_head_dim;
        keys.contradiction(
            FIELD,
            format!(
                "qk_rope_head_dim is {dims} but partial_rotary_factor {factor} of head_dim \
                 {head} is {rounded}"
            ),
        );
    } else {
        config.rope_head_dim = rounded;
    }
}

fn read_yarn(keys: &mut Keys) -> Option<YarnConfig> {
    const FIELD: &str = "yarn";
    let holders = holders(keys);
    if !keys.mentions(&holders) {
        if !holders.iter().any(|holder| keys.has(holder)) {
            keys.need(FIELD, &holders);
        }
        return None;
    }
    let both = |name: &str| holders.map(|holder| format!("{holder}.{name}"));
    let [[type_1, type_2], [type_3, type_4]] = ["type", "rope_type"].map(both);
    let types = [&*type_1, &*type_3, &*type_4, &*type_2];
    let rope_type = keys.required(FIELD, &types, TEXT)?;
    match rope_type.as_str() {
        "default" => return None,
        "yarn" => {}
        other => {
            keys.contradiction(
                FIELD,
                format!("the rope scaling type is `{other}`, expected `yarn` or `default`"),
            );
            return None;
        }
    }
    let [released, hf] = both("factor");
    let factor = keys.required("yarn.factor", &[&released, &hf], REAL);
    let (mut beta_fast, mut beta_slow) = (32.0, 1.0);
    for (field, name, target) in [
        ("yarn.beta_fast", "beta_fast", &mut beta_fast),
        ("yarn.beta_slow", "beta_slow", &mut beta_slow),
    ] {
        let [released, hf] = both(name);
        keys.set_if_there(target, field, &[&released, &hf], REAL);
    }
    let [released, hf] = both("original_max_position_embeddings");
    let original = keys.required(
        "yarn.original_max_position_embeddings",
        &[&released, &hf],
        SIZE,
    );
    Some(YarnConfig {
        factor: factor?,
        original_max_position_embeddings: original?,
        beta_fast,
        beta_slow,
    })
}
