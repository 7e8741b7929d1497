//! One text as an iterator over its tokens.

use std::collections::VecDeque;

use super::engine::{DEFAULT_PREFILL_CHUNK, Engine, EngineConfig, FinishReason, Output, Request};
use super::error::GenerateError;
use super::request_id::RequestId;
use super::sampling::SamplingConfig;
use super::stats::SpeculativeStats;
use super::tokenizer::SpecialTokens;
use crate::model::Model;

/// How to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateConfig {
    /// Tokens to generate at most.
    pub max_new_tokens: usize,
    /// How a token is chosen.
    pub sampling: SamplingConfig,
    /// As [`EngineConfig::drafts`].
    pub drafts: usize,
    /// As [`EngineConfig::draft_confidence`].
    pub draft_confidence: f64,
    /// Tokens at which to stop, besides the end-of-sequence token.
    pub stop_tokens: Vec<u32>,
    /// Texts at which to stop; they are not part of the output. Used by
    /// [`TextGeneration`](super::TextGeneration).
    pub stop_strings: Vec<String>,
    /// What becomes of special tokens, such as those of tool calls, in the text. Used by
    /// [`TextGeneration`](super::TextGeneration).
    pub special_tokens: SpecialTokens,
    /// Whether to go on after the end-of-sequence token.
    pub ignore_eos: bool,
    /// Prompt tokens per forward call.
    pub prefill_chunk: usize,
    /// As [`EngineConfig::context`]. `None` for what the prompt and `max_new_tokens` take.
    pub context: Option<usize>,
    /// Whether a step may be recorded and replayed as a graph where the device can, which changes
    /// no token.
    pub graphs: bool,
}

impl Default for GenerateConfig {
    fn default() -> Self {
        Self {
            max_new_tokens: 256,
            sampling: SamplingConfig::default(),
            drafts: 0,
            draft_confidence: 0.0,
            stop_tokens: Vec::new(),
            stop_strings: Vec::new(),
            special_tokens: SpecialTokens::default(),
            ignore_eos: false,
            prefill_chunk: DEFAULT_PREFILL_CHUNK,
            context: None,
            graphs: true,
        }
    }
}

impl GenerateConfig {
    /// Checks every field, as far as that is possible without a model.
    ///
    /// # Errors
    ///
    /// If a field is outside its range.
    pub fn validate(&self) -> Result<(), GenerateError> {
        self.engine(1).validate()?;
        self.sampling.validate(usize::MAX)
    }

    /// The engine for a prompt of so many tokens.
    fn engine(&self, prompt: usize) -> EngineConfig {
        EngineConfig {
            lanes: 1,
            drafts: self.drafts,
            draft_confidence: self.draft_confidence,
            prefill_chunk: self.prefill_chunk,
            context: Some(self.context_for(prompt)),
            graphs: self.graphs,
            ..EngineConfig::default()
        }
    }

    /// The context of a generation, if its prompt has so many tokens: a power of two, since caches
    /// of other sizes may have other kernels.
    pub fn context_for(&self, prompt: usize) -> usize {
        self.context.unwrap_or_else(|| {
            let tokens = prompt.saturating_add(self.max_new_tokens);
            tokens.checked_next_power_of_two().unwrap_or(tokens)
        })
    }
}

/// A generation in progress: an iterator over the new tokens.
///
/// A token that ends the text is not yielded: the end-of-sequence token, unless
/// [`GenerateConfig::ignore_eos`] is set, and those of [`GenerateConfig::stop_tokens`]. After an
/// error the iterator ends.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use ds4_model::generate::{FinishReason, GenerateConfig, Generation};
/// use ds4_model::pipeline::Pipeline;
///
/// let pipeline = Pipeline::open("../../assets/ds4-tiny".as_ref(), &Device::flex())?;
/// let prompt = pipeline.encode("Once upon a time")?;
/// let config = GenerateConfig { max_new_tokens: 8, drafts: 1, ..GenerateConfig::default() };
/// let mut generation = Generation::new(&pipeline.model, config, &prompt)?;
/// let tokens = generation.by_ref().collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(tokens.len(), 8);
/// assert_eq!(generation.finish_reason(), Some(FinishReason::Length));
/// // Each draft that is accepted saves a step.
/// assert!(generation.stats().accepted > 0);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Generation<'a> {
    engine: Engine<'a>,
    /// `None` where no token is wanted.
    request: Option<RequestId>,
    /// Generated tokens that have not been yielded.
    ready: VecDeque<Output>,
    finish: Option<FinishReason>,
    failed: bool,
}

impl<'a> Generation<'a> {
    /// Prepares to continue the token ids of `prompt`.
    ///
    /// # Errors
    ///
    /// If the prompt is empty, holds an id outside the vocabulary or fills the model's context, if
    /// a field of `config` is outside its range, drafts are wanted from a model without a drafter,
    /// or a clustered head is of another vocabulary.
    pub fn new(
        model: &'a Model,
        config: GenerateConfig,
        prompt: &[u32],
    ) -> Result<Self, GenerateError> {
        let request = Request {
            sampling: config.sampling.clone(),
            stop_tokens: config.stop_tokens.clone(),
            ignore_eos: config.ignore_eos,
            ..Request::new(prompt, config.max_new_tokens.max(1))
        };
        let mut engine = Engine::new(model, config.engine(prompt.len()))?;
        let request = match config.max_new_tokens {
            0 => request.validate(model.config()).map(|()| None)?,
            _ => Some(engine.add(request)?),
        };
        Ok(Self {
            engine,
            finish: request.is_none().then_some(FinishReason::Length),
            request,
            ready: VecDeque::new(),
            failed: false,
        })
    }

    /// Drafts made and accepted so far.
    pub fn stats(&self) -> &SpeculativeStats {
        self.engine.stats()
    }

    /// Why steps are not replayed as graphs, though they were wanted and the device has them.
    pub fn graph_refusal(&self) -> Option<&str> {
        self.engine.graph_refusal()
    }

    /// Steps that were replayed as graphs.
    pub fn replays(&self) -> usize {
        self.engine.replays()
    }

    /// Why the generation ended, once it has.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    /// Runs the prompt through the model: afterwards the first token is ready.
    ///
    /// [`next`](Iterator::next) does it by itself; calling it first separates the time of prompt
    /// and generation.
    ///
    /// # Errors
    ///
    /// If the device fails. The generation is over then, and yields nothing more.
    pub fn prefill(&mut self) -> Result<(), GenerateError> {
        let progress = self
            .request
            .and_then(|request| self.engine.progress(request));
        if self.failed || progress.is_none_or(|progress| progress.generated > 0) {
            return Ok(());
        }
        let result = self.generate();
        self.failed = result.is_err();
        result
    }

    /// The next token or the next few.
    fn generate(&mut self) -> Result<(), GenerateError> {
        while self.ready.is_empty() {
            self.ready.extend(self.engine.step()?);
        }
        Ok(())
    }

    fn advance(&mut self) -> Result<Option<u32>, GenerateError> {
        if self.finish.is_some() {
            return Ok(None);
        }
        self.generate()?;
        let Some(output) = self.ready.pop_front() else {
            return Ok(None);
        };
        let token = output.token?;
        self.finish = output.finish;
        let ends = [FinishReason::EndOfSequence, FinishReason::StopToken].map(Some);
        Ok((!ends.contains(&self.finish)).then_some(token))
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<u32, GenerateError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let token = self.advance();
        self.failed = token.is_err();
        token.transpose()
    }
}
