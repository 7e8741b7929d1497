//! Continuous batching: texts that join and leave while the others go on, one step for all of them.

mod lanes;

use std::fmt;

use super::choice::{Choice, Chooser};
use super::driver::{FinishReason, GenerateConfig, check_heads, check_prompt, prefill};
use super::error::GenerateError;
use super::sampler::SamplingConfig;
use super::target::read_tokens;
use crate::cache::{Cache, CacheConfig, CacheError, Rollback};
use crate::config::ModelConfig;
use crate::model::Model;

use lanes::Lanes;

/// Most sequences that a [`Batch`] has at a time.
pub const MAX_SEQUENCES: usize = 64;

/// How a [`Batch`] decodes.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchConfig {
    /// How a token is chosen, in all sequences alike. Each has a seed of its own in place of the one given here.
    pub sampling: SamplingConfig,
    /// Whether a sequence goes on after the end-of-sequence token.
    pub ignore_eos: bool,
    /// Prompt tokens per forward call.
    pub prefill_chunk: usize,
    /// Positions of a sequence that fit before the cache first grows.
    pub capacity: usize,
    /// Whether a step of up to 16 sequences may be recorded and replayed as a graph, which changes no token.
    pub graphs: bool,
}

impl Default for BatchConfig {
    fn default() -> Self {
        let single = GenerateConfig::default();
        Self {
            sampling: single.sampling,
            ignore_eos: single.ignore_eos,
            prefill_chunk: single.prefill_chunk,
            capacity: CacheConfig::default().capacity,
            graphs: single.graphs,
        }
    }
}

/// Names a sequence of a [`Batch`]. No other one of the same batch ever has the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)
    }
}

/// A token of a sequence.
#[derive(Debug)]
pub struct BatchToken {
    /// Of which sequence.
    pub sequence: SequenceId,
    /// The token, or why none can be chosen: then the sequence has left the batch.
    pub token: Result<u32, GenerateError>,
    /// Why it was the last one: the sequence has left the batch. At its end, the end-of-sequence token is a token like others.
    pub finish: Option<FinishReason>,
}

/// Recordings of a [`Batch`], and the memory that they take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphUsage {
    /// Steps that are recorded at present: at most one, as growth replaces the tensors that an earlier one would work on.
    pub recordings: usize,
    /// Bytes by which the memory that Burn has reserved on the device grew from before the steps that precede a recording until after
    /// it. That counts the workspace and the graph's own tensors, the copy of the cache that is kept for the time of it, and whatever
    /// other threads have allocated meanwhile; not what was reserved already, nor what the driver keeps of a graph. `None` where the device does not tell.
    pub bytes: Option<u64>,
}

/// What the host knows of a sequence.
#[derive(Clone, Debug)]
struct Sequence {
    id: SequenceId,
    /// Tokens to come.
    remaining: usize,
    /// Positions in the cache.
    positions: usize,
    /// Whether it has been part of a step.
    has_stepped: bool,
}

/// Decodes many texts at once: sequences join with a prompt and leave when they are finished, or earlier, and each step chooses a token
/// for all of them.
///
/// Tokens are chosen and fed to the next step on the device. The host reads them once a step. As by a [`Decoder`](super::Decoder), a
/// step is recorded as a graph where the device can and replayed until the batch has to grow, and with one warning launched where that
/// fails, with the same consequences. With room for more than 16 sequences, steps are always launched.
///
/// There is room for 1, 2, 4 and so on up to [`MAX_SEQUENCES`] sequences. It doubles when one joins that there is none for, and the cache's
/// capacity when the longest reaches it; neither shrinks again. A step costs what the room is for: what is vacant is computed, and seen
/// by nobody.
///
/// # Bits
///
/// A sequence's tokens do not depend on when others join or leave and, with a seed, not on where in the batch it is. With room for
/// no more than 16 sequences, they and their logits are those of decoding the text alone, to the bit: by [`Generation`](super::Generation),
/// given the same [`BatchConfig::prefill_chunk`] and, where there are no kernels, while the cache has the same capacity. With room for more,
/// general matrix products take over, which round differently: the logits are those of the text alone but for rounding, and the tokens are
/// but for near-ties.
///
/// # Example
///
/// ```
/// use ds4_model::config::ModelConfig;
/// use ds4_model::generate::{Batch, BatchConfig, GenerateError, SequenceId};
/// use ds4_model::model::Model;
///
/// /// At most `count` tokens after each of the prompts.
/// fn continuations(
///     model: &Model,
///     config: &ModelConfig,
///     prompts: &[Vec<u32>],
///     count: usize,
/// ) -> Result<Vec<(SequenceId, Vec<u32>)>, GenerateError> {
///     let mut batch = Batch::new(model, config, BatchConfig::default())?;
///     let mut texts = Vec::new();
///     for (seed, prompt) in (0..).zip(prompts) {
///         texts.push((batch.join(prompt, count, seed)?, Vec::new()));
///     }
///     while !batch.is_idle() {
///         for output in batch.step()? {
///             let token = output.token?;
///             let text = texts.iter_mut().find(|(id, _)| *id == output.sequence);
///             text.expect("it has joined").1.push(token);
///         }
///     }
///     Ok(texts)
/// }
/// ```
#[derive(Debug)]
pub struct Batch<'a> {
    lanes: Lanes<'a>,
    model_config: ModelConfig,
    config: BatchConfig,
    /// By lane.
    sequences: Vec<Option<Sequence>>,
    /// First tokens that were chosen since the last step.
    first: Vec<BatchToken>,
    joined: u64,
}

