//! Plain decoding: one token a step, each chosen on the device and fed to the next step there.

use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData};
use burn_ds4_ops::device::forget_scratch;

use super::choice::{Choice, Chooser};
use super::driver::ids_tensor;
use super::error::GenerateError;
use super::sampler::SamplingConfig;
use super::target::{candidate_logits, device_error, read_tokens};
use crate::cache::{Cache, CacheError};
use crate::graph::{Preparation, Recording, Refusal, Window};
use crate::model::Model;

/// Steps of which a recording must be of use, as many as it costs twice over.
pub(super) const WORTH_RECORDING: usize = 16;
/// Steps before a recording. The first copies what it writes, of which the state before is kept; from the second on, each is like all
/// the others.
pub(super) const WARM_UPS: usize = 2;

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
    model: &'a Model,
    chooser: Chooser,
    /// Goes before all that it reads and writes.
    recording: Option<Recording<Option<Tensor<3>>>>,
    /// Of the cache, when the step was recorded.
    epoch: u64,
    cache: Cache,
    /// The token to go on from: `[1, 1]`, always in the same place. Taken while it is written.
    ids: Option<Tensor<2, Int>>,
    /// Where it is written: a 0.
    place: Tensor<1, Int>,
    logits: Option<Tensor<3>>,
    graphs: bool,
    refusal: Option<String>,
    replays: usize,
    /// Of a step whose earlier neighbours gave tokens in the same call.
    late: Option<GenerateError>,
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
            model,
            chooser: Chooser::greedy(&device),
            recording: None,
            epoch: 0,
            cache,
            ids: Some(Tensor::zeros([1, 1], &device)),
            place: Tensor::zeros([1], &device),
            logits: None,
            graphs: graphs && model.flash_head.is_none(),
            refusal: None,
            replays: 0,
            late: None,
        })
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
        self.recording = None;
        self.chooser = Chooser::new(sampling, &self.place.device())?;
        Ok(self)
    }

    /// Chooses tokens by `choose` in place of the highest logit, of equal ones that of the lowest id.
    ///
    /// It may only launch device work: a read, an upload or much memory makes recording fail, or is part of every replay as it was
    /// when it was recorded.
    #[must_use]
    pub fn with_choice(mut self, choose: Choice) -> Self {
        self.recording = None;
        self.chooser.set_own(choose);
        self
    }

    /// The token to go on from, which is not in the cache yet.
    pub fn set_token(&mut self, token: u32) {
        self.late = None;
        let ids = ids_tensor(&[token], &self.place.device());
        self.put(ids);
    }

    /// Removes the newest `count` positions, and goes on from `token`.
    ///
    /// # Errors
    ///
    /// As [`Cache::truncate`].
    pub fn truncate(&mut self, count: usize, token: u32) -> Result<(), CacheError> {
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
        if let Some(error) = self.late.take() {
            return Err(error);
        }
        if self.replay()? {
            return Ok(vec![self.token()?]);
        }
        // The memory that it holds on to is needed where the cache grows.
        self.recording = None;
        let room = self.cache.capacity() - self.cache.lengths()[0];
        if self.graphs && room.min(limit) >= WORTH_RECORDING {
            return self.record();
        }
        Ok(vec![self.launch()?])
    }

    /// Replays a recorded step without reading the token that it chooses; what that takes of the host is all that it takes. `false`
    /// if there is nothing to be replayed, which the next call of [`decode`](Self::decode) may change.
    ///
    /// # Errors
    ///
    /// As [`decode`](Self::decode).
    pub fn replay(&mut self) -> Result<bool, GenerateError> {
        let fits = self.cache.check_replay(1)?;
        let Some(recording) = &self.recording else {
            return Ok(false);
        };
        if !fits || self.epoch != self.cache.epoch() || !recording.is_of_this_thread() {
            return Ok(false);
        }
        // Safety: the decoder owns or borrows every tensor of the step. None has been replaced, as the epoch says; it is not shared
        // with another thread, and this is the thread of the recording.
        unsafe { recording.replay() }.map_err(failed)?;
        self.cache.commit_replay(1);
        self.replays += 1;
        Ok(true)
    }

    /// The logits that the last token was chosen by, if they were computed for all tokens: an entry for each.
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn logits(&self) -> Result<Option<Vec<f32>>, GenerateError> {
        let recorded = self.recording.as_ref().map(|recorded| &recorded.results);
        let logits = recorded.unwrap_or(&self.logits).clone();
        logits
            .map(|logits| logits.try_into_vec_as::<f32>().map_err(device_error))
            .transpose()
    }

    /// Positions in the cache.
    pub fn positions(&self) -> usize {
        self.cache.lengths()[0]
    }

    /// Steps that were replayed.
    pub fn replays(&self) -> usize {
        self.replays
    }

    /// Why there are no graphs, though they were wanted and the device has them.
    pub fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    /// The cache, for what is no plain decoding. It ends what was recorded.
    pub(super) fn cache_mut(&mut self) -> &mut Cache {
        self.recording = None;
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
        let Some(head) = &self.model.flash_head else {
            let logits = self.model.logits_of(hidden);
            self.logits = Some(logits.clone());
            let chosen = self.chooser.choose(logits, self.cache.start())?;
            self.put(chosen);
            return Ok(());
        };
        let chosen = if self.chooser.is_greedy() {
            head.greedy_tokens(hidden)?
        } else {
            let row = candidate_logits(head, hidden)?.concat();
            let row = TensorData::new(row, [1, 1, head.head().vocabulary()]);
            let logits = Tensor::from_data(row, &self.place.device());
            self.chooser.choose(logits, self.cache.start())?
        };
        self.put(chosen);
        Ok(())
    }

    /// Writes the token to go on from, in place.
    fn put(&mut self, token: Tensor<2, Int>) {
        let ids = self.ids.take().expect("it is put back");
        let token = token.cast(ids.dtype());
        let ids = ids.select_assign(0, self.place.clone(), token, IndexingUpdateOp::Assign);
        self.ids = Some(ids);
    }

    /// Reads the token that the last step has chosen: the only read of a step.
    fn token(&self) -> Result<u32, GenerateError> {
        let ids = self.ids.clone().expect("it is put back");
        let token = read_tokens(ids)?[0];
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
        let mut tokens = Vec::with_capacity(WARM_UPS + 1);

        let window = Preparation::new(&device).and_then(|preparation| {
            for _ in 0..WARM_UPS {
                match self.launch() {
                    Ok(token) => tokens.push(token),
                    Err(error) => {
                        self.late = Some(error);
                        return Ok(None);
                    }
                }
            }
            preparation.start().map(Some)
        });
        let window = match window {
            Ok(Some(window)) => window,
            Ok(None) => return self.in_time(tokens),
            Err(refusal) => {
                self.refuse(refusal);
                if tokens.is_empty() {
                    tokens.push(self.launch()?);
                }
                return Ok(tokens);
            }
        };

        match self.record_in(window) {
            Ok(()) => {
                match self.token() {
                    Ok(token) => tokens.push(token),
                    Err(error) => self.late = Some(error),
                }
                Ok(tokens)
            }
            Err(refusal) => {
                let reason = refusal.reason().to_owned();
                self.refuse(refusal);
                // What was to be written counts as failed: on with what there was before.
                self.recording = None;
                forget_scratch();
                self.cache = before;
                self.ids = Some(Tensor::zeros([1, 1], &device));
                self.set_token(first);
                // A device that cannot tell what a kernel only reads counts the weights as failed, too.
                let launched = self.launch().map_err(|error| {
                    device_error(format!(
                        "a step could not be recorded ({reason}), and now none can be launched either ({error}): the model has to be \
                         loaded again"
                    ))
                });
                Ok(vec![launched?])
            }
        }
    }

    /// Records a step, and executes it.
    fn record_in(&mut self, window: Window) -> Result<(), Refusal> {
        self.step()
            .map_err(|error| Refusal::Failed(error.to_string()))?;
        let recording = window.seal(self.logits.take())?;
        // Safety: the decoder owns or borrows every tensor of the step, which has been recorded just now by this thread.
        unsafe { recording.replay() }?;
        self.replays += 1;
        self.epoch = self.cache.epoch();
        self.recording = Some(recording);
        Ok(())
    }

    /// Tokens before an error come before it.
    fn in_time(&mut self, tokens: Vec<u32>) -> Result<Vec<u32>, GenerateError> {
        match self.late.take() {
            Some(error) if tokens.is_empty() => Err(error),
            late => {
                self.late = late;
                Ok(tokens)
            }
        }
    }

    fn refuse(&mut self, refusal: Refusal) {
        self.graphs = false;
        if let Refusal::Failed(reason) = refusal {
            log::warn!("decoding goes on without graphs, a step cannot be recorded: {reason}");
            self.refusal = Some(reason);
        }
    }
}

pub(super) fn failed(refusal: Refusal) -> GenerateError {
    device_error(refusal.reason())
}
