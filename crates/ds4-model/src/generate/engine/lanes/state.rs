//! What a group of lanes has, and what changes it between steps.

use std::collections::VecDeque;

use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::sampling::{BatchParams, LaneParams, TokenCounts};

use super::engrams::EngramRows;
use super::links::Links;
use crate::generate::engine::constraint::Constraints;
use crate::generate::engine::recorder::{self, Recorder};
use crate::generate::engine::results::{Outcome, PartResults, Pending, StepResults};
use crate::generate::engine::setup::{Caches, Setup};
use crate::generate::error::GenerateError;
use crate::graph::Refusal;

/// What decides which work a step launches, besides its shape.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepKind {
    /// Whether all lanes take the most likely token.
    pub(crate) greedy: bool,
    /// Whether a lane has penalties or a logit bias.
    pub(crate) penalties: bool,
    /// Whether a lane has a constraint.
    pub(crate) constrained: bool,
    /// The most likely tokens that are listed, if a lane wants log-probabilities.
    pub(crate) log_probs: Option<usize>,
}

/// What the texts of a group of lanes want of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// Tokens that one of them wants yet, at most.
    pub(crate) tokens: usize,
    /// Drafts that one of them has to be verified, at most. Known when no step is ahead.
    pub(crate) drafts: usize,
}

#[derive(Debug)]
pub(crate) struct Lanes {
    /// Its recordings go before all that it reads and writes.
    pub(super) recorder: Recorder<PartResults, StepKind>,
    pub(super) caches: Caches,
    pub(super) links: Links,
    pub(super) params: BatchParams,
    pub(super) counts: Option<TokenCounts>,
    pub(super) constraints: Constraints,
    /// The last token of each text, which is in no cache yet, and its drafts, -1 where there is
    /// none: `[lanes, 1 + drafts]`, always in the same buffer. Taken while they are written.
    pub(super) inputs: Option<Tensor<2, Int>>,
    /// What the next step reads of tables.
    pub(super) engrams: EngramRows,
    /// Of the lanes: `[lanes]`. Made here, because it is an upload, which cannot be recorded.
    pub(super) numbers: Tensor<1, Int>,
    pub(super) kind: StepKind,
    /// Drafts that the step makes which is being launched.
    pub(super) new_drafts: usize,
    /// The logits of the last step, if it was launched.
    pub(super) logits: Option<Tensor<3>>,
    /// Steps that were launched where none could be replayed.
    pub(super) launched: usize,
    /// Steps that the host has read already, since the masks of the next depended on them.
    pub(super) read: VecDeque<Outcome>,
    /// Steps after those.
    pub(super) ahead: VecDeque<Pending>,
    /// Of a step after those that are ahead.
    pub(super) late: Option<GenerateError>,
    /// Why a recording has failed, with all that its steps have written.
    pub(super) spoiled: Option<Refusal>,
    /// Whether there was no memory to record steps.
    pub(super) lacks_memory: bool,
}

