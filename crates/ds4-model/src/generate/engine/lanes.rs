//! A group of lanes: texts side by side on the device, some lanes of which are vacant, and the one
//! step that decodes all of them.
//!
//! A step runs the trunk over the last token of each text and its drafts, chooses the token after
//! each, keeps the positions up to the first draft that differs, and drafts again. Its shapes do
//! not depend on the outcome, which stays on the device for the next step and reaches the host
//! later.

mod links;
mod recorded;
mod step;

use std::collections::VecDeque;

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::sampling::{BatchParams, LaneParams, TokenCounts};

use super::constraint::{Constraints, LaneConstraint};
use super::recorder::{self, Recorder};
use super::results::{Outcome, PartResults, Pending, StepResults};
use super::setup::{Caches, Setup};
use crate::cache::Cache;
use crate::generate::error::GenerateError;
use crate::graph::Refusal;
use links::Links;

/// A text's place in a group of lanes, as it enters.
pub(super) struct Entry<'t> {
    pub(super) caches: &'t Caches,
    /// The lane of the caches that has the text.
    pub(super) from: usize,
    /// Its last token and drafts: `[1, 1 + drafts]`.
    pub(super) inputs: Tensor<2, Int>,
    pub(super) constraint: Option<LaneConstraint>,
}

/// What decides which work a step launches, besides its shape.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct StepKind {
    /// Whether all lanes take the most likely token.
    pub(super) greedy: bool,
    /// Whether a lane has penalties or a logit bias.
    pub(super) penalties: bool,
    /// Whether a lane has a constraint.
    pub(super) constrained: bool,
    /// The most likely tokens that are listed, if a lane wants log-probabilities.
    pub(super) log_probs: Option<usize>,
}

/// What the texts of a group of lanes want of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// Tokens that one of them wants yet, at most.
    pub(super) tokens: usize,
    /// Drafts that one of them has to be verified, at most. Known when no step is ahead.
    pub(super) drafts: usize,
}

#[derive(Debug)]
pub(super) struct Lanes {
    /// Its recordings go before all that it reads and writes.
    recorder: Recorder<PartResults, (Vec<u64>, StepKind)>,
    caches: Caches,
    links: Links,
    params: BatchParams,
    counts: Option<TokenCounts>,
    constraints: Constraints,
    /// The last token of each text, which is in no cache yet, and its drafts, -1 where there is
    /// none: `[lanes, 1 + drafts]`, always in the same buffer. Taken while they are written.
    inputs: Option<Tensor<2, Int>>,
    /// Of the lanes: `[lanes]`. Made here, because it is an upload, which cannot be recorded.
    numbers: Tensor<1, Int>,
    kind: StepKind,
    /// Drafts that the step makes which is being launched.
    new_drafts: usize,
    /// The logits of the last step, if it was launched.
    logits: Option<Tensor<3>>,
    /// Steps that the host has read already, since the masks of the next depended on them.
    read: VecDeque<Outcome>,
    /// Steps after those.
    ahead: VecDeque<Pending>,
    /// Of a step after those that are ahead.
    late: Option<GenerateError>,
    /// Why a recording has failed, until a step was launched after it.
    spoiled: Option<Refusal>,
    /// Bytes by which the device's memory grew when steps were recorded.
    graph_bytes: Option<u64>,
}

impl Lanes {
    /// Vacant lanes.
    pub(super) fn new(setup: &Setup, lanes: usize, capacity: usize) -> Result<Self, GenerateError> {
        let mut caches = setup.new_caches(lanes, capacity)?;
        for cache in caches.both_mut() {
            for lane in 0..lanes {
                cache.vacate(lane)?;
            }
        }
        let device = setup.device();
        let params = vec![LaneParams::default(); lanes];
        let vocabulary = setup.model.config().vocab_size;
        let params = BatchParams::new(&params, vocabulary, device);
        Ok(Self {
            recorder: Recorder::new(setup.config.graphs),
            caches,
            links: Links::new(setup, lanes),
            params: params.map_err(GenerateError::Logits)?,
            counts: None,
            constraints: Constraints::new(lanes),
            inputs: Some(Tensor::zeros([lanes, 1 + setup.config.drafts], device)),
            numbers: Tensor::arange(0..lanes as i64, device),
            kind: StepKind::default(),
            new_drafts: 0,
            logits: None,
            read: VecDeque::new(),
            ahead: VecDeque::new(),
            late: None,
            spoiled: None,
            graph_bytes: Some(0),
        })
    }

    /// Hands back to the other devices what the last step has left for the next, if that was put
    /// off.
    pub(super) fn catch_up(&mut self) {
        self.links.catch_up(&mut self.caches.trunk);
    }