impl<'a> Batch<'a> {
    /// Makes an empty batch.
    ///
    /// # Errors
    ///
    /// If a field of `config` is out of range, the repetition penalty is not 1 (the tokens before are not looked at), or the model has a
    /// clustered head of another vocabulary.
    pub fn new(
        model: &'a Model,
        model_config: &ModelConfig,
        config: BatchConfig,
    ) -> Result<Self, GenerateError> {
        if config.prefill_chunk == 0 {
            return Err(GenerateError::EmptyPrefillChunk);
        }
        if config.capacity == 0 {
            return Err(CacheError::Zero {
                argument: "capacity",
            }
            .into());
        }
        check_heads(model.flash_head.iter(), model_config)?;
        let device = model.embedding.val().device();
        let chooser = Chooser::new(&config.sampling, &device)?;
        let cache = new_cache(model, model_config, config.capacity)?;
        Ok(Self {
            lanes: Lanes::new(model, cache, chooser, config.graphs)?,
            model_config: model_config.clone(),
            config,
            sequences: vec![None],
            first: Vec::new(),
            joined: 0,
        })
    }

    /// Chooses tokens by `choose` in place of the sampling that was configured.
    ///
    /// It may only launch device work, as [`Decoder::with_choice`](super::Decoder::with_choice) says.
    #[must_use]
    pub fn with_choice(mut self, choose: Choice) -> Self {
        self.lanes.chooser_mut().set_own(choose);
        self
    }

    /// Adds the text that begins with `prompt`, to be continued by at most `max_tokens` tokens, drawn by the random numbers of `seed`.
    ///
    /// The prompt runs through the model by itself, at once; the others wait. Its first token comes with the next [step](Self::step).
    ///
    /// # Errors
    ///
    /// If the prompt is empty, too long or has a token outside the vocabulary, `max_tokens` is 0, there are [`MAX_SEQUENCES`] sequences
    /// already, no first token can be chosen, or the device fails. The batch is as before, unless it was the device.
    pub fn join(
        &mut self,
        prompt: &[u32],
        max_tokens: usize,
        seed: u64,
    ) -> Result<SequenceId, GenerateError> {
        check_prompt(prompt, &self.model_config)?;
        if max_tokens == 0 {
            return Err(CacheError::Zero {
                argument: "max_tokens",
            }
            .into());
        }
        if self.sequences() == MAX_SEQUENCES {
            return Err(GenerateError::BatchFull {
                maximum: MAX_SEQUENCES,
            });
        }
        let capacity = self.config.capacity;
        let mut text = new_cache(self.lanes.model(), &self.model_config, capacity)?;
        let (model, chunk) = (self.lanes.model(), self.config.prefill_chunk);
        let streams = prefill(model, prompt, chunk, &mut text, |_, _| Ok(()))?;
        let chooser = self.lanes.chooser().with_seed(seed);
        let hidden = self.lanes.model().hidden(streams);
        let (token, _) = chooser.choose(self.lanes.model(), hidden, text.start())?;
        let id = SequenceId(self.joined);
        let mut sequence = Sequence {
            id,
            remaining: max_tokens,
            positions: prompt.len(),
            has_stepped: false,
        };
        let first = self.output(&mut sequence, read_tokens(token)?[0]);
        let token = match &first {
            BatchToken {
                token: Ok(token), ..
            } => *token,
            BatchToken { token: Err(_), .. } => return Err(self.no_candidate()),
        };
        if first.finish.is_none() {
            let lane = self.vacant_lane();
            self.lanes.place(lane, &text, token, seed)?;
            self.sequences[lane] = Some(sequence);
        }
        self.joined += 1;
        self.first.push(first);
        Ok(id)
    }

    /// Ends a sequence before its time; what it would still have told is dropped.
    ///
    /// # Errors
    ///
    /// If there is no such sequence, or no longer.
    pub fn leave(&mut self, sequence: SequenceId) -> Result<(), GenerateError> {
        let told = self.first.len();
        self.first.retain(|first| first.sequence != sequence);
        match self.lane(sequence) {
            Some(lane) => self.vacate(lane),
            None if self.first.len() < told => Ok(()),
            None => Err(GenerateError::UnknownSequence { sequence }),
        }
    }

