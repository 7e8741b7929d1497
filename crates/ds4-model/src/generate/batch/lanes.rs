//! What the device works on: the texts of a batch side by side, one lane each, some of which are vacant.

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::attention::FEW_TOKENS;

use super::GraphUsage;
use crate::cache::{Cache, CacheError};
use crate::generate::choice::Chooser;
use crate::generate::driver::ids_tensor;
use crate::generate::error::GenerateError;
use crate::generate::recorder::{Outcome, Recorder, WORTH_RECORDING, record, spoiled};
use crate::generate::target::{device_error, read_tokens};
use crate::model::Model;

/// Lanes of a step that can be recorded. With more, other operators are used, some of which upload: some devices refuse that, and others
/// count the weights as failed with a recording that fails.
const RECORDABLE: usize = FEW_TOKENS;

#[derive(Debug)]
pub(super) struct Lanes<'a> {
    /// Its recording goes before all that it reads and writes. It results in the logits.
    recorder: Recorder<Option<Tensor<3>>, u64>,
    model: &'a Model,
    /// With the seed of each lane.
    chooser: Chooser,
    cache: Cache,
    /// The tokens to go on from: `[lanes, 1]`, always in the same place. Taken while they are written.
    ids: Option<Tensor<2, Int>>,
    logits: Option<Tensor<3>>,
    /// Steps that were launched where none could be replayed.
    launched: usize,
    /// By which the device's memory grew when the step was recorded.
    bytes: Option<u64>,
}

impl<'a> Lanes<'a> {
    /// One vacant lane.
    pub(super) fn new(
        model: &'a Model,
        mut cache: Cache,
        chooser: Chooser,
        graphs: bool,
    ) -> Result<Self, CacheError> {
        let device = model.embedding.val().device();
        cache.vacate(0)?;
        Ok(Self {
            recorder: Recorder::new("step", graphs && model.flash_head.is_none()),
            model,
            chooser,
            cache,
            ids: Some(Tensor::zeros([1, 1], &device)),
            logits: None,
            launched: 0,
            bytes: None,
        })
    }