    pub(super) fn lanes(&self) -> usize {
        self.caches.trunk.batch()
    }

    pub(super) fn capacity(&self) -> usize {
        self.caches.capacity()
    }

    /// Positions of each lane, counted on the host; at most as many more as steps ahead may add.
    pub(super) fn lengths(&self) -> &[usize] {
        self.caches.trunk.lengths()
    }

    pub(super) fn caches(&self) -> &Caches {
        &self.caches
    }

    /// Steps that were replayed.
    pub(super) fn replays(&self) -> usize {
        self.recorder.replays()
    }

    /// Why there are no recordings, though they were wanted and the device has them.
    pub(super) fn refusal(&self) -> Option<&str> {
        self.recorder.refusal()
    }

    /// Steps that are recorded.
    pub(super) fn recordings(&self) -> usize {
        self.recorder.count()
    }

    /// Bytes by which the device's memory grew for what is recorded.
    pub(super) fn graph_bytes(&self) -> Option<u64> {
        self.graph_bytes
    }

    /// Whether the host has counted all steps.
    pub(super) fn is_settled(&self) -> bool {
        self.outstanding() == 0
    }

    /// Steps that the host has not counted.
    fn outstanding(&self) -> usize {
        self.read.len() + self.ahead.len()
    }

    /// Whether a lane has a constraint.
    pub(super) fn is_constrained(&self) -> bool {
        !self.constraints.is_empty()
    }

    /// Takes the constraint of a lane, if it has one.
    pub(super) fn take_constraint(&mut self, lane: usize) -> Option<LaneConstraint> {
        self.constraints.take(lane)
    }

    /// Why a lane's constraint allows no token.
    pub(super) fn constraint_failure(&self, lane: usize) -> Option<&str> {
        self.constraints.failure(lane)
    }

    /// Sets what the next step does. No step may be ahead. Returns whether the parameters of all
    /// lanes have to be set again.
    pub(super) fn set_kind(&mut self, setup: &Setup, kind: StepKind) -> bool {
        self.kind = kind;
        // Counts that nobody needs any more are kept, because a recording may use them.
        let is_new = kind.penalties && self.counts.is_none();
        if is_new {
            self.forget();
            recorder::note_launch();
            let vocabulary = self.params.vocabulary();
            self.counts = Some(TokenCounts::new(self.lanes(), vocabulary, setup.device()));
        }
        is_new
    }

    /// The last token of a lane and its drafts.
    pub(super) fn input(&self, lane: usize) -> Tensor<2, Int> {
        self.inputs().narrow(0, lane, 1)
    }

    /// Adds vacant lanes until there are `lanes`. No step may be ahead. The parameters of all
    /// others have to be set again.
    pub(super) fn widen(&mut self, setup: &Setup, lanes: usize) -> Result<(), GenerateError> {
        // The memory that the recordings hold is needed.
        self.forget();
        recorder::note_launch();
        self.links.widen(lanes);
        let (known, device) = (self.lanes(), setup.device());
        self.caches.both_mut().for_each(|cache| cache.widen(lanes));
        let params = vec![LaneParams::default(); lanes];
        let params = BatchParams::new(&params, self.params.vocabulary(), device);
        self.params = params.map_err(GenerateError::Logits)?;
        self.counts = None;
        self.constraints.widen(lanes);
        self.numbers = Tensor::arange(0..lanes as i64, device);
        let inputs = self.inputs.take().expect("they are put back");
        let [_, columns] = inputs.dims();
        let more = Tensor::zeros([lanes - known, columns], (device, inputs.dtype()));
        self.inputs = Some(Tensor::cat(vec![inputs, more], 0));
        Ok(())
    }

    /// Sets how the tokens of a lane are chosen.
    pub(super) fn set_params(
        &mut self,
        lane: usize,
        params: &LaneParams,
        history: Option<[&[u32]; 2]>,
    ) -> Result<(), GenerateError> {
        recorder::note_launch();
        let set = self.params.set_lane(lane, params);
        set.map_err(GenerateError::Logits)?;
        if let (Some(counts), Some([prompt, output])) = (&mut self.counts, history) {
            let reset = counts.reset_lane(lane, prompt, output);
            reset.map_err(GenerateError::Logits)?;
        }
        Ok(())
    }

