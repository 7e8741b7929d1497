//! `generation_config.json`: how a checkpoint is meant to generate.

use std::path::Path;

use super::keys::{BOOL, ID, IDS, Keys, REAL, SIZE, TOP_K};
use super::text::{object, read};
use crate::config::error::ConfigError;

/// What a `generation_config.json` says; `None` where it says nothing. Keys that have no effect
/// here are ignored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Whether tokens are drawn; otherwise the most likely one is taken.
    pub do_sample: Option<bool>,
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// Most likely tokens to keep; 0 for all, as which -1 is read.
    pub top_k: Option<usize>,
    /// Mass of the most likely tokens to keep.
    pub top_p: Option<f32>,
    /// Least probability to keep, relative to the most likely token's.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens that have occurred.
    pub repetition_penalty: Option<f32>,
    /// Tokens to generate at most.
    pub max_new_tokens: Option<usize>,
    /// Beginning-of-sequence id.
    pub bos_token_id: Option<u32>,
    /// End-of-sequence ids, at least one.
    pub eos_token_ids: Option<Vec<u32>>,
}

/// The end-of-sequence ids of a `config.json`, of which a
/// [`ModelConfig`](crate::config::ModelConfig) has the first.
pub(crate) fn eos_token_ids(path: &Path) -> Result<Option<Vec<u32>>, ConfigError> {
    read(path, |text| {
        let root = object(text)?;
        let mut keys = Keys::new(&root);
        let ids = keys.optional("eos_token_id", &["eos_token_id"], IDS);
        let vocabulary = keys.peek("vocab_size", SIZE).unwrap_or(usize::MAX);
        let beyond = |id: &&u32| **id as usize >= vocabulary;
        if let Some(id) = ids.iter().flatten().find(beyond) {
            let message = format!("eos_token_id is {id}, the vocabulary has {vocabulary}");
            keys.contradiction("eos_token_id", message);
        }
        keys.judge(ids)
    })
}

impl GenerationDefaults {
    /// Reads `generation_config.json`; see [`from_json_str`](Self::from_json_str).
    ///
    /// # Errors
    /// Those of [`from_json_str`](Self::from_json_str), and
    /// [`ConfigErrorKind::Read`](crate::config::ConfigErrorKind::Read); the error names the file.
    pub fn from_json_file(path: &Path) -> Result<Self, ConfigError> {
        read(path, Self::from_json_str)
    }

    /// Reads the text of a `generation_config.json`.
    ///
    /// # Errors
    /// - [`ConfigErrorKind::Json`](crate::config::ConfigErrorKind::Json): not a JSON object.
    /// - [`ConfigErrorKind::Invalid`](crate::config::ConfigErrorKind::Invalid): all keys with a
    ///   value of another type.
    ///
    /// # Example
    ///
    /// ```
    /// use ds4_model::config::GenerationDefaults;
    ///
    /// let text = r#"{"temperature": 0.6, "eos_token_id": 1}"#;
    /// let defaults = GenerationDefaults::from_json_str(text)?;
    /// assert_eq!(defaults.temperature, Some(0.6));
    /// assert_eq!(defaults.eos_token_ids, Some(vec![1]));
    /// assert_eq!(defaults.top_p, None);
    /// # Ok::<(), ds4_model::config::ConfigError>(())
    /// ```
    pub fn from_json_str(text: &str) -> Result<Self, ConfigError> {
        let root = object(text)?;
        let mut keys = Keys::new(&root);
        let reals = ["temperature", "top_p", "min_p", "repetition_penalty"];
        let reals = reals.map(|key| Some(keys.optional(key, &[key], REAL)? as f32));
        let [temperature, top_p, min_p, repetition_penalty] = reals;
        let defaults = Self {
            do_sample: keys.optional("do_sample", &["do_sample"], BOOL),
            temperature,
            top_k: keys.optional("top_k", &["top_k"], TOP_K),
            top_p,
            min_p,
            repetition_penalty,
            max_new_tokens: keys.optional("max_new_tokens", &["max_new_tokens"], SIZE),
            bos_token_id: keys.optional("bos_token_id", &["bos_token_id"], ID),
            eos_token_ids: keys.optional("eos_token_id", &["eos_token_id"], IDS),
        };
        keys.judge(defaults)
    }
}
