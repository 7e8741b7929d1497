//! `config.json` of the released checkpoints and of Hugging Face `transformers`.
//!
//! The two dialects name the same facts differently, and a file may hold both names. Every fact is
//! therefore read from all the keys that can hold it: one must be there, and those that are there
//! must agree.

mod dspark;
mod generation;
mod keys;
mod rope;
mod text;
mod v41;

use std::path::Path;

use serde_json::Value;

pub use self::generation::GenerationDefaults;
pub(crate) use self::generation::eos_token_ids;
use self::keys::{BOOL, FIRST_ID, ID, Keys, REAL, SIZE, SIZES, TEXT, TEXTS};
use self::text::{object, read};
use super::error::{ConfigError, ConfigErrorKind};
use super::shape::{AttentionKind, ModelConfig};

const MODEL_TYPE: &str = "deepseek_v4";
/// The one ratio that means overlapping blocks and an indexer where a file has no `layer_types`.
const SPARSE_RATIO: usize = 4;
const WINDOW: &str = "sliding_attention";
const SPARSE: &str = "compressed_sparse_attention";
const HEAVY: &str = "heavily_compressed_attention";
const HASH_MOE: &str = "hash_moe";
const SCORE_MOE: &str = "moe";

impl ModelConfig {
    /// Reads `config.json`; see [`from_json_str`](Self::from_json_str).
    ///
    /// # Errors
    /// Those of [`from_json_str`](Self::from_json_str), and [`ConfigErrorKind::Read`]; the error
    /// names the file.
    pub fn from_json_file(path: &Path) -> Result<Self, ConfigError> {
        read(path, Self::from_json_str)
    }

    /// Reads the text of a `config.json`, of a released checkpoint (`compress_ratios`,
    /// `num_hash_layers`, `rope_scaling`, `qk_rope_head_dim`) or of Hugging Face `transformers`
    /// (`layer_types`, `compress_rates`, `mlp_layer_types`, `rope_parameters`,
    /// `partial_rotary_factor`).
    ///
    /// DeepSeek-V4.1 is read from its nested `config.json`, and from the flat one in its
    /// `inference` folder.
    ///
    /// Keys that do not matter here are ignored. Those that have one value in every release, and
    /// are no widths that tensors have in common, may be left out and have it then: numbers of
    /// streams, of shared experts and of those per token, of hash layers and of iterations; the
    /// indexer's heads; `hc_eps`, `swiglu_limit`, the rotary bases, YaRN's betas, ids of tokens,
    /// the longest context, and an MTP layer. Others that change the result are errors where they
    /// are absent. `swiglu_limit` of zero or less means no clamp, a `rope_scaling` of `null` no
    /// YaRN.
    ///
    /// # Errors
    /// - [`ConfigErrorKind::Json`]: not a JSON object.
    /// - [`ConfigErrorKind::UnsupportedArchitecture`]: `model_type` is neither `deepseek_v4` nor
    ///   `deepseek_v41`.
    /// - [`ConfigErrorKind::Invalid`]: all missing and all contradictory keys.
    ///
    /// # Example
    ///
    /// ```
    /// use ds4_model::config::ModelConfig;
    ///
    /// let error = ModelConfig::from_json_str(r#"{"vocab_size": 1024}"#).unwrap_err().to_string();
    /// // All missing keys at once.
    /// assert!(error.contains("hidden_size") && error.contains("num_attention_heads"));
    /// assert!(!error.contains("vocab_size"));
    /// ```
    pub fn from_json_str(text: &str) -> Result<Self, ConfigError> {
        let (config, are_told) = Self::parse(text)?;
        match are_told {
            true => Ok(config),
            false => Err(untold_stages()),
        }
    }

    /// Reads `config.json` for a checkpoint whose tensors may say what the file does not: `false`
    /// where it does not tell how many layers the DSpark drafter has.
    pub(crate) fn from_checkpoint(path: &Path) -> Result<(Self, bool), ConfigError> {
        read(path, Self::parse)
    }