    /// Puts a text into a vacant lane. No step may be ahead.
    pub(super) fn enter(&mut self, lane: usize, entry: Entry) -> Result<(), GenerateError> {
        self.catch_up();
        let positions = entry.caches.trunk.lengths()[entry.from];
        self.caches
            .adopt(lane, entry.caches, entry.from, positions)?;
        self.constraints.set(lane, entry.constraint);
        self.links.enter(lane, &entry.inputs);
        let inputs = self.inputs.take().expect("they are put back");
        let [_, columns] = inputs.dims();
        let own = entry.inputs.cast(inputs.dtype());
        self.inputs = Some(inputs.slice_assign([lane..lane + 1, 0..columns], own));
        Ok(())
    }

    /// Makes a lane vacant. No step may be ahead.
    pub(super) fn vacate(&mut self, lane: usize) -> Result<(), GenerateError> {
        self.catch_up();
        recorder::note_launch();
        self.constraints.set(lane, None);
        for cache in self.caches.both_mut() {
            cache.vacate(lane)?;
        }
        Ok(())
    }

    /// The outcome of the oldest step that the host has not counted, of which there is one: the
    /// lanes want tokens yet. `others` lets the other lanes [catch
    /// up](Self::catch_up), once the first device has a part of a step of these.
    pub(super) fn advance(
        &mut self,
        setup: &Setup,
        wanted: Wanted,
        others: &mut dyn FnMut(),
    ) -> Result<Outcome, GenerateError> {
        if self.is_settled() {
            self.late.take().map_or(Ok(()), Err)?;
            self.upload_masks(setup);
            if let Some(drafts) = self.due(setup, wanted) {
                self.record(setup, drafts, wanted)?;
            }
        }
        self.run_ahead(setup, wanted, others);
        if self.is_settled() {
            self.late.take().map_or(Ok(()), Err)?;
            self.begin(setup, wanted)?;
        }
        self.settle(setup)
    }

    /// The outcome of a step that is ahead, if there is one.
    pub(super) fn drain(&mut self, setup: &Setup) -> Result<Option<Outcome>, GenerateError> {
        match self.is_settled() {
            true => Ok(None),
            false => self.settle(setup).map(Some),
        }
    }

    /// The logits that a lane's last token was chosen by, if no step is ahead and they were
    /// computed for all tokens; `row` is that token's.
    pub(super) fn logits(
        &self,
        setup: &Setup,
        lane: usize,
        row: usize,
    ) -> Result<Option<Vec<f32>>, GenerateError> {
        if !self.is_settled() {
            return Ok(None);
        }
        recorder::note_launch();
        let recorded = || self.recorded()?.logits.as_ref();
        let logits = self.logits.as_ref().or_else(recorded).cloned();
        let logits = logits.map(|logits| logits.narrow(0, lane, 1).narrow(1, row, 1));
        logits
            .map(|logits| logits.try_into_vec_as::<f32>())
            .transpose()
            .map_err(|error| setup.device_error(error))
    }

    /// Drops the recordings, with the memory that they hold.
    fn forget(&mut self) {
        // What it would hand back is in that memory.
        self.catch_up();
        self.recorder.forget();
        self.logits = None;
        self.graph_bytes = Some(0);
    }

    fn inputs(&self) -> Tensor<2, Int> {
        self.inputs.clone().expect("they are put back")
    }

