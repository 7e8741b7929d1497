//! `config.json` of DeepSeek-V4.1: nested, as it is released, or flat, as in its `inference`
//! folder.

use serde_json::{Map, Value, json};

use super::keys::{ID, Keys, REAL, SIZE, SIZES};
use super::trunk_ratios;
use crate::config::shape::{
    AttentionKind, CacheFormat, CandidateParams, EngramParams, ModelConfig, SharedRows,
};

const MODEL_TYPES: [&str; 2] = ["deepseek_v41", "deepseek_v41_text"];
const KV_SOURCES: &str = "kv_source_layer_ids";
const INDEX_SOURCES: &str = "index_source_layer_ids";
const ENGRAM_LAYERS: &str = "engram_layer_ids";
const CANDIDATE_SOURCE: &str = "candidate_source_layer_id";

/// Names in the flat file, and those in the nested one.
#[rustfmt::skip]
const RENAMED: [(&str, &str); 16] = [
    ("dim", "hidden_size"),
    ("n_layers", "num_hidden_layers"),
    ("n_heads", "num_attention_heads"),
    ("rope_head_dim", "qk_rope_head_dim"),
    ("moe_inter_dim", "moe_intermediate_size"),
    ("n_activated_experts", "num_experts_per_tok"),
    ("score_func", "scoring_func"),
    ("route_scale", "routed_scaling_factor"),
    ("norm_eps", "rms_norm_eps"),
    ("window_size", "sliding_window"),
    ("kv_source_layers", KV_SOURCES),
    ("index_source_layers", INDEX_SOURCES),
    ("candidate_source_layer", CANDIDATE_SOURCE),
    ("engram_pad_id", "engram_pad_token_id"),
    ("n_mtp_layers", "num_nextn_predict_layers"),
    ("dspark_n_activated_experts", "dspark_num_experts_per_tok"),
];

/// All keys beside each other, by the names of the nested file.
pub(super) struct Flattened {
    pub(super) keys: Map<String, Value>,
    /// What two names of one fact say differently.
    conflicts: Vec<String>,
}

/// The keys of a file of V4.1, `None` for another one.
pub(super) fn flattened(root: &Map<String, Value>) -> Option<Flattened> {
    let is_one = match root.get("model_type").and_then(Value::as_str) {
        Some(model_type) => MODEL_TYPES.contains(&model_type),
        None => root.contains_key("kv_source_layers"),
    };
    let text = root.get("text_config").and_then(Value::as_object);
    let mut keys = is_one.then(|| text.cloned().unwrap_or_default())?;
    let mut conflicts = Vec::new();
    for (key, value) in root {
        let known = keys.entry(key.clone()).or_insert_with(|| value.clone());
        if known != value && ["bos_token_id", "eos_token_id"].contains(&key.as_str()) {
            conflicts.push(format!("{key} is {value} but text_config.{key} is {known}"));
        }
    }
    keys.remove("model_type");
    for (flat, nested) in RENAMED {
        let Some(value) = keys.remove(flat) else {
            continue;
        };
        let known = keys.entry(nested).or_insert_with(|| value.clone());
        if *known != value {
            conflicts.push(format!("{flat} is {value} but {nested} is {known}"));
        }
    }
    if let Some(original) = keys.remove("original_seq_len") {
        let mut taken = |key| keys.remove(key).unwrap_or_default();
        let yarn = json!({
            "rope_type": "yarn", "factor": taken("rope_factor"),
            "beta_fast": taken("beta_fast"), "beta_slow": taken("beta_slow"),
            "original_max_position_embeddings": original,
        });
        // Without an original length, the file's own code scales nothing.
        let yarn = if original == 0 { Value::Null } else { yarn };
        let known = keys.entry("rope_scaling").or_insert_with(|| yarn.clone());
        if !say_alike(known, &yarn) {
            let conflict = format!("rope_scaling is {known} but the flat keys say {yarn}");
            conflicts.push(conflict);
        }
    }
    Some(Flattened { keys, conflicts })
}

/// Whether two forms of YaRN have the same numbers, or neither has any.
fn say_alike(one: &Value, other: &Value) -> bool {
    let (Some(one), Some(other)) = (one.as_object(), other.as_object()) else {
        return one == other;
    };
    let differs = |(key, value): (&String, &Value)| {
        let numbers = [Some(value), one.get(key)].map(|value| value.and_then(Value::as_f64));
        numbers[0].is_some() && numbers[0] != numbers[1]
    };
    !other.iter().any(differs)
}

