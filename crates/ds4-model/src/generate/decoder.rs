//! Plain decoding: one token a step, each chosen on the device and fed to the next step there.

use std::collections::VecDeque;

use burn::tensor::{IndexingUpdateOp, Int, Tensor};
use burn_ds4_ops::readback::Readback;

use super::choice::{Choice, Chooser};
use super::driver::ids_tensor;
use super::error::GenerateError;
use super::recorder::{Outcome, Recorder, WORTH_RECORDING, record, spoiled};
use super::sampler::SamplingConfig;
use super::target::{device_error, read_tokens};
use crate::cache::{Cache, CacheError};
use crate::model::Model;

/// Decodes one token after the other, without the host in between: the most likely one, or one that is
/// [drawn](Self::with_sampling).
///
/// Where the device can (the feature `fusion` is off, and the model has no clustered head, which is made of uploads), a step is recorded
/// as a graph, which is replayed for every token until the cache grows. If that fails, a warning is logged, and the decoder launches its
/// steps from then on. The tokens are the same either way. Where a device cannot tell what the failed work would only have read (CUDA), the
/// weights count as failed with it: the next step is an error that says so.
///
/// # Example
///
/// ```
/// use ds4_model::cache::CacheConfig;
/// use ds4_model::config::ModelConfig;
/// use ds4_model::generate::{Decoder, GenerateError};
/// use ds4_model::model::Model;
///
/// /// The `count` tokens that are most likely after the token `first`, each after those before it.
/// fn continuation(
///     model: &Model,
///     config: &ModelConfig,
///     first: u32,
///     count: usize,
/// ) -> Result<Vec<u32>, GenerateError> {
///     let cache = model.new_cache(config, CacheConfig::default())?;
///     let mut decoder = Decoder::new(model, cache, true)?;
///     decoder.set_token(first);
///     let mut tokens = Vec::new();
///     while tokens.len() < count {
///         tokens.extend(decoder.decode(count - tokens.len())?);
///     }
///     Ok(tokens)
/// }
/// ```
#[derive(Debug)]
pub struct Decoder<'a> {
    /// Its recording goes before all that it reads and writes. It results in the logits.
    recorder: Recorder<Option<Tensor<3>>, u64>,
    model: &'a Model,
    chooser: Chooser,
    cache: Cache,
    /// The token to go on from: `[1, 1]`, always in the same place. Taken while it is written.
    ids: Option<Tensor<2, Int>>,
    /// Where it is written: a 0.
    place: Tensor<1, Int>,
    logits: Option<Tensor<3>>,
    /// How many steps may be replayed before the token of an earlier one is known.
    steps_ahead: usize,
    /// Tokens of steps that were replayed and that the host does not count yet.
    ahead: VecDeque<Readback>,
    /// The token before them.
    last: u32,
    /// Whether the last step was taken back.
    rewound: bool,
}

impl<'a> Decoder<'a> {
    /// Makes a decoder that continues the one sequence of `cache`, by graphs if they are wanted and the device has them.
    ///
    /// # Errors
    ///
    /// If the cache has several sequences.
    pub fn new(model: &'a Model, cache: Cache, graphs: bool) -> Result<Self, CacheError> {
        if cache.batch() != 1 {
            return Err(CacheError::BatchMismatch {
                argument: "the decoder",
                expected: cache.batch(),
                actual: 1,
            });
        }
        let device = model.embedding.val().device();
        Ok(Self {
            recorder: Recorder::new("step", graphs && model.flash_head.is_none()),
            model,
            chooser: Chooser::greedy(&device),
            cache,
            ids: Some(Tensor::zeros([1, 1], &device)),
            place: Tensor::zeros([1], &device),
            logits: None,
            steps_ahead: 0,
            ahead: VecDeque::new(),
            last: 0,
            rewound: false,
        })
    }

    /// Lets replays run `steps` ahead of the tokens that are given out, so that the device need not wait while the host reads one:
    /// one is enough for that. At first it is none.
    ///
    /// It never runs farther than the limit of [`decode`](Self::decode) says, nor than the cache can be
    /// [rolled back](crate::cache::CacheConfig::rollback). Tokens and positions are those of steps one by one: steps ahead that turn out not to be
    /// wanted are taken back when the decoder is told to go on from elsewhere, which uses up room to roll back like positions that
    /// were given out and truncated.
    #[must_use]
    pub fn with_steps_ahead(mut self, steps: usize) -> Self {
        self.steps_ahead = steps;
        self
    }

