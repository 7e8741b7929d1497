//! A group of lanes: texts side by side on the device, some lanes of which are vacant, and the one
//! step that decodes all of them.
//!
//! A step runs the trunk over the last token of each text and its drafts, chooses the token after
//! each, keeps the positions up to the first draft that differs, and drafts again. Its shapes do
//! not depend on the outcome, which stays on the device for the next step and reaches the host
//! later.

mod links;
mod step;

use std::collections::VecDeque;
use std::ops::Range;

use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::sampling::{BatchParams, LaneParams, TokenCounts};

use super::constraint::{Constraints, LaneConstraint};
use super::recorder::{self, Recordable, Recorder, WORTH_RECORDING};
use super::results::{Outcome, PartResults, Pending, StepResults};
use super::setup::{Caches, Setup};
use crate::cache::{Cache, OpenStep};
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
    /// Steps that were launched where none could be replayed.
    launched: usize,
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
    /// Whether there was no memory to record steps.
    lacks_memory: bool,
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
            launched: 0,
            read: VecDeque::new(),
            ahead: VecDeque::new(),
            late: None,
            spoiled: None,
            graph_bytes: None,
            lacks_memory: false,
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

    /// Adds vacant lanes until there are `lanes`, or none if there is no memory for them. No step
    /// may be ahead. The parameters of all others have to be set again.
    pub(super) fn widen(&mut self, setup: &Setup, lanes: usize) -> Result<(), GenerateError> {
        self.catch_up();
        recorder::note_launch();
        let (known, device) = (self.lanes(), setup.device());
        let wider = self.caches.both().map(|cache| cache.wider_rings(lanes));
        let wider = wider.collect::<Result<Vec<_>, _>>()?;
        // It is of the lanes before.
        self.forget();
        for (cache, rings) in self.caches.both_mut().zip(wider) {
            cache.widen(lanes, rings);
        }
        self.links.widen(lanes);
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
            self.upload_masks(setup);
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

    /// Drops the recording, with the memory that it holds.
    fn forget(&mut self) {
        self.recorder.forget();
        self.logits = None;
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

    /// Launches a step, or records some. No step is ahead.
    fn begin(&mut self, setup: &Setup, wanted: Wanted) -> Result<(), GenerateError> {
        // It is in the memory of the recording, which is needed.
        self.catch_up();
        self.forget();
        let free = self.capacity() - self.caches.longest().min(self.capacity());
        let all = setup.config.drafts;
        // Near the end of the model's context there may be no positions for all drafts.
        let fitting = (0..=all)
            .rev()
            .find(|drafts| setup.positions(*drafts) <= free);
        let drafts = fitting.unwrap_or(0);
        // Recording is worth it for many short texts as well.
        let used = wanted.tokens.max(self.launched * (1 + drafts));
        if self.recorder.is_wanted() && drafts == all {
            let recorded = worth_recording(free.min(used), all, setup.leaves_out());
            // The caches are copied for that. A recording that fails may take the weights with it.
            if !recorded.is_empty() && self.may_record(setup)? {
                self.launched = 0;
                return self.record(setup, &recorded, wanted);
            }
        }
        self.launched += 1;
        self.new_drafts = drafts;
        self.launch(setup, self.verified(setup, wanted))
    }

    /// Whether there is memory for a copy of the caches. Logs once if there is none.
    fn may_record(&mut self, setup: &Setup) -> Result<bool, GenerateError> {
        let (lanes, capacity) = (self.lanes(), self.capacity());
        let has_place = setup.has_place(&[[capacity, lanes]])?;
        if !has_place && !std::mem::replace(&mut self.lacks_memory, true) {
            let bytes = self.caches.bytes();
            log::warn!(
                "steps of {lanes} lanes of {capacity} positions are launched, not replayed: there \
                 is no memory for a copy of their caches, of {bytes} bytes"
            );
        }
        Ok(has_place)
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

    /// For each of some numbers of verified drafts, a few steps, of which the last is recorded and
    /// replayed.
    fn record(
        &mut self,
        setup: &Setup,
        recorded: &[usize],
        wanted: Wanted,
    ) -> Result<(), GenerateError> {
        self.new_drafts = setup.config.drafts;
        let devices = self.links.devices().to_vec();
        let reserved = || {
            let usage = devices.iter().map(Device::memory_pool_usage);
            let bytes = usage.map(|usage| usage.map(|usage| usage.bytes_reserved));
            bytes.sum::<Option<u64>>()
        };
        let reserved_before = reserved();
        self.links
            .prepare(setup, self.lanes() * (1 + setup.config.drafts));
        // The clones share buffers with their originals until the next step, which therefore leaves
        // them alone and writes copies.
        let before = (
            (self.caches.clone(), self.links.clone()),
            self.inputs.clone(),
            self.counts.clone(),
            self.constraints.fork(),
        );
        let parallel = setup.model.parallel.as_ref();
        let is_recordable = parallel.is_none_or(|parallel| parallel.group().is_recordable());
        let refused = match (setup.model.placement.is_distinct(), is_recordable) {
            (true, true) => None,
            (false, _) => Some("a device has layers in several places"),
            (_, false) => Some("devices exchange through the host"),
        };
        for &drafts in recorded {
            // The next steps begin where the replay of the recording before has ended.
            self.catch_up();
            // The host may be behind by no more steps than those of one recording.
            while !self.ahead.is_empty() {
                let outcome = self.wait(setup)?;
                self.read.push_back(outcome);
                self.upload_masks(setup);
            }
            let mut work = RecordedStep {
                lanes: self,
                setup,
                drafts,
                open: None,
            };
            let outcome = match refused {
                // SAFETY: this, the setup and the model own or borrow every tensor of the step.
                None => unsafe { recorder::record(&devices, &mut work) },
                Some(reason) => recorder::Outcome::Refused(Refusal::Unsupported(reason.to_owned())),
            };
            match outcome {
                recorder::Outcome::Recorded(recordings) => {
                    let epoch = self.epoch();
                    self.recorder.keep(recordings, drafts, epoch);
                    self.read_recorded();
                    let grown = reserved().zip(reserved_before);
                    self.graph_bytes = grown.map(|(now, before)| now.saturating_sub(before));
                }
                recorder::Outcome::Broken(error) if self.is_settled() => return Err(error),
                recorder::Outcome::Broken(error) => {
                    self.late = Some(error);
                    return Ok(());
                }
                recorder::Outcome::Refused(refusal) => {
                    self.recorder.refuse(&refusal);
                    return match self.is_settled() {
                        true => self.launch(setup, self.verified(setup, wanted)),
                        false => Ok(()),
                    };
                }
                recorder::Outcome::Spoiled(refusal) => {
                    self.recorder.forget();
                    self.recorder.refuse(&refusal);
                    self.ahead.clear();
                    self.read.clear();
                    // Continue from the state before.
                    let (caches, inputs, counts, constraints) = before;
                    (self.caches, self.links) = caches;
                    (self.inputs, self.counts, self.constraints) = (inputs, counts, constraints);
                    self.upload_masks(setup);
                    self.spoiled = Some(refusal);
                    let launched = self.launch(setup, self.verified(setup, wanted));
                    return launched.map_err(|error| self.explained(error));
                }
            }
        }
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

/// The numbers of verified drafts whose steps are worth recording where so many tokens follow: all
/// drafts first, then the fewest, which take the least. Only all, unless drafts may be left out.
fn worth_recording(tokens: usize, all: usize, leaves_out: bool) -> Vec<usize> {
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

/// A step that is recorded, a part for each device.
struct RecordedStep<'l, 's> {
    lanes: &'l mut Lanes,
    setup: &'l Setup<'s>,
    /// Drafts that it verifies.
    drafts: usize,
    /// The step, once its first part is recorded.
    open: Option<OpenStep>,
}

impl Recordable for RecordedStep<'_, '_> {
    type Results = PartResults;

    fn is_joint(&self) -> bool {
        self.setup.model.parallel.is_some()
    }

    fn launch(&mut self) -> Result<(), GenerateError> {
        self.lanes.launch(self.setup, self.drafts)?;
        self.lanes.read_for_masks(self.setup)
    }

    fn work(&mut self, part: usize) -> Result<PartResults, GenerateError> {
        let Self { lanes, setup, .. } = self;
        let rows = 1 + self.drafts;
        lanes.logits = None;
        let open = match self.open {
            Some(open) => open,
            None => setup.model.open(rows, &mut lanes.caches.trunk)?,
        };
        self.open = Some(open);
        if setup.model.parallel.is_some() {
            let results = lanes.run_ranks(setup, open, part..part + 1)?;
            let chosen = results.map(|results| PartResults::Chosen(Box::new(results)));
            return Ok(chosen.unwrap_or(PartResults::Exchanged));
        }
        let given = (part > 0).then(|| lanes.links.arrival(part, lanes.lanes() * rows));
        Ok(match part + 1 == lanes.links.devices().len() {
            true => PartResults::Chosen(Box::new(lanes.finish(setup, open, given)?)),
            false => PartResults::Passed(Box::new(lanes.pass(setup, open, (part, given)))),
        })
    }

    fn follow(&mut self, part: usize, results: &PartResults) {
        let Lanes { links, caches, .. } = &mut *self.lanes;
        links.follow(part, results, &mut caches.trunk);
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::EngineConfig;
    use super::*;

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
