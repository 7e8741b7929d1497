//! The driver: turns a prompt into tokens, one forward call after the other, with or without drafts.

use std::collections::VecDeque;
use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::cycle::{Caches, Cycle};
use super::decoder::Decoder;
use super::error::GenerateError;
use super::proposer::MtpProposer;
use super::sampler::{Sampler, SamplingConfig};
use super::target::Targets;
use super::verifier::{SpeculativeStats, verify};
use crate::cache::{Cache, CacheConfig, Rollback};
use crate::config::ModelConfig;
use crate::flash_head::ProbedHead;
use crate::model::Model;
use crate::trace::Trace;

/// Steps that a device has to do yet while the host reads the token of the one before: enough not to keep it waiting.
const STEPS_AHEAD: usize = 1;

/// Largest number of drafts per round.
pub const MAX_DRAFTS: usize = 4;

/// How to generate.
///
/// Without drafts and without a repetition penalty, tokens are chosen on the device, by a [`Decoder`]. With either of them, logits are
/// read back, and a [`Sampler`] chooses on the host. Greedy text is the same either way; of sampled text the distribution is, but not
/// the tokens of a [seed](SamplingConfig::seed).
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateConfig {
    /// Tokens to generate at most.
    pub max_new_tokens: usize,
    /// How a token is chosen.
    pub sampling: SamplingConfig,
    /// Tokens that the MTP layer drafts per round, 0 (none) to [`MAX_DRAFTS`].
    pub drafts: usize,
    /// Texts at which to stop; they are not part of the output. Used by [`TextGeneration`](super::TextGeneration).
    pub stop_strings: Vec<String>,
    /// Whether to go on after the end-of-sequence token.
    pub ignore_eos: bool,
    /// Prompt tokens per forward call.
    pub prefill_chunk: usize,
    /// Whether a step, or the verification of drafts and the drafting of others, may be recorded and replayed as a graph, which changes
    /// no token. It is where that is faster: without a clustered head and a repetition penalty and, with drafts, where the most likely token
    /// is always taken, on a device that has graphs.
    pub graphs: bool,
}

impl Default for GenerateConfig {
    fn default() -> Self {
        Self {
            max_new_tokens: 256,
            sampling: SamplingConfig::default(),
            drafts: 0,
            stop_strings: Vec::new(),
            ignore_eos: false,
            prefill_chunk: 256,
            graphs: true,
        }
    }
}

impl GenerateConfig {
    /// Checks every field.
    ///
    /// # Errors
    ///
    /// If a field is outside its range.
    pub fn validate(&self) -> Result<(), GenerateError> {
        self.sampling.validate()?;
        if self.drafts > MAX_DRAFTS {
            return Err(GenerateError::TooManyDrafts {
                drafts: self.drafts,
                maximum: MAX_DRAFTS,
            });
        }
        if self.prefill_chunk == 0 {
            return Err(GenerateError::EmptyPrefillChunk);
        }
        Ok(())
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended the sequence.
    EndOfSequence,
    /// A stop string was generated.
    StopString,
    /// The requested number of tokens was generated.
    Length,
    /// The model's longest context was reached.
    ContextFull,
}

/// A generation in progress: an iterator over the new tokens.
///
/// The end-of-sequence token is not yielded unless [`GenerateConfig::ignore_eos`] is set. After an error the iterator ends.
#[derive(Debug)]
pub struct Generation<'a> {
    /// Its recording goes before the caches of decoder and proposer.
    cycle: Option<Cycle<'a>>,
    model: &'a Model,
    max_positions: usize,
    eos_token_id: u32,
    config: GenerateConfig,
    decoder: Decoder<'a>,
    /// Whether the decoder chooses the tokens.
    on_device: bool,
    sampler: Sampler,
    proposer: Option<MtpProposer<'a>>,
    /// Prompt and everything generated. All but the last have been through the model.
    tokens: Vec<u32>,
    /// Tokens the proposer has not seen.
    unseen: Vec<u32>,
    /// Length of the prompt.
    prompt: usize,
    /// Whether the prompt has been through the model.
    prefilled: bool,
    /// Generated tokens that have not been yielded.
    ready: VecDeque<u32>,
    yielded: usize,
    finish: Option<FinishReason>,
    failed: bool,
    stats: SpeculativeStats,
}