    /// Draws tokens as `sampling` says, in place of the highest logit, of equal ones that of the lowest id.
    ///
    /// The token at a position of the text is that which [`sample`](burn_ds4_ops::sampling::sample) gives for the seed and that
    /// position, the first token of the text being at 0: the same whether steps are launched or replayed, and again where positions
    /// were removed.
    ///
    /// # Errors
    ///
    /// If a parameter is outside its range, or the repetition penalty is not 1: the tokens before are not looked at.
    pub fn with_sampling(mut self, sampling: &SamplingConfig) -> Result<Self, GenerateError> {
        self.rewind();
        self.recorder.forget();
        self.chooser = Chooser::new(sampling, &self.place.device())?;
        Ok(self)
    }

    /// Chooses tokens by `choose` in place of the highest logit, of equal ones that of the lowest id.
    ///
    /// It may only launch device work: a read, an upload or much memory makes recording fail, or is part of every replay as it was
    /// when it was recorded.
    #[must_use]
    pub fn with_choice(mut self, choose: Choice) -> Self {
        self.rewind();
        self.recorder.forget();
        self.chooser.set_own(choose);
        self
    }

    /// The token to go on from, which is not in the cache yet.
    pub fn set_token(&mut self, token: u32) {
        self.rewind();
        self.recorder.forget_late();
        let ids = ids_tensor(&[token], &self.place.device());
        self.put(ids);
    }

    /// Removes the newest `count` positions, and goes on from `token`.
    ///
    /// # Errors
    ///
    /// As [`Cache::truncate`].
    pub fn truncate(&mut self, count: usize, token: u32) -> Result<(), CacheError> {
        self.rewind();
        self.cache.truncate(count)?;
        self.set_token(token);
        Ok(())
    }

