//! When a step is launched, recorded or replayed, and when its outcome is read.

use burn::tensor::Device;

use super::engrams::EngramRows;
use super::executor::executor;
use super::state::{Lanes, Wanted};
use crate::cache::{Cache, OpenStep};
use crate::generate::engine::config::worth_recording;
use crate::generate::engine::recorder::{self, MOST_KINDS, Recordable};
use crate::generate::engine::results::{Outcome, PartResults, Pending};
use crate::generate::engine::setup::Setup;
use crate::generate::error::GenerateError;
use crate::graph::Refusal;

impl Lanes {
    /// The outcome of the oldest step that the host has not counted, of which there is one: the
    /// lanes want tokens yet. `others` lets the other lanes [catch
    /// up](Self::catch_up), once the first device has a part of a step of these. `None` where a
    /// recording has failed, and all rows with it.
    pub(crate) fn advance(
        &mut self,
        setup: &Setup,
        wanted: Wanted,
        others: &mut dyn FnMut(),
    ) -> Result<Option<Outcome>, GenerateError> {
        if self.is_settled() {
            self.upload_masks(setup);
        }
        self.run_ahead(setup, wanted, others);
        if self.is_settled() {
            self.late.take().map_or(Ok(()), Err)?;
            self.begin(setup, wanted)?;
        }
        match self.spoiled {
            None => self.settle(setup).map(Some),
            Some(_) => Ok(None),
        }
    }

    /// The outcome of a step that is ahead, if there is one.
    pub(crate) fn drain(&mut self, setup: &Setup) -> Result<Option<Outcome>, GenerateError> {
        match self.is_settled() {
            true => Ok(None),
            false => self.settle(setup).map(Some),
        }
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

    /// What recordings depend on, besides their kind.
    pub(super) fn epoch(&self) -> Vec<u64> {
        let caches = self.caches.both().map(Cache::epoch);
        caches.chain([self.caches.trunk.pool_epoch()]).collect()
    }

    /// Replays the recorded step of this kind that verifies the fewest drafts, at least so many;
    /// `false` if that is not possible now.
    fn replay(
        &mut self,
        setup: &Setup,
        verified: usize,
        others: &mut dyn FnMut(),
    ) -> Result<bool, GenerateError> {
        let Some(verified) = self.recorder.fitting(self.kind, verified) else {
            return Ok(false);
        };
        let drafts = setup.config.drafts;
        let fits = self.caches.longest() + setup.positions(drafts) <= self.capacity();
        let epoch = self.epoch();
        if !fits {
            return Ok(false);
        }
        self.catch_up();
        self.stage(setup, verified)?;
        let Self {
            recorder,
            links,
            kind,
            ..
        } = self;
        let follow = |part, results: &_| {
            if part == 0 {
                others();
            }
            links.follow(part, results);
        };
        // SAFETY: this, the setup and the model own or borrow every tensor of the step. None has
        // been replaced, as the epoch says, nor is it shared with another thread.
        if !unsafe { recorder.replay((*kind, verified), &epoch, follow) }? {
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

    /// Begins to read the outcome of a replay.
    fn read_recorded(&mut self) {
        let results = self.recorded().map(Pending::of);
        self.ahead.extend(results);
        self.links.hand_back_at_once(&mut self.caches.trunk);
    }

    /// Launches a step, or records some. No step is ahead.
    fn begin(&mut self, setup: &Setup, wanted: Wanted) -> Result<(), GenerateError> {
        self.catch_up();
        self.logits = None;
        self.recorder.note_launch(&self.epoch());
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
            if !recorded.is_empty() && self.may_record(setup)? {
                self.launched = 0;
                return self.record(setup, &recorded, wanted);
            }
        }
        self.launched += 1;
        self.new_drafts = drafts;
        self.launch(setup, self.verified(setup, wanted))
    }

    /// Whether there is as much memory as the lanes take without pages: a recording that finds none
    /// fails, and may take the weights with it. Recordings of other kinds make way, if the memory
    /// that grew for them is as much as is missing. Logs once if there is too little.
    fn may_record(&mut self, setup: &Setup) -> Result<bool, GenerateError> {
        let lanes = self.lanes();
        let left = [[lanes, 0]];
        self.recorder.keep_kinds(MOST_KINDS - 1, self.kind);
        let mut has_place = setup.has_place(&left, &[])?;
        if !has_place {
            let others = self.recorder.bytes_of_others(Some(self.kind));
            let others: Vec<_> = self.links.devices().iter().zip(others).collect();
            if setup.has_place(&left, &others)? {
                self.recorder.keep_kinds(0, self.kind);
                has_place = setup.has_place(&left, &[])?;
            }
        }
        if !has_place && !std::mem::replace(&mut self.lacks_memory, true) {
            let bytes = self.caches.bytes();
            log::warn!(
                "steps of {lanes} lanes are launched, not replayed: there is little memory left, \
                 less than {bytes} bytes besides what steps work with"
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
        self.stage(setup, drafts)?;
        let open = setup.model.open(1 + drafts, &mut self.caches.trunk)?;
        let results = executor(setup.model).launch(self, setup, open)?;
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
            bytes.collect::<Option<Vec<u64>>>()
        };
        self.links
            .prepare(setup, self.lanes() * (1 + setup.config.drafts));
        // What the texts are decided by that have the tokens which they have now.
        let before = self.constraints.fork();
        let mut reserved_before = reserved();
        let refused = executor(setup.model).refusal(setup.model);
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
                    let (epoch, now) = (self.epoch(), reserved());
                    let grown = now.as_ref().zip(reserved_before);
                    let grown = grown.map(|(now, before)| {
                        let devices = now.iter().zip(before);
                        let grown = devices.map(|(now, before)| now.saturating_sub(before));
                        grown.collect()
                    });
                    reserved_before = now;
                    let of = (self.kind, drafts);
                    self.recorder.keep(recordings, of, epoch, grown);
                    self.read_recorded();
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
                    self.constraints = before;
                    self.engrams = EngramRows::default();
                    self.spoiled = Some(refusal);
                    return Ok(());
                }
            }
        }
        Ok(())
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
        let outcome = outcome.map_err(|error| setup.device_error(error))?;
        let kept: Vec<usize> = outcome.accepted.iter().map(|count| 1 + count).collect();
        self.caches.trunk.settle(1 + outcome.drafts, &kept);
        if let Some(cache) = &mut self.caches.draft {
            cache.settle(setup.counted(outcome.drafts), &kept);
        }
        self.constraints.accept(&outcome);
        Ok(outcome)
    }
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
        executor(self.setup.model).is_joint()
    }

    fn launch(&mut self) -> Result<(), GenerateError> {
        self.lanes.launch(self.setup, self.drafts)?;
        self.lanes.read_for_masks(self.setup)?;
        // For the step that is recorded after this one, if it is.
        self.lanes.stage(self.setup, self.drafts)
    }

    fn work(&mut self, part: usize) -> Result<PartResults, GenerateError> {
        let Self { lanes, setup, .. } = self;
        lanes.logits = None;
        let open = match self.open {
            Some(open) => open,
            None => {
                let rows = 1 + self.drafts;
                setup.model.open(rows, &mut lanes.caches.trunk)?
            }
        };
        self.open = Some(open);
        executor(setup.model).part(lanes, setup, open, part)
    }

    fn follow(&mut self, part: usize, results: &PartResults) {
        self.lanes.links.follow(part, results);
    }
}