impl<'a> Generation<'a> {
    /// Prepares to continue the token ids of `prompt`.
    ///
    /// # Errors
    ///
    /// If the prompt is empty, holds an id outside the vocabulary or fills the model's context, if a field of `config` is outside its
    /// range, drafts are wanted from a model without an MTP layer, or a clustered head is of another vocabulary.
    pub fn new(
        model: &'a Model,
        model_config: &ModelConfig,
        config: GenerateConfig,
        prompt: &[u32],
    ) -> Result<Self, GenerateError> {
        config.validate()?;
        check_prompt(prompt, model_config)?;
        let draft_head = model.mtp.iter().filter_map(|mtp| mtp.flash_head.as_ref());
        check_heads(model.flash_head.iter().chain(draft_head), model_config)?;
        let on_device = config.drafts == 0 && config.sampling.is_memoryless();
        let rollback = if on_device {
            STEPS_AHEAD
        } else {
            config.drafts
        };
        let options = CacheConfig {
            rollback: Rollback::Bounded(rollback),
            ..CacheConfig::default()
        };
        let proposer = (config.drafts > 0)
            .then(|| MtpProposer::new(model, model_config, config.drafts))
            .transpose()?;
        let cycle = (config.graphs && config.drafts > 0 && config.sampling.is_greedy())
            .then(|| Cycle::new(model, config.drafts))
            .flatten();
        let cache = model.new_cache(model_config, options)?;
        let mut decoder = Decoder::new(model, cache, config.graphs)?;
        if on_device {
            decoder = decoder.with_steps_ahead(STEPS_AHEAD);
            decoder = decoder.with_sampling(&config.sampling)?;
        }
        Ok(Self {
            cycle,
            decoder,
            on_device,
            sampler: Sampler::new(config.sampling.clone())?,
            proposer,
            model,
            max_positions: model_config.max_position_embeddings,
            eos_token_id: model_config.eos_token_id,
            config,
            tokens: prompt.to_vec(),
            unseen: Vec::new(),
            prompt: prompt.len(),
            prefilled: false,
            ready: VecDeque::new(),
            yielded: 0,
            finish: None,
            failed: false,
            stats: SpeculativeStats::default(),
        })
    }

    /// Drafts made and accepted so far.
    pub fn stats(&self) -> &SpeculativeStats {
        &self.stats
    }

    /// Why steps are not replayed as graphs, though they were wanted and the device has them.
    pub fn graph_refusal(&self) -> Option<&str> {
        let cycle = self.cycle.as_ref();
        let refusal = cycle.and_then(Cycle::refusal);
        refusal.or(self.decoder.refusal())
    }

    /// Steps, or rounds of drafts, that were replayed as graphs.
    pub fn replays(&self) -> usize {
        self.decoder.replays() + self.cycle.as_ref().map_or(0, Cycle::replays)
    }

    /// Why the generation ended, once it has.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    /// Runs the prompt through the model without generating: afterwards the first token is ready.
    ///
    /// [`next`](Iterator::next) does it by itself; calling it first separates the time of prompt and generation.
    ///
    /// # Errors
    ///
    /// If the device fails, or no token can be chosen from the logits. The generation is over then, and yields nothing more.
    pub fn prefill(&mut self) -> Result<(), GenerateError> {
        if self.failed || self.prefilled || self.config.max_new_tokens == 0 {
            return Ok(());
        }
        let result = self.run_prompt();
        // A prompt that went in halfway cannot go in again.
        self.failed = result.is_err();
        result
    }

    fn run_prompt(&mut self) -> Result<(), GenerateError> {
        let prompt = self.tokens.clone();
        let (chunk, cache) = (self.config.prefill_chunk, self.decoder.cache_mut());
        let proposer = &mut self.proposer;
        let streams = prefill(self.model, &prompt, chunk, cache, |streams, seen| {
            let Some(proposer) = proposer else {
                return Ok(());
            };
            proposer.observe(streams);
            let next = seen.start + 1..(seen.end + 1).min(prompt.len());
            proposer.advance(&prompt[next])
        })?;
        let token = if self.on_device {
            self.decoder.choose(streams)?
        } else {
            let targets = Targets::read(self.model, streams, self.sampler.config())?;
            let distribution = targets.distribution(0, &self.sampler, &self.tokens)?;
            let token = self.sampler.sample(&distribution);
            self.decoder.set_token(token);
            token
        };
        self.prefilled = true;
        self.accept(&[token]);
        Ok(())
    }