    /// Decodes the next token or, where a step is recorded, the next few: at most `limit`, but always one.
    ///
    /// # Errors
    ///
    /// If the cache is full, no token can be chosen or the device fails. After the latter, the decoder is not to be used any more.
    pub fn decode(&mut self, limit: usize) -> Result<Vec<u32>, GenerateError> {
        let most = self.steps_ahead.min(self.cache.rollback());
        let replays = 1 + limit.saturating_sub(1).min(most);
        while !self.recorder.is_late() && self.ahead.len() < replays {
            match self.run_ahead() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => self.recorder.defer(error),
            }
        }
        if let Some(read) = self.ahead.pop_front() {
            return Ok(vec![self.arrived(read)?]);
        }
        self.recorder.late()?;
        // The memory that it holds on to is needed where the cache grows.
        self.recorder.forget();
        let room = self.cache.capacity() - self.cache.lengths()[0];
        if self.recorder.is_wanted() && room.min(limit) >= WORTH_RECORDING {
            return self.record();
        }
        Ok(vec![self.launch()?])
    }

    /// Replays a recorded step without reading the token that it chooses; what that takes of the host is all that it takes. A step that
    /// was replayed [ahead](Self::with_steps_ahead) counts as it is. `false` if there is nothing to be replayed, which the next call of
    /// [`decode`](Self::decode) may change.
    ///
    /// # Errors
    ///
    /// As [`decode`](Self::decode).
    pub fn replay(&mut self) -> Result<bool, GenerateError> {
        if let Some(read) = self.ahead.pop_front() {
            self.arrived(read)?;
            return Ok(true);
        }
        let replayed = self.replay_another()?;
        if replayed {
            self.cache.commit_replay(1);
        }
        Ok(replayed)
    }

    /// Replays another step, and begins to read its token. `false` if there is nothing to be replayed.
    fn run_ahead(&mut self) -> Result<bool, GenerateError> {
        let replayed = self.replay_another()?;
        if replayed {
            let ids = self.ids.clone().expect("it is put back");
            self.ahead.push_back(Readback::begin([ids.reshape([1])]));
        }
        Ok(replayed)
    }

    /// Replays a step after all that are ahead. The host does not count it yet.
    fn replay_another(&mut self) -> Result<bool, GenerateError> {
        let fits = self.cache.check_replay(self.ahead.len() + 1)?;
        let epoch = self.cache.epoch();
        // Safety: the decoder owns or borrows every tensor of the step. None has been replaced, as the epoch says, nor is it shared with
        // another thread.
        let replayed = fits && unsafe { self.recorder.replay(&epoch) }?;
        self.rewound &= !replayed;
        Ok(replayed)
    }

    /// Waits for the token of the first step ahead, which counts from now on.
    fn arrived(&mut self, read: Readback) -> Result<u32, GenerateError> {
        self.cache.commit_replay(1);
        let ids = read.wait().map_err(device_error)?;
        self.last = ids[0] as u32;
        self.checked(self.last)
    }

    /// Takes the steps ahead back: on from the last token that was given out.
    fn rewind(&mut self) {
        let steps = self.ahead.len();
        if steps == 0 {
            return;
        }
        self.rewound = true;
        // They read what is written here.
        self.ahead.clear();
        self.cache.commit_replay(steps);
        let back = self.cache.truncate(steps);
        back.expect("no step runs farther ahead than the cache can be rolled back");
        let ids = ids_tensor(&[self.last], &self.place.device());
        self.put(ids);
    }

    /// The logits that the last token was chosen by, if they were computed for all tokens: an entry for each. While steps run
    /// [ahead](Self::with_steps_ahead), and once such steps were taken back, they are gone until the next step.
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn logits(&self) -> Result<Option<Vec<f32>>, GenerateError> {
        if self.rewound || !self.ahead.is_empty() {
            return Ok(None);
        }
        let logits = self.recorder.results().unwrap_or(&self.logits).clone();
        logits
            .map(|logits| logits.try_into_vec_as::<f32>().map_err(device_error))
            .transpose()
    }

    /// Positions in the cache: all before the last token that was given out.
    pub fn positions(&self) -> usize {
        self.cache.lengths()[0]
    }

    /// Steps that were replayed.
    pub fn replays(&self) -> usize {
        self.recorder.replays()
    }

    /// Why there are no graphs, though they were wanted and the device has them.
    pub fn refusal(&self) -> Option<&str> {
        self.recorder.refusal()
    }

    /// The cache, for what is no plain decoding. It ends what was recorded.
    pub(super) fn cache_mut(&mut self) -> &mut Cache {
        self.rewind();
        self.recorder.forget();
        &mut self.cache
    }

    /// The cache as it is.
    pub(super) fn cache(&self) -> &Cache {
        &self.cache
    }

    /// One step that is launched, and its token.
    fn launch(&mut self) -> Result<u32, GenerateError> {
        self.step()?;
        self.token()
    }

    /// Goes on from the token that follows on all that is in the cache, given the streams of the last position, and tells it.
    pub(super) fn choose(&mut self, streams: Tensor<4>) -> Result<u32, GenerateError> {
        self.choose_at(self.model.hidden(streams))?;
        self.token()
    }

    /// Enqueues one step.
    fn step(&mut self) -> Result<(), GenerateError> {
        self.logits = None;
        let ids = self.ids.clone().expect("it is put back");
        let hidden = self.model.forward_hidden(ids, &mut self.cache)?;
        self.choose_at(hidden)
    }

    /// Enqueues the choice of the token that follows on all that is in the cache, by what the output matrix takes of the last position.
    fn choose_at(&mut self, hidden: Tensor<3>) -> Result<(), GenerateError> {
        let positions = self.cache.start();
        let (token, logits) = self.chooser.choose(self.model, hidden, positions)?;
        self.logits = logits;
        self.rewound = false;
        self.put(token);
        Ok(())
    }

    /// Writes the token to go on from, in place.
    fn put(&mut self, token: Tensor<2, Int>) {
        let ids = self.ids.take().expect("it is put back");
        let token = token.cast(ids.dtype());
        let ids = ids.select_assign(0, self.place.clone(), token, IndexingUpdateOp::Assign);
        self.ids = Some(ids);
    }

    /// Reads the token that the last step has chosen.
    fn token(&self) -> Result<u32, GenerateError> {
        let ids = self.ids.clone().expect("it is put back");
        self.checked(read_tokens(ids)?[0])
    }

    fn checked(&self, token: u32) -> Result<u32, GenerateError> {
        if token > i32::MAX as u32 {
            let [len, _] = self.model.embedding.dims();
            return Err(GenerateError::NoCandidate { len });
        }
        Ok(token)
    }

    /// A few steps, of which the last is recorded and replayed.
    fn record(&mut self) -> Result<Vec<u32>, GenerateError> {
        let device = self.place.device();
        let first = self.token()?;
        // Shares its buffers with the cache until the next step, which thus leaves them alone and writes copies.
        let before = self.cache.clone();
        let work = |decoder: &mut Self| {
            decoder.step()?;
            Ok(decoder.logits.take())
        };
        // Safety: the decoder owns or borrows every tensor of the step.
        let (mut tokens, outcome) = unsafe { record(&device, self, Self::launch, work) };
        match outcome {
            Outcome::Recorded(recording) => {
                self.recorder.keep(recording, self.cache.epoch());
                let token = self.token();
                self.recorder.in_time(tokens, token)
            }
            Outcome::Broken(error) => self.recorder.in_time(tokens, Err(error)),
            Outcome::Refused(refusal) => {
                self.recorder.refuse(&refusal);
                if tokens.is_empty() {
                    tokens.push(self.launch()?);
                }
                Ok(tokens)
            }
            Outcome::Spoiled(refusal) => {
                self.recorder.refuse(&refusal);
                // On with what there was before.
                self.cache = before;
                self.ids = Some(Tensor::zeros([1, 1], &device));
                self.set_token(first);
                let launched = self.launch();
                Ok(vec![launched.map_err(|error| spoiled(&refusal, error))?])
            }
        }
    }
}