    fn parse(text: &str) -> Result<(Self, bool), ConfigError> {
        let root = object(text)?;
        let v41 = v41::flattened(&root);
        if let Some(model_type) = root.get("model_type").and_then(Value::as_str)
            && model_type != MODEL_TYPE
            && v41.is_none()
        {
            return Err(ConfigErrorKind::UnsupportedArchitecture {
                model_type: model_type.to_string(),
            }
            .into());
        }
        let mut keys = Keys::new(v41.as_ref().map_or(&root, |flat| &flat.keys));
        let mut config = v41.as_ref().map_or_else(Self::new, |_| v41::defaults());
        read_fixed(&mut keys);
        read_sizes(&mut keys, &mut config);
        read_constants(&mut keys, &mut config);
        let are_told = dspark::read(&mut keys, &mut config, v41.is_some());
        match &v41 {
            Some(flat) => v41::read(&mut keys, &mut config, flat),
            None => {
                keys.need("model_type", &["model_type"]);
                keys.expect("model_type", TEXT, MODEL_TYPE.to_string());
                read_layers(&mut keys, &mut config);
                read_hash_layers(&mut keys, &mut config);
            }
        }
        rope::read(&mut keys, &mut config);
        Ok((keys.finish(config)?, are_told))
    }
}

/// Where the file does not tell how many layers the DSpark drafter has.
fn untold_stages() -> ConfigError {
    let places = "n_mtp_layers or an entry of compress_ratios for each";
    ConfigErrorKind::Invalid {
        missing: Vec::new(),
        contradictory: vec![format!("the layers of the drafter are not told: {places}")],
    }
    .into()
}

/// Choices that DeepSeek has made and the modules have built in.
fn read_fixed(keys: &mut Keys) {
    keys.expect("num_key_value_heads", SIZE, 1);
    keys.expect("scoring_func", TEXT, "sqrtsoftplus".to_string());
    keys.expect("topk_method", TEXT, "noaux_tc".to_string());
    keys.expect("norm_topk_prob", BOOL, true);
    keys.expect("hidden_act", TEXT, "silu".to_string());
    keys.expect("tie_word_embeddings", BOOL, false);
    keys.expect("attention_bias", BOOL, false);
    keys.expect("mlp_bias", BOOL, false);
}

fn read_sizes(keys: &mut Keys, config: &mut ModelConfig) {
    for (key, target) in [
        ("vocab_size", &mut config.vocab_size),
        ("hidden_size", &mut config.hidden_size),
        ("num_attention_heads", &mut config.num_attention_heads),
        ("head_dim", &mut config.head_dim),
        ("q_lora_rank", &mut config.q_lora_rank),
        ("o_groups", &mut config.o_groups),
        ("o_lora_rank", &mut config.o_lora_rank),
        ("sliding_window", &mut config.sliding_window),
        ("index_topk", &mut config.index_topk),
        ("n_routed_experts", &mut config.n_routed_experts),
        ("moe_intermediate_size", &mut config.moe_intermediate_size),
    ] {
        keys.set(target, key, &[key], SIZE);
    }
    for (key, target) in [
        ("routed_scaling_factor", &mut config.routed_scaling_factor),
        ("rms_norm_eps", &mut config.rms_norm_eps),
    ] {
        keys.set(target, key, &[key], REAL);
    }
}