    /// The next token or the next few.
    fn generate(&mut self) -> Result<(), GenerateError> {
        if self.cycles()? {
            return Ok(());
        }
        if !self.on_device {
            let round = self.round();
            return match &mut self.cycle {
                Some(cycle) => cycle.explain(round),
                None => round,
            };
        }
        let tokens = self.decoder.decode(self.wanted())?;
        self.accept(&tokens);
        Ok(())
    }

    /// A round, or the next few, by a recorded cycle; `false` if there is none, or if there is no room for as many drafts.
    ///
    /// A cycle may go on beyond the last token that is wanted: a launched round, which would make fewer drafts, takes longer than what is
    /// left out of it.
    fn cycles(&mut self) -> Result<bool, GenerateError> {
        let wanted = self.wanted();
        let (Some(cycle), Some(proposer)) = (&mut self.cycle, &mut self.proposer) else {
            return Ok(false);
        };
        let Some(&last) = self.tokens.last() else {
            return Err(GenerateError::EmptyPrompt);
        };
        let drafts = cycle.drafts();
        let verdicts = if cycle.is_worth_recording([self.decoder.cache(), proposer.cache()], wanted)
        {
            let drafts = proposer.draft(&self.unseen, drafts)?;
            self.unseen.clear();
            cycle.record(
                Caches {
                    trunk: self.decoder.cache_mut(),
                    mtp: proposer.cache_mut(),
                },
                last,
                &drafts,
            )?
        } else {
            let caches = Caches {
                trunk: self.decoder.cache_mut(),
                mtp: proposer.cache_mut(),
            };
            cycle.replay(caches, wanted)?.into_iter().collect()
        };
        for verdict in &verdicts {
            // What a round of fewer drafts would have come to.
            let wanted = self.wanted();
            let drafts = drafts.min(wanted.saturating_sub(1));
            self.stats.record(drafts, verdict.accepted.min(drafts));
            self.accept(&verdict.tokens[..verdict.tokens.len().min(wanted)]);
            // The cycle has shown them to the proposer's layer.
            self.unseen.clear();
        }
        Ok(!verdicts.is_empty())
    }

    /// One forward call of the trunk, and the tokens that come of it.
    fn round(&mut self) -> Result<(), GenerateError> {
        let drafts = self.draft()?;
        let Some(last) = self.tokens.last() else {
            return Err(GenerateError::EmptyPrompt);
        };
        let input: Vec<u32> = [*last].into_iter().chain(drafts.iter().copied()).collect();
        let device = self.model.embedding.val().device();
        let streams = self.model.forward_streams(
            ids_tensor(&input, &device),
            self.decoder.cache_mut(),
            &Trace::off(),
        )?;
        let targets = Targets::read(self.model, streams.clone(), self.sampler.config())?;

        let sampler = self.sampler.clone();
        let history = &self.tokens;
        let target = |index: usize, accepted: &[u32]| {
            let history = [history, accepted].concat();
            targets.distribution(index, &sampler, &history)
        };
        let verdict = verify(&drafts, target, &mut self.sampler)?;

        let kept = 1 + verdict.accepted;
        self.decoder.cache_mut().truncate(input.len() - kept)?;
        if let Some(proposer) = &mut self.proposer {
            let [batch, _, n, d_model] = streams.dims();
            proposer.observe(streams.slice([0..batch, 0..kept, 0..n, 0..d_model]));
            self.stats.record(drafts.len(), verdict.accepted);
        }
        self.accept(&verdict.tokens);
        Ok(())
    }