/// What a file need not say.
pub(super) fn defaults() -> ModelConfig {
    ModelConfig {
        num_mtp_layers: 0,
        num_hash_layers: 0,
        index_n_heads: 32,
        query_norm: false,
        late_pre_mix: true,
        cache_format: CacheFormat::Whole,
        weight_block: 32,
        ..ModelConfig::new()
    }
}

/// Reads what V4 has not.
pub(super) fn read(keys: &mut Keys, config: &mut ModelConfig, flat: &Flattened) {
    for conflict in &flat.conflicts {
        keys.contradiction("dialect", conflict.clone());
    }
    keys.expect("gate_temp", REAL, 1.0);
    keys.expect("num_hash_layers", SIZE, 0);
    keys.expect(
        "quantization_config.weight_block_size",
        SIZES,
        vec![config.weight_block; 2],
    );
    if config.dspark.is_none() && config.num_mtp_layers > 0 {
        keys.need("dspark", &["dspark_block_size"]);
    }
    config.num_mtp_layers = 0;
    read_layers(keys, config);
    read_candidates(keys, config);
    read_engram(keys, config);
}

fn read_layers(keys: &mut Keys, config: &mut ModelConfig) {
    let count = keys.required("layers", &["num_hidden_layers"], SIZE);
    let lists = ["compress_ratios", KV_SOURCES, INDEX_SOURCES];
    let [ratios, rows, picks] = lists.map(|key| keys.required("layers", &[key], SIZES));
    let (Some(ratios), Some(rows), Some(picks)) = (ratios, rows, picks) else {
        return;
    };
    let stages = config.dspark.as_ref().map_or(0, |dspark| dspark.layers);
    let ratios = trunk_ratios(
        keys,
        ratios,
        count,
        ("layers of the DSpark drafter", stages),
    );
    for (key, sources) in [(KV_SOURCES, &rows), (INDEX_SOURCES, &picks)] {
        let ratio = |source: &usize| ratios.get(*source).is_some_and(|ratio| *ratio > 0);
        if let Some(source) = sources.iter().find(|source| !ratio(source)) {
            let message =
                format!("{key} has {source}, which is no layer with compress_ratios above 0");
            keys.contradiction("layers", message);
        }
    }
    let mut source = |key: &str, sources: &[usize], layer: usize| {
        let before = sources.iter().copied().filter(|source| *source <= layer);
        before.max().unwrap_or_else(|| {
            let message = format!("{key} is {sources:?}, with none for layer {layer}");
            keys.contradiction("layers", message);
            layer
        })
    };
    let layers = ratios.iter().enumerate().map(|(layer, ratio)| match ratio {
        0 => AttentionKind::Window,
        ratio => AttentionKind::Shared(SharedRows {
            layer,
            ratio: *ratio,
            rows_of: source(KV_SOURCES, &rows, layer),
            picks_of: source(INDEX_SOURCES, &picks, layer),
        }),
    });
    config.layers = layers.collect();
}

fn read_candidates(keys: &mut Keys, config: &mut ModelConfig) {
    // Without a source, or with -1, every row is a candidate.
    let layer = keys.peek(CANDIDATE_SOURCE, REAL);
    if keys.lookup(CANDIDATE_SOURCE).is_none() || layer.is_some_and(|layer| layer < 0.0) {
        return;
    }
    let names = [
        CANDIDATE_SOURCE,
        "candidate_topk_blocks",
        "candidate_block_size",
    ];
    let read = names.map(|key| keys.required("candidates", &[key], SIZE));
    if let [Some(layer), Some(blocks), Some(block_size)] = read {
        config.candidates = Some(CandidateParams {
            layer,
            blocks,
            block_size,
        });
    }
}

fn read_engram(keys: &mut Keys, config: &mut ModelConfig) {
    let layers = keys.optional("engram", &[ENGRAM_LAYERS], SIZES);
    let Some(layers) = layers.filter(|layers| !layers.is_empty()) else {
        return;
    };
    let rows = keys.required("engram", &["engram_num_embeddings"], SIZES);
    let pad_token_id = keys.required("engram", &["engram_pad_token_id"], ID);
    let names = [
        "engram_max_ngram_size",
        "engram_n_heads",
        "engram_head_dim",
        "engram_vocab_size",
        "engram_compressed_vocab_size",
    ];
    let read = names.map(|key| keys.required("engram", &[key], SIZE));
    let [
        Some(max_ngram),
        Some(heads),
        Some(head_dim),
        Some(vocab_size),
        Some(compressed_vocab_size),
    ] = read
    else {
        return;
    };
    config.engram = rows
        .zip(pad_token_id)
        .map(|(rows, pad_token_id)| EngramParams {
            layers,
            rows,
            max_ngram,
            heads,
            head_dim,
            vocab_size,
            pad_token_id,
            compressed_vocab_size,
        });
}
