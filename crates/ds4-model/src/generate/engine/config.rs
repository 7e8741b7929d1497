//! What an engine is made with, and what it is asked for.

use std::ops::Range;

use burn_ds4_ops::matmul::INVARIANT_ROWS;
use burn_ds4_ops::sampling::{MAX_TOP_LOG_PROBS, SamplingParams};

use super::constraint::Constraint;
use super::recorder::WORTH_RECORDING;
use crate::cache::CacheError;
use crate::config::{MAX_DRAFTS, ModelConfig};
use crate::generate::error::GenerateError;
use crate::generate::sampling::SamplingConfig;

/// Most texts that an engine decodes at a time.
pub const MAX_LANES: usize = 256;

/// Prompt tokens per forward call by default. For fewer, a GPU reads weights that are not worth it.
pub const DEFAULT_PREFILL_CHUNK: usize = 2048;

/// Positions of a page by default.
const DEFAULT_PAGE: usize = 256;

/// How an [`Engine`](super::Engine) decodes.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Most texts at a time, 1 to [`MAX_LANES`]; others wait.
    pub lanes: usize,
    /// Tokens that are drafted per step, 0 (none) to [`MAX_DRAFTS`], or to the [block
    /// size](crate::config::DsparkParams::block_size) of a DSpark drafter. They change no token.
    pub drafts: usize,
    /// A draft of a DSpark drafter is left out, with those after it, if the drafter gives it a
    /// smaller probability to be accepted than this, 0 (leaves none out) to 1. It changes no token.
    ///
    /// Above 0, a step verifies only as many drafts as one of its texts has. The host has to know
    /// that number before a step begins, so no step runs ahead then, whatever
    /// [`steps_ahead`](Self::steps_ahead) is; and a step is recorded for each number.
    pub draft_confidence: f64,
    /// Prompt tokens per forward call. Between two of them, the texts that are already being
    /// continued go on by a step.
    #[doc(alias = "chunked_prefill")]
    pub prefill_chunk: usize,
    /// Positions of a page: of so many at a time, a text takes memory as it becomes longer. It is
    /// rounded up to what all layers divide. Kernels read pages of 256 as fast as any.
    #[doc(alias = "block_size")]
    pub page: usize,
    /// Most pages that texts have, if they are fewer than there is memory for.
    #[doc(alias = "num_gpu_blocks_override")]
    pub pages: Option<usize>,
    /// Most tokens of a text that the model processes, prompt and answer together, if they are
    /// fewer than the model's context. A text ends there. A step takes some time for what there may
    /// be of each text, whether it is there or not, so that a shorter context is faster.
    pub context: Option<usize>,
    /// Most bytes that the caches of lanes and of prompts in progress take, on all devices
    /// together: their pages, of which those of kept prompts are some, and what each has besides. A
    /// text waits until there is memory for it. A copy of the latter comes on top while lanes are
    /// added, for which there has to be free memory.
    ///
    /// Where devices tell what they have left once the model is loaded (CUDA), it is no more than
    /// nine tenths of that, with at least 2 GiB left for the work of steps where there are 8 GiB.
    /// All pages are made there when the first text comes.
    pub cache_bytes: Option<usize>,
    /// Bytes that the engine keeps of prompts, the least recently used going first, so that a
    /// prompt that begins like one before need not be processed again. Their pages make way for
    /// texts, and texts that begin alike share them. What texts in lanes keep of their own prompts
    /// besides takes about as much again. 0 keeps none.
    #[doc(alias = "prefix_caching")]
    pub prefix_bytes: usize,
    /// Whether a kept prompt is used only as far as it was processed in chunks that the new prompt
    /// would have too: its text is then the same to the bit. Otherwise it is the same up to
    /// rounding.
    pub exact_prefix: bool,
    /// Whether steps may be recorded and replayed as a graph where the device can, which changes no
    /// token.
    pub graphs: bool,
    /// Whether the lanes of a model on several devices are in as many groups, so that all devices
    /// work at once where there are texts enough, which changes no token.
    pub overlap: bool,
    /// Steps that may be replayed before the host reads the one before: 1 is enough for the device
    /// not to wait.
    pub steps_ahead: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            lanes: MAX_LANES,
            drafts: 0,
            draft_confidence: 0.0,
            prefill_chunk: DEFAULT_PREFILL_CHUNK,
            page: DEFAULT_PAGE,
            pages: None,
            context: None,
            cache_bytes: None,
            prefix_bytes: 0,
            exact_prefix: false,
            graphs: true,
            overlap: true,
            steps_ahead: 1,
        }
    }
}

