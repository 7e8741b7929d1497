//! Steps that are recorded: when, and what is kept meanwhile.

use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::sampling::TokenCounts;

use super::super::constraint::Constraints;
use super::super::recorder::{self, LAUNCHED_BEFORE, Outcome, Recordable, WARM_UPS};
use super::super::results::PartResults;
use super::super::setup::{Caches, Setup};
use super::links::Links;
use super::{Lanes, Wanted};
use crate::cache::{OpenStep, detached};
use crate::generate::error::GenerateError;
use crate::graph::Refusal;

/// What steps write, as it was before some. It has memory of its own: what is recorded goes on to
/// read and write where it did.
struct Before {
    caches: Caches,
    links: Links,
    inputs: Tensor<2, Int>,
    counts: Option<TokenCounts>,
    constraints: Constraints,
}

impl Before {
    fn of(lanes: &Lanes) -> Result<Self, GenerateError> {
        let device = lanes.numbers.device();
        let mut counts = lanes.counts.clone();
        if let Some(counts) = &mut counts {
            // To count nothing is to write as well, which takes a copy.
            let none = Tensor::full([lanes.lanes(), 1], -1, &device);
            counts.count(none).map_err(GenerateError::Logits)?;
        }
        Ok(Self {
            caches: lanes.caches.copied(),
            links: lanes.links.copied(),
            inputs: detached(lanes.inputs()),
            counts,
            constraints: lanes.constraints.fork(),
        })
    }

    fn restore(self, lanes: &mut Lanes) {
        (lanes.caches, lanes.links) = (self.caches, self.links);
        (lanes.counts, lanes.constraints) = (self.counts, self.constraints);
        lanes.inputs = Some(self.inputs);
    }
}

impl Lanes {
    /// The drafts that the step verifies which is to be recorded now, if one is. No step is ahead.
    pub(super) fn due(&mut self, setup: &Setup, wanted: Wanted) -> Option<usize> {
        let epoch = self.epoch();
        if !self.recorder.is_of(&epoch) {
            self.forget();
            self.recorder.begin(epoch);
        }
        let all = setup.config.drafts;
        let verified = match setup.leaves_out() {
            true => wanted.drafts,
            false => all,
        };
        let due = self.recorder.due(verified, all)?;
        // It would be of little use to a text that has to move soon.
        let steps = WARM_UPS + 1 + LAUNCHED_BEFORE;
        (self.free() >= steps * setup.positions(all)).then_some(due)
    }

    /// A few steps that verify `drafts` drafts, of which the last is recorded and replayed. No step
    /// is ahead, and none is afterwards if the device records nothing.
    pub(super) fn record(
        &mut self,
        setup: &Setup,
        drafts: usize,
        wanted: Wanted,
    ) -> Result<(), GenerateError> {
        self.catch_up();
        self.new_drafts = setup.config.drafts;
        let devices = self.links.devices().to_vec();
        let reserved = || {
            let usage = devices.iter().map(Device::memory_pool_usage);
            let bytes = usage.map(|usage| usage.map(|usage| usage.bytes_reserved));
            bytes.sum::<Option<u64>>()
        };
        let reserved_before = reserved();
        recorder::note_launch();
        self.links
            .prepare(setup, self.lanes() * (1 + setup.config.drafts));
        let before = Before::of(self)?;
        let parallel = setup.model.parallel.as_ref();
        let is_recordable = parallel.is_none_or(|parallel| parallel.group().is_recordable());
        let refused = match (setup.model.placement.is_distinct(), is_recordable) {
            (true, true) => None,
            (false, _) => Some("a device has layers in several places"),
            (_, false) => Some("devices exchange through the host"),
        };
        let mut work = RecordedStep {
            lanes: self,
            setup,
            drafts,
            open: None,
        };
        let outcome = match refused {
            // SAFETY: this, the setup and the model own or borrow every tensor of the step.
            None => unsafe { recorder::record(&devices, &mut work) },
            Some(reason) => Outcome::Refused(Refusal::Unsupported(reason.to_owned())),
        };
        match outcome {
            Outcome::Recorded(recordings) => {
                self.recorder.keep(recordings, drafts);
                self.read_recorded();
                let grown = reserved().zip(reserved_before);
                let grown = grown.map(|(now, before)| now.saturating_sub(before));
                self.graph_bytes = self.graph_bytes.zip(grown).map(|(all, own)| all + own);
            }
            Outcome::Broken(error) if self.is_settled() => return Err(error),
            Outcome::Broken(error) => self.late = Some(error),
            Outcome::Refused(refusal) => self.recorder.refuse(&refusal),
            Outcome::Spoiled(refusal) => {
                self.recorder.forget();
                self.recorder.refuse(&refusal);
                self.ahead.clear();
                self.read.clear();
                before.restore(self);
                self.upload_masks(setup);
                self.spoiled = Some(refusal);
                let launched = self.launch(setup, self.verified(setup, wanted));
                return launched.map_err(|error| self.explained(error));
            }
        }
        Ok(())
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