impl Lanes {
    /// Vacant lanes.
    pub(crate) fn new(setup: &Setup, lanes: usize) -> Result<Self, GenerateError> {
        let mut caches = setup.new_caches([lanes, 0])?;
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
            engrams: EngramRows::default(),
            numbers: Tensor::arange(0..lanes as i64, device),
            kind: StepKind::default(),
            new_drafts: 0,
            logits: None,
            launched: 0,
            read: VecDeque::new(),
            ahead: VecDeque::new(),
            late: None,
            spoiled: None,
            lacks_memory: false,
        })
    }

    /// Hands back to the other devices what the last step has left for the next, if that was put
    /// off.
    pub(crate) fn catch_up(&mut self) {
        self.links.catch_up(&mut self.caches.trunk);
    }

    pub(crate) fn lanes(&self) -> usize {
        self.caches.trunk.batch()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.caches.capacity()
    }

    /// Positions of each lane, counted on the host; at most as many more as steps ahead may add.
    pub(crate) fn lengths(&self) -> &[usize] {
        self.caches.trunk.lengths()
    }

    pub(crate) fn caches(&self) -> &Caches {
        &self.caches
    }

    /// Lets a text have pages for so many positions, of which there are enough.
    pub(crate) fn provide(&mut self, lane: usize, positions: usize) -> Result<(), GenerateError> {
        self.caches.provide(lane, positions)
    }

    /// The constraints of all lanes, as their texts are, and why a recording has failed, if one
    /// has.
    pub(crate) fn into_parts(self) -> (Constraints, Option<Refusal>) {
        (self.constraints, self.spoiled)
    }

    /// Steps that were replayed.
    pub(crate) fn replays(&self) -> usize {
        self.recorder.replays()
    }

    /// Why there are no recordings, though they were wanted and the device has them.
    pub(crate) fn refusal(&self) -> Option<&str> {
        self.recorder.refusal()
    }

    /// Steps that are recorded.
    pub(crate) fn recordings(&self) -> usize {
        self.recorder.count()
    }

    /// Bytes by which the device's memory grew for what is recorded.
    pub(crate) fn graph_bytes(&self) -> Option<u64> {
        self.recorder.bytes()
    }

    /// Whether the host has counted all steps.
    pub(crate) fn is_settled(&self) -> bool {
        self.outstanding() == 0
    }

    /// Steps that the host has not counted.
    pub(super) fn outstanding(&self) -> usize {
        self.read.len() + self.ahead.len()
    }

    /// Whether a lane has a constraint.
    pub(crate) fn is_constrained(&self) -> bool {
        !self.constraints.is_empty()
    }

    /// Why a lane's constraint allows no token.
    pub(crate) fn constraint_failure(&self, lane: usize) -> Option<&str> {
        self.constraints.failure(lane)
    }

    /// The logits that a lane's last token was chosen by, if no step is ahead and they were
    /// computed for all tokens; `row` is that token's.
    pub(crate) fn logits(
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

    /// Drops what is recorded and can never be replayed any more; `false` if there is nothing.
    pub(crate) fn drop_old_recordings(&mut self) -> bool {
        let before = self.recorder.count();
        if self.is_settled() {
            let epoch = self.epoch();
            self.recorder.keep_current(&epoch);
        }
        self.recorder.count() < before
    }

    /// Drops what is recorded of other kinds of steps than the next one, and of that as well if
    /// these lanes take none; `false` if there is nothing.
    pub(crate) fn drop_recordings(&mut self, is_decoded: bool) -> bool {
        let before = self.recorder.count();
        match self.kept_kind(is_decoded) {
            Some(kind) => self.recorder.keep_kinds(0, kind),
            None => self.forget(),
        }
        self.recorder.count() < before
    }

    /// Bytes by which the memory of devices grew for what [`drop_recordings`] drops, where known.
    ///
    /// [`drop_recordings`]: Self::drop_recordings
    pub(crate) fn idle_bytes(&self, is_decoded: bool) -> impl Iterator<Item = (&Device, u64)> {
        let bytes = self.recorder.bytes_of_others(self.kept_kind(is_decoded));
        self.links.devices().iter().zip(bytes)
    }

    /// The kind of steps whose recordings stay for the next step or one that is ahead.
    fn kept_kind(&self, is_decoded: bool) -> Option<StepKind> {
        (is_decoded || !self.is_settled()).then_some(self.kind)
    }

    /// Drops the recording, with the memory that it holds.
    pub(super) fn forget(&mut self) {
        self.recorder.forget();
        self.logits = None;
    }

    pub(super) fn inputs(&self) -> Tensor<2, Int> {
        self.inputs.clone().expect("they are put back")
    }

    /// Stages what a step reads of tables that verifies so many drafts.
    pub(super) fn stage(&mut self, setup: &Setup, drafts: usize) -> Result<(), GenerateError> {
        if setup.model.config().engram.is_none() {
            return Ok(());
        }
        let ids = self.inputs().narrow(1, 0, 1 + drafts);
        self.engrams.stage(setup, ids, &mut self.caches.trunk)
    }

    /// What the recorded step results in that was replayed last, if there is one.
    pub(super) fn recorded(&self) -> Option<&StepResults> {
        match self.recorder.results()? {
            PartResults::Chosen(results) => Some(results),
            PartResults::Passed(_) | PartResults::Exchanged => None,
        }
    }
}
