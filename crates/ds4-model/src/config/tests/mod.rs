mod contradictions;
mod dialects;
mod drafter;
mod in_the_wild;
mod made_by_hand;
mod v41;

pub(crate) use v41::flash as v41_flash;

use serde_json::Value;

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