impl EngineConfig {
    /// Tokens that a text has to want so that all steps are recorded of which it makes use.
    pub fn recording_tokens(&self) -> usize {
        let fewer = fewer_drafts(self.drafts, self.draft_confidence > 0.0);
        WORTH_RECORDING * ((1 + self.drafts) + fewer.map(|drafts| 1 + drafts).sum::<usize>())
    }

    /// Most tokens of a text that are processed.
    pub(super) fn longest(&self, model: &ModelConfig) -> usize {
        let longest = model.max_position_embeddings;
        self.context.map_or(longest, |context| context.min(longest))
    }

    /// Checks every field.
    ///
    /// # Errors
    ///
    /// If a field is outside its range.
    pub fn validate(&self) -> Result<(), GenerateError> {
        let zero = |argument| Err(CacheError::Zero { argument }.into());
        if self.lanes > MAX_LANES {
            return Err(GenerateError::TooManyLanes {
                lanes: self.lanes,
                maximum: MAX_LANES,
            });
        }
        if self.drafts > MAX_DRAFTS {
            return Err(GenerateError::TooManyDrafts {
                drafts: self.drafts,
                maximum: MAX_DRAFTS,
            });
        }
        if !(0.0..=1.0).contains(&self.draft_confidence) {
            return Err(GenerateError::DraftConfidence {
                value: self.draft_confidence,
            });
        }
        match (self.lanes, self.prefill_chunk, self.page) {
            (0, ..) => zero("lanes"),
            (_, 0, _) => Err(GenerateError::EmptyPrefillChunk),
            (.., 0) => zero("page"),
            _ if self.context == Some(0) => zero("context"),
            _ => Ok(()),
        }
    }

    /// Whether a text is the same to the bit whatever else runs: steps have 16 tokens at most, and
    /// kept prompts are used only where they change nothing.
    ///
    /// # Example
    ///
    /// ```
    /// use ds4_model::generate::EngineConfig;
    ///
    /// let config = EngineConfig { lanes: 8, drafts: 1, ..EngineConfig::default() };
    /// assert!(config.is_deterministic());
    /// // 24 tokens a step.
    /// assert!(!EngineConfig { drafts: 2, ..config }.is_deterministic());
    /// ```
    pub fn is_deterministic(&self) -> bool {
        let tokens = self.lanes.saturating_mul(1 + self.drafts);
        tokens <= INVARIANT_ROWS && (self.prefix_bytes == 0 || self.exact_prefix)
    }
}

/// A text that an [`Engine`](super::Engine) is to continue.
#[derive(Clone, Debug)]
pub struct Request {
    /// Token ids of the text so far.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most.
    pub max_new_tokens: usize,
    /// How a token is chosen.
    pub sampling: SamplingConfig,
    /// Tokens that end the text, besides the model's end-of-sequence token.
    pub stop_tokens: Vec<u32>,
    /// Whether the end-of-sequence token does not end the text.
    pub ignore_eos: bool,
    /// Wants the log-probability of each token, and of so many of the most likely ones.
    pub log_probs: Option<usize>,
    /// Texts of a higher priority are served first, and give way last where memory is short. 0 by
    /// default.
    pub priority: i32,
    /// Decides which tokens the text may have.
    pub constraint: Option<Box<dyn Constraint>>,
}