    /// Replays as many steps as may be ahead.
    fn run_ahead(&mut self, setup: &Setup, wanted: Wanted, others: &mut dyn FnMut()) {
        // The masks of a step depend on the tokens of the one before, and which drafts there are to
        // verify depends on its drafts.
        let (most, verified) = match (setup.leaves_out(), self.kind.constrained) {
            (true, _) => (0, wanted.drafts),
            (false, true) => (0, setup.config.drafts),
            (false, false) => (setup.config.steps_ahead, setup.config.drafts),
        };
        let tokens = wanted.tokens;
        while self.late.is_none() && self.outstanding() <= most && self.outstanding() < tokens {
            match self.replay(setup, verified, others) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => self.late = Some(error),
            }
        }
    }

    /// What the recording depends on.
    fn epoch(&self) -> (Vec<u64>, StepKind) {
        (self.caches.both().map(Cache::epoch).collect(), self.kind)
    }

    /// Replays the recorded step that verifies the fewest drafts, at least so many; `false` if that
    /// is not possible now.
    fn replay(
        &mut self,
        setup: &Setup,
        verified: usize,
        others: &mut dyn FnMut(),
    ) -> Result<bool, GenerateError> {
        let Some(verified) = self.recorder.fitting(verified) else {
            return Ok(false);
        };
        let drafts = setup.config.drafts;
        let fits = self.caches.longest() + setup.positions(drafts) <= self.capacity();
        let epoch = self.epoch();
        if !fits {
            return Ok(false);
        }
        self.catch_up();
        let Self {
            recorder,
            links,
            caches,
            ..
        } = self;
        let follow = |part, results: &_| {
            if part == 0 {
                others();
            }
            links.follow(part, results, &mut caches.trunk);
        };
        // SAFETY: this, the setup and the model own or borrow every tensor of the step. None has
        // been replaced, as the epoch says, nor is it shared with another thread.
        if !unsafe { recorder.replay(verified, &epoch, follow) }? {
            return Ok(false);
        }
        self.logits = None;
        self.caches.trunk.commit_replay(1 + verified, 1 + verified);
        if let Some(cache) = &mut self.caches.draft {
            cache.commit_replay(setup.positions(drafts), setup.counted(verified));
        }
        self.read_recorded();
        Ok(true)
    }

    fn read_recorded(&mut self) {
        let results = self.recorded().map(Pending::of);
        self.ahead.extend(results);
    }

    /// What the recorded step results in that was replayed last, if there is one.
    fn recorded(&self) -> Option<&StepResults> {
        match self.recorder.results()? {
            PartResults::Chosen(results) => Some(results),
            PartResults::Passed(_) | PartResults::Exchanged => None,
        }
    }

    /// Launches a step, since none can be replayed. No step is ahead.
    fn begin(&mut self, setup: &Setup, wanted: Wanted) -> Result<(), GenerateError> {
        if self.recordings() > 0 {
            // The memory that they hold is needed.
            self.forget();
        }
        self.catch_up();
        // Near the end of the model's context there may be no positions for all drafts.
        let fitting = (0..=setup.config.drafts)
            .rev()
            .find(|drafts| setup.positions(*drafts) <= self.free());
        self.new_drafts = fitting.unwrap_or(0);
        self.launch(setup, self.verified(setup, wanted))
    }

    /// Positions that the longest text has place for yet.
    fn free(&self) -> usize {
        self.capacity().saturating_sub(self.caches.longest())
    }

    /// Drafts that a step verifies which makes as many as there are positions for.
    fn verified(&self, setup: &Setup, wanted: Wanted) -> usize {
        match setup.leaves_out() {
            true => wanted.drafts.min(self.new_drafts),
            false => self.new_drafts,
        }
    }

    /// Launches a step and begins to read its outcome.
    fn launch(&mut self, setup: &Setup, drafts: usize) -> Result<(), GenerateError> {
        recorder::note_launch();
        self.logits = None;
        let results = self.enqueue(setup, drafts)?;
        self.ahead.push_back(Pending::of(&results));
        self.logits = results.logits;
        Ok(())
    }

    /// The error of a step that a failed recording may have left nothing to work with.
    fn explained(&mut self, error: GenerateError) -> GenerateError {
        match self.spoiled.take() {
            Some(refusal) => recorder::spoiled(&refusal, error),
            None => error,
        }
    }

    /// Uploads the masks of the next step, if a lane has a constraint.
    fn upload_masks(&mut self, setup: &Setup) {
        if self.kind.constrained {
            let (rows, vocabulary) = (1 + setup.config.drafts, self.params.vocabulary());
            recorder::note_launch();
            self.constraints.upload(rows, vocabulary, setup.device());
        }
    }

    /// Reads the step that was launched last, if the masks of the next depend on it.
    fn read_for_masks(&mut self, setup: &Setup) -> Result<(), GenerateError> {
        if self.kind.constrained {
            let outcome = self.wait(setup)?;
            self.read.push_back(outcome);
            self.upload_masks(setup);
        }
        Ok(())
    }

    /// The outcome of the oldest step that the host has not counted.
    fn settle(&mut self, setup: &Setup) -> Result<Outcome, GenerateError> {
        match self.read.pop_front() {
            Some(outcome) => Ok(outcome),
            None => self.wait(setup),
        }
    }

    /// Waits for the oldest step that is ahead, and counts its positions.
    fn wait(&mut self, setup: &Setup) -> Result<Outcome, GenerateError> {
        let pending = self.ahead.pop_front().expect("a step is ahead");
        let outcome = pending.wait(self.lanes());
        let outcome = outcome.map_err(|error| self.explained(setup.device_error(error)))?;
        self.spoiled = None;
        let kept: Vec<usize> = outcome.accepted.iter().map(|count| 1 + count).collect();
        self.caches.trunk.settle(1 + outcome.drafts, &kept);
        if let Some(cache) = &mut self.caches.draft {
            cache.settle(setup.counted(outcome.drafts), &kept);
        }
        self.constraints.accept(&outcome);
        Ok(outcome)
    }
}