    pub(super) fn model(&self) -> &'a Model {
        self.model
    }

    pub(super) fn chooser_mut(&mut self) -> &mut Chooser {
        self.recorder.forget();
        &mut self.chooser
    }

    pub(super) fn chooser(&self) -> &Chooser {
        &self.chooser
    }

    pub(super) fn cache(&self) -> &Cache {
        &self.cache
    }

    pub(super) fn replays(&self) -> usize {
        self.recorder.replays()
    }

    pub(super) fn refusal(&self) -> Option<&str> {
        self.recorder.refusal()
    }

    pub(super) fn graphs(&self) -> GraphUsage {
        let recordings = usize::from(self.recorder.results().is_some());
        GraphUsage {
            recordings,
            bytes: match recordings {
                0 => Some(0),
                _ => self.bytes,
            },
        }
    }

    /// Adds vacant lanes until there are `lanes`.
    pub(super) fn widen(&mut self, lanes: usize) {
        // The memory that it holds on to is needed.
        self.forget();
        self.cache.widen(lanes);
        self.chooser.widen(lanes);
        let ids = self.ids.take().expect("they are put back");
        let [known, _] = ids.dims();
        let more = Tensor::zeros([lanes - known, 1], (&ids.device(), ids.dtype()));
        self.ids = Some(Tensor::cat(vec![ids, more], 0));
    }

    /// Puts the text of a cache into a lane, to go on from `token` by the random numbers of `seed`.
    pub(super) fn place(
        &mut self,
        lane: usize,
        text: &Cache,
        token: u32,
        seed: u64,
    ) -> Result<(), CacheError> {
        if text.lengths()[0] > self.cache.capacity() {
            self.forget();
        }
        self.cache.adopt(lane, text)?;
        self.chooser.set_seed(lane, seed);
        let ids = self.ids.take().expect("they are put back");
        let token = ids_tensor(&[token], &ids.device()).cast(ids.dtype());
        self.ids = Some(ids.slice_assign([lane..lane + 1, 0..1], token));
        Ok(())
    }

    pub(super) fn vacate(&mut self, lane: usize) -> Result<(), CacheError> {
        self.cache.vacate(lane)
    }

    /// The tokens that the next step or, where one is recorded, the next few choose in all lanes, if so many are wanted of one of them.
    pub(super) fn advance(&mut self, wanted: usize) -> Result<Vec<Vec<u32>>, GenerateError> {
        self.recorder.late()?;
        if self.replay()? {
            return Ok(vec![self.tokens()?]);
        }
        // The memory that it holds on to is needed where the cache grows.
        self.forget();
        let longest = self.cache.lengths().iter().max().copied().unwrap_or(0);
        let room = self.cache.capacity() - longest;
        // Many short texts are worth it as well.
        let used = wanted.max(self.launched);
        let is_recordable = self.recorder.is_wanted() && self.cache.batch() <= RECORDABLE;
        if is_recordable && room.min(used) >= WORTH_RECORDING {
            self.launched = 0;
            return self.record();
        }
        self.launched += 1;
        Ok(vec![self.launch()?])
    }

    /// The logits that the last token of a lane was chosen by, if they were computed for all tokens.
    pub(super) fn logits(&self, lane: usize) -> Result<Option<Vec<f32>>, GenerateError> {
        let logits = self.recorder.results().unwrap_or(&self.logits).clone();
        let logits = logits.map(|logits| logits.narrow(0, lane, 1));
        logits
            .map(|logits| logits.try_into_vec_as::<f32>().map_err(device_error))
            .transpose()
    }

    fn forget(&mut self) {
        self.recorder.forget();
        self.logits = None;
    }

    fn replay(&mut self) -> Result<bool, GenerateError> {
        let fits = self.cache.check_replay(1)?;
        let epoch = self.cache.epoch();
        // Safety: this owns or borrows every tensor of the step. None has been replaced, as the epoch says, nor is it shared with
        // another thread.
        if !fits || !unsafe { self.recorder.replay(&epoch) }? {
            return Ok(false);
        }
        self.cache.commit_replay(1);
        Ok(true)
    }

    /// One step that is launched, and its tokens.
    fn launch(&mut self) -> Result<Vec<u32>, GenerateError> {
        self.step()?;
        self.tokens()
    }

    /// Enqueues one step.
    fn step(&mut self) -> Result<(), GenerateError> {
        self.logits = None;
        let ids = self.ids.clone().expect("they are put back");
        let hidden = self.model.forward_hidden(ids, &mut self.cache)?;
        let positions = self.cache.start();
        let (tokens, logits) = self.chooser.choose(self.model, hidden, positions)?;
        self.logits = logits;
        let ids = self.ids.take().expect("they are put back");
        let [lanes, _] = ids.dims();
        let tokens = tokens.cast(ids.dtype());
        self.ids = Some(ids.slice_assign([0..lanes, 0..1], tokens));
        Ok(())
    }

    /// Reads the tokens that the last step has chosen: the only read of a step.
    fn tokens(&self) -> Result<Vec<u32>, GenerateError> {
        read_tokens(self.ids.clone().expect("they are put back"))
    }

    /// A few steps, of which the last is recorded and replayed.
    fn record(&mut self) -> Result<Vec<Vec<u32>>, GenerateError> {
        let device = self.model.embedding.val().device();
        let reserved = || device.memory_pool_usage().map(|usage| usage.bytes_reserved);
        let reserved_before = reserved();
        // Shares its buffers with what it is of until the next step, which thus leaves them alone and writes copies.
        let before = (self.cache.clone(), self.ids.clone());
        let work = |lanes: &mut Self| {
            lanes.step()?;
            Ok(lanes.logits.take())
        };
        // Safety: this owns or borrows every tensor of the step.
        let (mut steps, outcome) = unsafe { record(&device, self, Self::launch, work) };
        match outcome {
            Outcome::Recorded(recording) => {
                self.recorder.keep(recording, self.cache.epoch());
                let grown = reserved().zip(reserved_before);
                self.bytes = grown.map(|(now, before)| now.saturating_sub(before));
                let tokens = self.tokens();
                self.recorder.in_time(steps, tokens)
            }
            Outcome::Broken(error) => self.recorder.in_time(steps, Err(error)),
            Outcome::Refused(refusal) => {
                self.recorder.refuse(&refusal);
                if steps.is_empty() {
                    steps.push(self.launch()?);
                }
                Ok(steps)
            }
            Outcome::Spoiled(refusal) => {
                self.recorder.refuse(&refusal);
                // On with what there was before.
                (self.cache, self.ids) = before;
                let launched = self.launch();
                Ok(vec![launched.map_err(|error| spoiled(&refusal, error))?])
            }
        }
    }
}