    /// Drafts as many tokens as are wanted, can still be yielded, fit the context, and do not make the cache grow before its time.
    fn draft(&mut self) -> Result<Vec<u32>, GenerateError> {
        let wanted = self.wanted();
        let Some(proposer) = &mut self.proposer else {
            return Ok(Vec::new());
        };
        let room = self.max_positions - self.tokens.len();
        let count = self.config.drafts.min(wanted - 1).min(room);
        let count = count.min(self.decoder.cache().room() - 1);
        if let Some(cycle) = &mut self.cycle
            && let Some(mut drafts) = cycle.leave()?
        {
            drafts.truncate(count);
            return Ok(drafts);
        }
        let drafts = proposer.draft(&self.unseen, count)?;
        if count > 0 {
            self.unseen.clear();
        }
        Ok(drafts)
    }

    /// Tokens to be generated yet.
    fn wanted(&self) -> usize {
        self.config.max_new_tokens - (self.tokens.len() - self.prompt)
    }

    fn accept(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        if self.proposer.is_some() {
            self.unseen.extend_from_slice(tokens);
        }
        self.ready.extend(tokens);
    }

    fn advance(&mut self) -> Result<Option<u32>, GenerateError> {
        if self.finish.is_some() {
            return Ok(None);
        }
        if self.yielded >= self.config.max_new_tokens {
            return Ok(self.end(FinishReason::Length));
        }
        if self.ready.is_empty() {
            if !self.prefilled {
                self.prefill()?;
            } else if self.tokens.len() > self.max_positions {
                return Ok(self.end(FinishReason::ContextFull));
            } else {
                self.generate()?;
            }
        }
        let Some(token) = self.ready.pop_front() else {
            return Ok(self.end(FinishReason::Length));
        };
        if token == self.eos_token_id && !self.config.ignore_eos {
            return Ok(self.end(FinishReason::EndOfSequence));
        }
        self.yielded += 1;
        Ok(Some(token))
    }

    fn end(&mut self, reason: FinishReason) -> Option<u32> {
        self.finish = Some(reason);
        None
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

/// Checks what a text is to begin with.
pub(super) fn check_prompt(prompt: &[u32], config: &ModelConfig) -> Result<(), GenerateError> {
    if prompt.is_empty() {
        return Err(GenerateError::EmptyPrompt);
    }
    for (index, token) in prompt.iter().enumerate() {
        if *token as usize >= config.vocab_size {
            return Err(GenerateError::PromptToken {
                index,
                token: *token,
                vocab_size: config.vocab_size,
            });
        }
    }
    if prompt.len() > config.max_position_embeddings {
        return Err(GenerateError::PromptTooLong {
            tokens: prompt.len(),
            maximum: config.max_position_embeddings,
        });
    }
    Ok(())
}

/// Checks that clustered heads are of the model's vocabulary.
pub(super) fn check_heads<'h>(
    heads: impl Iterator<Item = &'h ProbedHead>,
    config: &ModelConfig,
) -> Result<(), GenerateError> {
    for head in heads {
        let tokens = head.head().vocabulary();
        if tokens != config.vocab_size {
            return Err(GenerateError::HeadVocabulary {
                tokens,
                vocab_size: config.vocab_size,
            });
        }
    }
    Ok(())
}

/// Runs a prompt into the cache of its one sequence, in portions of `chunk` tokens, and gives the streams of its last position. `seen` is
/// told the streams of each portion, and which positions of the prompt they are of.
pub(super) fn prefill(
    model: &Model,
    prompt: &[u32],
    chunk: usize,
    cache: &mut Cache,
    mut seen: impl FnMut(Tensor<4>, Range<usize>) -> Result<(), GenerateError>,
) -> Result<Tensor<4>, GenerateError> {
    let device = model.embedding.val().device();
    let (mut last, mut start) = (None, 0);
    for ids in prompt.chunks(chunk) {
        let streams = model.forward_streams(ids_tensor(ids, &device), cache, &Trace::off())?;
        last = Some(streams.clone().narrow(1, ids.len() - 1, 1));
        let end = start + ids.len();
        seen(streams, start..end)?;
        start = end;
    }
    last.ok_or(GenerateError::EmptyPrompt)
}

/// Token ids as a batch of one sequence: `[1, ids]`.
pub(super) fn ids_tensor(ids: &[u32], device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    let count = ids.len();
    Tensor::from_data(TensorData::new(ids, [1, count]), device)
}
