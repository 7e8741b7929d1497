//! All that it takes to generate text with a checkpoint, opened in one call.

use std::path::{Path, PathBuf};

use crate::checkpoint::{CONFIG_FILE, Checkpoint, CheckpointError, LoadOptions, LoadProgress};
use crate::config::{ConfigError, ConfigErrorKind, GenerationDefaults, ModelConfig, eos_token_ids};
use crate::generate::{
    GenerateConfig, GenerateError, SamplingConfig, TextGeneration, TextTokenizer,
};
use crate::model::Model;
use crate::placement::Devices;
use crate::printable::place;

const GENERATION_CONFIG_FILE: &str = "generation_config.json";

/// Why a [`Pipeline`] cannot be opened. Every message names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// `config.json` or the weights.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// `tokenizer.json`.
    #[error(transparent)]
    Tokenizer(#[from] GenerateError),
    /// `generation_config.json`.
    #[error(transparent)]
    GenerationConfig(#[from] ConfigError),
    /// The tokenizer has tokens that the model does not know.
    #[error(
        "{}: tokenizer.json has {tokens} tokens, the model {vocab_size}",
        place(dir)
    )]
    Vocabulary {
        /// The directory of the checkpoint.
        dir: PathBuf,
        /// Tokens of the tokenizer.
        tokens: usize,
        /// Tokens of the model.
        vocab_size: usize,
    },
}

/// A model, its tokenizer, and how the checkpoint is meant to generate.
#[derive(Debug)]
pub struct Pipeline {
    /// The model. Its beginning- and end-of-sequence ids are those of `generation_config.json`,
    /// where that has any: of several end-of-sequence ids the first. The others are
    /// [stop tokens](GenerateConfig::stop_tokens) of the defaults.
    pub model: Model,
    /// The tokenizer.
    pub tokenizer: TextTokenizer,
    /// How to generate: what `generation_config.json` says, and the default where it says nothing
    /// or is not there. It is greedy without a temperature, or where `do_sample` is false.
    pub defaults: GenerateConfig,
}

impl Pipeline {
    /// Opens the checkpoint in `dir`, with the default [`LoadOptions`], on a device or
    /// [several](Devices).
    ///
    /// # Errors
    ///
    /// If a file is missing or cannot be used, or the files do not belong together. What is quick
    /// to check is checked before the weights are read.
    pub fn open(dir: &Path, devices: impl Into<Devices>) -> Result<Self, PipelineError> {
        Self::open_with(dir, &LoadOptions::default(), devices)
    }

