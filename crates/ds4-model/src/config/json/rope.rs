//! The rotary embeddings' keys.

use super::keys::{Keys, REAL, SIZE, TEXT};
use crate::config::shape::{ModelConfig, YarnConfig};

pub(super) fn read(keys: &mut Keys, config: &mut ModelConfig) {
    keys.set(
        &mut config.rope_theta,
        "rope_theta",
        &["rope_theta", "rope_parameters.main.rope_theta"],
        REAL,
    );
    keys.set(
        &mut config.compress_rope_theta,
        "compress_rope_theta",
        &["compress_rope_theta", "rope_parameters.compress.rope_theta"],
        REAL,
    );
    read_dims(keys, config);
    keys.expect(
        "rope_parameters.main.rope_type",
        TEXT,
        "default".to_string(),
        false,
    );
    // The model's fixed softmax scale does not allow for YaRN's own temperature.
    keys.expect(
        "rope_parameters.compress.attention_factor",
        REAL,
        1.0,
        false,
    );
    keys.expect("rope_scaling.attention_factor", REAL, 1.0, false);
    config.yarn = read_yarn(keys);
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
        ],
        REAL,
    );
    keys.need(FIELD, &["qk_rope_head_dim", "partial_rotary_factor"]);
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
    let holders = ["rope_scaling", "rope_parameters.compress"];
    if !keys.mentions(&holders) {
        if !holders.iter().any(|holder| keys.has(holder)) {
            keys.need(FIELD, &holders);
        }
        return None;
    }
    let rope_type = keys.required(
        FIELD,
        &[
            "rope_scaling.type",
            "rope_scaling.rope_type",
            "rope_parameters.compress.rope_type",
            "rope_parameters.compress.type",
        ],
        TEXT,
    )?;
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
    let both = |name: &str| holders.map(|holder| format!("{holder}.{name}"));
    let mut real = |field, name: &str| {
        let [released, hf] = both(name);
        keys.required(field, &[&released, &hf], REAL)
    };
    let factor = real("yarn.factor", "factor");
    let beta_fast = real("yarn.beta_fast", "beta_fast");
    let beta_slow = real("yarn.beta_slow", "beta_slow");
    let [released, hf] = both("original_max_position_embeddings");
    let original = keys.required(
        "yarn.original_max_position_embeddings",
        &[&released, &hf],
        SIZE,
    );
    Some(YarnConfig {
        factor: factor?,
        original_max_position_embeddings: original?,
        beta_fast: beta_fast?,
        beta_slow: beta_slow?,
    })
}