impl Request {
    /// Continues `prompt` by at most `max_new_tokens` tokens, greedily.
    pub fn new(prompt: &[u32], max_new_tokens: usize) -> Self {
        Self {
            prompt: prompt.to_vec(),
            max_new_tokens,
            sampling: SamplingConfig::default(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            log_probs: None,
            priority: 0,
            constraint: None,
        }
    }

    /// Checks every field against the model's configuration.
    ///
    /// # Errors
    ///
    /// If a field is outside its range.
    pub fn validate(&self, config: &ModelConfig) -> Result<(), GenerateError> {
        let vocab_size = config.vocab_size;
        if self.prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let beyond = |token: &u32| *token as usize >= vocab_size;
        if let Some(index) = self.prompt.iter().position(beyond) {
            return Err(GenerateError::PromptToken {
                index,
                token: self.prompt[index],
                vocab_size,
            });
        }
        let maximum = config.max_position_embeddings;
        if self.prompt.len() > maximum {
            let tokens = self.prompt.len();
            return Err(GenerateError::PromptTooLong { tokens, maximum });
        }
        if self.max_new_tokens == 0 {
            let argument = "max_new_tokens";
            return Err(CacheError::Zero { argument }.into());
        }
        if let Some(top) = self.log_probs.filter(|top| *top > MAX_TOP_LOG_PROBS) {
            return Err(GenerateError::TooManyLogProbs {
                top,
                maximum: MAX_TOP_LOG_PROBS,
            });
        }
        self.sampling.validate(vocab_size)
    }

    /// Whether the most likely token is always chosen, whatever came before.
    pub(super) fn is_greedy(&self) -> bool {
        let SamplingParams { temperature, .. } = self.sampling.filters();
        temperature == 0.0 && !self.sampling.changes_logits()
    }
}

/// The numbers of verified drafts whose steps are worth recording where so many tokens follow: all
/// drafts first, then the fewest, which take the least. Only all, unless drafts may be left out.
pub(super) fn worth_recording(tokens: usize, all: usize, leaves_out: bool) -> Vec<usize> {
    let mut left = tokens;
    let is_worth_it = |drafts: &usize| {
        let rest = left.checked_sub(WORTH_RECORDING * (1 + drafts));
        left = rest.unwrap_or(0);
        rest.is_some()
    };
    std::iter::once(all)
        .chain(fewer_drafts(all, leaves_out))
        .take_while(is_worth_it)
        .collect()
}

/// Of the numbers of verified drafts whose steps may be recorded, those below `all`.
pub(super) fn fewer_drafts(all: usize, leaves_out: bool) -> Range<usize> {
    0..if leaves_out { all } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_16_tokens_a_step_and_prefixes_up_to_rounding_are_not_deterministic() {
        let cases = [
            (16, 0, 0, false, true),
            (17, 0, 0, false, false),
            (8, 1, 0, false, true),
            (6, 2, 0, false, false),
            (MAX_LANES, MAX_DRAFTS, 0, false, false),
            (8, 1, 1, false, false),
            (8, 1, 1, true, true),
        ];
        for (lanes, drafts, prefix_bytes, exact_prefix, expected) in cases {
            let config = EngineConfig {
                lanes,
                drafts,
                prefix_bytes,
                exact_prefix,
                ..EngineConfig::default()
            };
            assert_eq!(config.is_deterministic(), expected, "{config:?}");
        }
    }

    #[test]
    fn as_many_steps_are_recorded_as_are_worth_it() {
        let one = WORTH_RECORDING;
        assert_eq!(worth_recording(6 * one, 5, false), [5]);
        assert_eq!(worth_recording(100 * one, 5, false), [5]);
        assert_eq!(worth_recording(6 * one - 1, 5, true), [0; 0]);
        assert_eq!(worth_recording(6 * one, 5, true), [5]);
        assert_eq!(worth_recording(9 * one, 5, true), [5, 0, 1]);
        assert_eq!(worth_recording(21 * one, 5, true), [5, 0, 1, 2, 3, 4]);
        assert_eq!(worth_recording(one, 0, true), [0]);
        for draft_confidence in [0.0, 0.3] {
            let config = EngineConfig {
                drafts: 5,
                draft_confidence,
                ..EngineConfig::default()
            };
            let recorded = |tokens| worth_recording(tokens, 5, draft_confidence > 0.0);
            let all = config.recording_tokens();
            assert_eq!(recorded(all), recorded(usize::MAX));
            assert_ne!(recorded(all - 1), recorded(all));
        }
    }
}