    /// Opens a checkpoint like [`open`](Self::open), with options.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_with(
        dir: &Path,
        options: &LoadOptions,
        devices: impl Into<Devices>,
    ) -> Result<Self, PipelineError> {
        Self::open_with_progress(dir, options, devices, |_: u64, _: u64| {})
    }

    /// Opens a checkpoint like [`open_with`](Self::open_with), and reports progress.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_with_progress(
        dir: &Path,
        options: &LoadOptions,
        devices: impl Into<Devices>,
        progress: impl LoadProgress,
    ) -> Result<Self, PipelineError> {
        let checkpoint = Checkpoint::open(dir)?;
        let tokenizer = TextTokenizer::from_dir(dir)?;
        let (tokens, vocab_size) = (tokenizer.vocab_size(), checkpoint.config().vocab_size);
        if tokens > vocab_size {
            return Err(PipelineError::Vocabulary {
                dir: dir.to_path_buf(),
                tokens,
                vocab_size,
            });
        }
        let path = dir.join(GENERATION_CONFIG_FILE);
        let mut stored = match path.exists() {
            true => GenerationDefaults::from_json_file(&path)?,
            false => GenerationDefaults::default(),
        };
        if stored.eos_token_ids.is_none() {
            stored.eos_token_ids = eos_token_ids(&dir.join(CONFIG_FILE))?;
        }
        let defaults = generate_config(&stored, checkpoint.config());
        let defaults = defaults.map_err(|error| error.at(&path))?;
        let mut model = checkpoint.load_with_progress(options, devices, progress)?;
        let ids = &mut model.config;
        ids.bos_token_id = stored.bos_token_id.unwrap_or(ids.bos_token_id);
        let eos_token_ids = stored.eos_token_ids.as_deref();
        ids.eos_token_id = eos_token_ids.map_or(ids.eos_token_id, |ids| ids[0]);
        Ok(Self {
            model,
            tokenizer,
            defaults,
        })
    }

    /// The ids of a text to continue: the beginning-of-sequence token, and `text`, in which special
    /// tokens, written out, stand for themselves.
    ///
    /// # Errors
    ///
    /// As [`TextTokenizer::encode`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, GenerateError> {
        let mut ids = vec![self.model.config().bos_token_id];
        ids.extend(self.tokenizer.encode(text)?);
        Ok(ids)
    }

    /// Prepares to continue the token ids of `prompt`.
    ///
    /// # Errors
    ///
    /// As [`TextGeneration::new`].
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use ds4_model::{generate::GenerateConfig, pipeline::Pipeline};
    ///
    /// let pipeline = Pipeline::open("../../assets/ds4-tiny".as_ref(), &Device::flex())?;
    /// let prompt = pipeline.encode("Once upon a time")?;
    /// let config = GenerateConfig { max_new_tokens: 8, ..pipeline.defaults.clone() };
    /// let text: String = pipeline.generate(config, &prompt)?.collect::<Result<_, _>>()?;
    /// assert_eq!(text, ", and upon the earth, and upon");
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn generate(
        &self,
        config: GenerateConfig,
        prompt: &[u32],
    ) -> Result<TextGeneration<'_>, GenerateError> {
        TextGeneration::new(&self.model, &self.tokenizer, config, prompt)
    }
}

/// How to generate; an error for values that no model can generate with, or not this one.
fn generate_config(
    stored: &GenerationDefaults,
    model: &ModelConfig,
) -> Result<GenerateConfig, ConfigError> {
    let default = GenerateConfig::default();
    let sampling = SamplingConfig {
        temperature: match stored.do_sample {
            Some(false) => 0.0,
            Some(true) => stored.temperature.unwrap_or(1.0),
            None => stored.temperature.unwrap_or(default.sampling.temperature),
        },
        top_k: stored.top_k.unwrap_or(default.sampling.top_k),
        top_p: stored.top_p.unwrap_or(default.sampling.top_p),
        min_p: stored.min_p.unwrap_or(default.sampling.min_p),
        repetition_penalty: stored
            .repetition_penalty
            .unwrap_or(default.sampling.repetition_penalty),
        ..default.sampling
    };
    let mut contradictory = Vec::new();
    let vocab_size = model.vocab_size;
    let eos_token_ids = stored.eos_token_ids.as_deref().unwrap_or_default();
    let ids = stored.bos_token_id.iter().map(|id| ("bos_token_id", id));
    let ids = ids.chain(eos_token_ids.iter().map(|id| ("eos_token_id", id)));
    for (key, id) in ids.filter(|(_, id)| **id as usize >= vocab_size) {
        contradictory.push(format!("{key} is {id}, the vocabulary has {vocab_size}"));
    }
    match sampling.validate(usize::MAX) {
        Err(GenerateError::SamplingParameter {
            name,
            value,
            expected,
        }) => contradictory.push(format!("{name} is {value}, expected {expected}")),
        Err(error) => contradictory.push(error.to_string()),
        Ok(()) => {}
    }
    if contradictory.is_empty() {
        return Ok(GenerateConfig {
            max_new_tokens: stored.max_new_tokens.unwrap_or(default.max_new_tokens),
            sampling,
            stop_tokens: eos_token_ids.iter().skip(1).copied().collect(),
            ..default
        });
    }
    Err(ConfigErrorKind::Invalid {
        missing: Vec::new(),
        contradictory,
    }
    .into())
}