/// What is the same in every release, and may be left out.
fn read_constants(keys: &mut Keys, config: &mut ModelConfig) {
    for (key, target) in [
        ("index_n_heads", &mut config.index_n_heads),
        ("index_head_dim", &mut config.index_head_dim),
        ("num_experts_per_tok", &mut config.num_experts_per_tok),
        ("n_shared_experts", &mut config.n_shared_experts),
        ("hc_mult", &mut config.hc_mult),
        ("hc_sinkhorn_iters", &mut config.hc_sinkhorn_iters),
        (
            "max_position_embeddings",
            &mut config.max_position_embeddings,
        ),
    ] {
        keys.set_if_there(target, key, &[key], SIZE);
    }
    keys.set_if_there(
        &mut config.num_mtp_layers,
        "num_mtp_layers",
        &["num_nextn_predict_layers"],
        SIZE,
    );
    keys.set_if_there(&mut config.hc_eps, "hc_eps", &["hc_eps"], REAL);
    let mut limit = config.swiglu_limit.unwrap_or_default();
    keys.set_if_there(&mut limit, "swiglu_limit", &["swiglu_limit"], REAL);
    config.swiglu_limit = (limit > 0.0).then_some(limit);
    for (key, target, kind) in [
        ("bos_token_id", &mut config.bos_token_id, ID),
        ("eos_token_id", &mut config.eos_token_id, FIRST_ID),
    ] {
        keys.set_if_there(target, key, &[key], kind);
    }
}

fn kind_of_ratio(ratio: usize) -> AttentionKind {
    match ratio {
        0 => AttentionKind::Window,
        SPARSE_RATIO => AttentionKind::CompressedSparse { ratio },
        _ => AttentionKind::HeavilyCompressed { ratio },
    }
}

fn name_of(kind: AttentionKind) -> &'static str {
    match kind {
        AttentionKind::Window => WINDOW,
        AttentionKind::CompressedSparse { .. } => SPARSE,
        AttentionKind::HeavilyCompressed { .. } | AttentionKind::Shared(_) => HEAVY,
    }
}

fn read_layers(keys: &mut Keys, config: &mut ModelConfig) {
    let count = keys.required("layers", &["num_hidden_layers"], SIZE);
    let ratios = keys.optional("layers", &["compress_ratios"], SIZES);
    let types = keys.optional("layers", &["layer_types"], TEXTS);
    let sparse = [
        "compress_rates.compressed_sparse_attention",
        "compress_rate_csa",
    ];
    let heavy = [
        "compress_rates.heavily_compressed_attention",
        "compress_rate_hca",
    ];
    let sparse_rate = keys.optional("layers", &sparse, SIZE);
    let heavy_rate = keys.optional("layers", &heavy, SIZE);

    if let (Some(types), Some(count)) = (&types, count)
        && types.len() != count
    {
        let entries = types.len();
        keys.contradiction(
            "layers",
            format!("layer_types has {entries} entries for num_hidden_layers {count}"),
        );
    }
    for (layer, name) in types.iter().flatten().enumerate() {
        if ![WINDOW, SPARSE, HEAVY].contains(&name.as_str()) {
            keys.contradiction(
                "layers",
                format!("layer_types[{layer}] is unknown: `{name}`"),
            );
        }
    }

    match (ratios, types) {
        (Some(ratios), types) => {
            let drafting = match &config.dspark {
                None => ("num_nextn_predict_layers", config.num_mtp_layers),
                Some(dspark) => ("layers of the DSpark drafter", dspark.layers),
            };
            let ratios = trunk_ratios(keys, ratios, count, drafting);
            if let Some(types) = &types {
                compare_kinds(keys, &ratios, types);
            }
            config.layers = ratios.into_iter().map(kind_of_ratio).collect();
            for (key, rate, name) in [
                (sparse[0], sparse_rate, SPARSE),
                (heavy[0], heavy_rate, HEAVY),
            ] {
                let other = config
                    .layers
                    .iter()
                    .filter(|kind| name_of(**kind) == name)
                    .find(|kind| rate.is_some() && kind.ratio() != rate);
                if let (Some(other), Some(rate)) = (other.and_then(|kind| kind.ratio()), rate) {
                    keys.contradiction(
                        "layers",
                        format!("{key} is {rate} but compress_ratios has {other}"),
                    );
                }
            }
        }
        (None, Some(types)) => {
            let mut rate_of = |name: &str, rate: Option<usize>, paths: &[&str]| {
                if types.iter().any(|entry| entry == name) {
                    keys.need("layers", paths);
                }
                rate.unwrap_or(1)
            };
            let sparse_rate = rate_of(SPARSE, sparse_rate, &sparse);
            let heavy_rate = rate_of(HEAVY, heavy_rate, &heavy);
            config.layers = types
                .iter()
                .map(|name| match name.as_str() {
                    SPARSE => AttentionKind::CompressedSparse { ratio: sparse_rate },
                    HEAVY => AttentionKind::HeavilyCompressed { ratio: heavy_rate },
                    _ => AttentionKind::Window,
                })
                .collect();
        }
        (None, None) => keys.need("layers", &["compress_ratios", "layer_types"]),
    }
}