    /// Chooses the next token of every sequence: theirs, those of one sequence in their order, with the first tokens of sequences that
    /// have joined since the last call. Where the step is recorded, these are the next few tokens of each.
    ///
    /// Without sequences, nothing is done.
    ///
    /// # Errors
    ///
    /// If the device fails. After that, the batch is not to be used any more.
    pub fn step(&mut self) -> Result<Vec<BatchToken>, GenerateError> {
        let remaining = self.sequences.iter().flatten();
        let Some(wanted) = remaining.map(|sequence| sequence.remaining).max() else {
            return Ok(std::mem::take(&mut self.first));
        };
        let steps = self.lanes.advance(wanted)?;
        let mut outputs = std::mem::take(&mut self.first);
        for tokens in steps {
            for (lane, token) in tokens.into_iter().enumerate() {
                // What comes after the last token of a sequence is dropped.
                let Some(mut sequence) = self.sequences[lane].take() else {
                    continue;
                };
                sequence.positions += 1;
                sequence.has_stepped = true;
                let output = self.output(&mut sequence, token);
                if output.token.is_ok() && output.finish.is_none() {
                    self.sequences[lane] = Some(sequence);
                }
                outputs.push(output);
            }
        }
        for lane in 0..self.sequences.len() {
            if self.sequences[lane].is_none() && self.lanes.cache().lengths()[lane] > 0 {
                self.lanes.vacate(lane)?;
            }
        }
        Ok(outputs)
    }

    /// Sequences that are in the batch.
    pub fn sequences(&self) -> usize {
        self.sequences.iter().flatten().count()
    }

    /// Whether there is nothing to be told any more, until another sequence joins.
    pub fn is_idle(&self) -> bool {
        self.sequences() == 0 && self.first.is_empty()
    }

    /// Sequences that there is room for before the batch grows.
    pub fn room(&self) -> usize {
        self.sequences.len()
    }

    /// Positions of each sequence that there is room for before the cache grows.
    pub fn capacity(&self) -> usize {
        self.lanes.cache().capacity()
    }

    /// Positions that the cache has of a sequence, if it is in the batch.
    pub fn positions(&self, sequence: SequenceId) -> Option<usize> {
        let lane = self.lane(sequence)?;
        Some(self.lanes.cache().lengths()[lane])
    }

    /// The logits that the last token of a sequence was chosen by, an entry for each token, if it is in the batch, the token came of a
    /// step since which the batch has not grown, and they were computed for all tokens.
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn logits(&self, sequence: SequenceId) -> Result<Option<Vec<f32>>, GenerateError> {
        let lane = self.lane(sequence);
        let stepped = lane.filter(|lane| {
            let sequence = self.sequences[*lane].as_ref();
            sequence.is_some_and(|sequence| sequence.has_stepped)
        });
        stepped.map_or(Ok(None), |lane| self.lanes.logits(lane))
    }

    /// Steps that were replayed.
    pub fn replays(&self) -> usize {
        self.lanes.replays()
    }

    /// Why there are no graphs, though they were wanted and the device has them.
    pub fn graph_refusal(&self) -> Option<&str> {
        self.lanes.refusal()
    }

    /// What is recorded at present.
    pub fn graphs(&self) -> GraphUsage {
        self.lanes.graphs()
    }

    fn lane(&self, sequence: SequenceId) -> Option<usize> {
        let is_it = |known: &Option<Sequence>| known.as_ref().is_some_and(|s| s.id == sequence);
        self.sequences.iter().position(is_it)
    }

    fn vacate(&mut self, lane: usize) -> Result<(), GenerateError> {
        self.sequences[lane] = None;
        Ok(self.lanes.vacate(lane)?)
    }

    /// The first vacant lane; the batch grows if need be, and has fewer than the most sequences.
    fn vacant_lane(&mut self) -> usize {
        let lanes = self.sequences.len();
        let vacant = self.sequences.iter().position(Option::is_none);
        vacant.unwrap_or_else(|| {
            self.lanes.widen(2 * lanes);
            self.sequences.resize_with(2 * lanes, || None);
            lanes
        })
    }

    /// What is told of a sequence's next token, as the device has it.
    fn output(&self, sequence: &mut Sequence, token: u32) -> BatchToken {
        sequence.remaining -= 1;
        let (token, finish) = if token > i32::MAX as u32 {
            (Err(self.no_candidate()), None)
        } else if token == self.model_config.eos_token_id && !self.config.ignore_eos {
            (Ok(token), Some(FinishReason::EndOfSequence))
        } else if sequence.remaining == 0 {
            (Ok(token), Some(FinishReason::Length))
        } else if sequence.positions >= self.model_config.max_position_embeddings {
            (Ok(token), Some(FinishReason::ContextFull))
        } else {
            (Ok(token), None)
        };
        BatchToken {
            sequence: sequence.id,
            token,
            finish,
        }
    }

    fn no_candidate(&self) -> GenerateError {
        GenerateError::NoCandidate {
            len: self.model_config.vocab_size,
        }
    }
}

fn new_cache(
    model: &Model,
    model_config: &ModelConfig,
    capacity: usize,
) -> Result<Cache, CacheError> {
    let options = CacheConfig {
        capacity,
        rollback: Rollback::Bounded(0),
        ..CacheConfig::default()
    };
    model.new_cache(model_config, options)
}