/// The entries of the trunk: released files append one entry per layer that drafts, and keep it
/// where the drafter was taken out.
fn trunk_ratios(
    keys: &mut Keys,
    mut ratios: Vec<usize>,
    count: Option<usize>,
    (name, drafting): (&str, usize),
) -> Vec<usize> {
    let Some(count) = count else { return ratios };
    let entries = ratios.len();
    let is_left = drafting == 0 && entries > count;
    if entries != count && !is_left && Some(entries) != count.checked_add(drafting) {
        keys.contradiction(
            "layers",
            format!(
                "compress_ratios has {entries} entries for num_hidden_layers {count} and {name} \
                 {drafting}"
            ),
        );
        return ratios;
    }
    for (layer, &ratio) in ratios.iter().enumerate().skip(count) {
        if ratio != 0 {
            keys.contradiction(
                "layers",
                format!("compress_ratios[{layer}] is {ratio}, expected 0 for a layer that drafts"),
            );
        }
    }
    ratios.truncate(count);
    ratios
}

fn compare_kinds(keys: &mut Keys, ratios: &[usize], types: &[String]) {
    let mut differing = ratios
        .iter()
        .zip(types)
        .enumerate()
        .filter(|(_, (ratio, name))| name_of(kind_of_ratio(**ratio)) != name.as_str());
    if let Some((layer, (ratio, name))) = differing.next() {
        let more = differing.count();
        keys.contradiction(
            "layers",
            format!(
                "compress_ratios[{layer}] is {ratio} but layer_types[{layer}] is `{name}` (and \
                 {more} more layers)"
            ),
        );
    }
}

fn read_hash_layers(keys: &mut Keys, config: &mut ModelConfig) {
    let count = keys.optional("num_hash_layers", &["num_hash_layers"], SIZE);
    let Some(types) = keys.optional("num_hash_layers", &["mlp_layer_types"], TEXTS) else {
        // The released number otherwise.
        if let Some(count) = count {
            config.num_hash_layers = count;
        }
        return;
    };
    let prefix = types.iter().take_while(|name| *name == HASH_MOE).count();
    config.num_hash_layers = prefix;
    if let Some(layer) = types[prefix..].iter().position(|name| name != SCORE_MOE) {
        let layer = prefix + layer;
        keys.contradiction(
            "num_hash_layers",
            format!(
                "mlp_layer_types[{layer}] is `{}`, expected some `{HASH_MOE}` layers and then only \
                 `{SCORE_MOE}`",
                types[layer]
            ),
        );
    }
    if let Some(layers) = keys.peek("num_hidden_layers", SIZE)
        && layers != types.len()
    {
        let entries = types.len();
        keys.contradiction(
            "num_hash_layers",
            format!("mlp_layer_types has {entries} entries for num_hidden_layers {layers}"),
        );
    }
    if let Some(count) = count
        && count != prefix
    {
        keys.contradiction(
            "num_hash_layers",
            format!(
                "num_hash_layers is {count} but mlp_layer_types begins with {prefix} \
                 `{HASH_MOE}` layers"
            ),
        );
    }
}
