//! What changes a group of lanes between steps.

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::sampling::{BatchParams, LaneParams, TokenCounts};

use super::links::arranged;
use super::state::{Lanes, StepKind};
use crate::generate::engine::constraint::LaneConstraint;
use crate::generate::engine::recorder;
use crate::generate::engine::setup::{Caches, Setup};
use crate::generate::error::GenerateError;

/// Lanes of which the host knows all: no step is ahead, and all devices have what they need for the
/// next. Nothing else changes them.
pub(crate) struct Settled<'l> {
    pub(super) lanes: &'l mut Lanes,
}

impl Lanes {
    /// These lanes for changes, if the host has counted all steps.
    pub(crate) fn settled(&mut self) -> Option<Settled<'_>> {
        if !self.is_settled() {
            return None;
        }
        self.catch_up();
        Some(Settled { lanes: self })
    }
}

impl Settled<'_> {
    /// Sets what the next step does. Returns whether the parameters of all lanes have to be set
    /// again.
    pub(crate) fn set_kind(&mut self, setup: &Setup, kind: StepKind) -> bool {
        self.lanes.kind = kind;
        // Counts that nobody needs any more are kept, because a recording may use them.
        let is_new = kind.penalties && self.lanes.counts.is_none();
        if is_new {
            recorder::note_launch();
            let (lanes, vocabulary) = (self.lanes.lanes(), self.lanes.params.vocabulary());
            self.lanes.counts = Some(TokenCounts::new(lanes, vocabulary, setup.device()));
        }
        is_new
    }

    /// Sets how the tokens of a lane are chosen.
    pub(crate) fn set_params(
        &mut self,
        lane: usize,
        params: &LaneParams,
        history: Option<[&[u32]; 2]>,
    ) -> Result<(), GenerateError> {
        recorder::note_launch();
        let set = self.lanes.params.set_lane(lane, params);
        set.map_err(GenerateError::Logits)?;
        if let (Some(counts), Some([prompt, output])) = (&mut self.lanes.counts, history) {
            let reset = counts.reset_lane(lane, prompt, output);
            reset.map_err(GenerateError::Logits)?;
        }
        Ok(())
    }

    /// Makes these lanes of those that there are, in this order, `None` for one that is vacant; or
    /// leaves all as it was, if there is no memory for them. The parameters of all lanes have to be
    /// set again.
    pub(crate) fn arrange(
        &mut self,
        setup: &Setup,
        lanes: &[Option<usize>],
    ) -> Result<(), GenerateError> {
        recorder::note_launch();
        let caches = self.lanes.caches.with_sequences(lanes)?;
        // It is of the lanes before.
        self.lanes.forget();
        self.lanes.caches = caches;
        self.lanes.links.arrange(lanes);
        let inputs = self.lanes.inputs.take();
        self.lanes.inputs = inputs.map(|inputs| arranged(inputs, lanes));
        let (count, device) = (lanes.len(), setup.device());
        let params = vec![LaneParams::default(); count];
        let params = BatchParams::new(&params, self.lanes.params.vocabulary(), device);
        self.lanes.params = params.map_err(GenerateError::Logits)?;
        self.lanes.counts = None;
        self.lanes.constraints.arrange(lanes);
        self.lanes.numbers = Tensor::arange(0..count as i64, device);
        Ok(())
    }

    /// Takes texts from other caches, from one lane there on, into the same number of vacant lanes:
    /// as many positions of each as `lengths` says, with their pages.
    pub(crate) fn adopt(
        &mut self,
        lane: usize,
        source: (&Caches, usize),
        lengths: &[usize],
        is_left: bool,
    ) -> Result<(), GenerateError> {
        self.lanes.caches.adopt(lane, source, lengths, is_left)
    }

    /// Sets the last token and the drafts of a text that was taken into a lane
    /// (`[1, 1 + drafts]`), and its constraint.
    pub(crate) fn enter(
        &mut self,
        lane: usize,
        own: Tensor<2, Int>,
        constraint: Option<LaneConstraint>,
    ) {
        self.lanes.constraints.set(lane, constraint);
        self.lanes.links.enter(lane, &own);
        let inputs = self.lanes.inputs.take().expect("they are put back");
        let [_, columns] = inputs.dims();
        let own = own.cast(inputs.dtype());
        self.lanes.inputs = Some(inputs.slice_assign([lane..lane + 1, 0..columns], own));
    }

    /// Makes a lane vacant.
    pub(crate) fn vacate(&mut self, lane: usize) -> Result<(), GenerateError> {
        recorder::note_launch();
        self.lanes.constraints.set(lane, None);
        for cache in self.lanes.caches.both_mut() {
            cache.vacate(lane)?;
        }
        Ok(())
    }

    /// Takes the constraint of a lane, if it has one.
    pub(crate) fn take_constraint(&mut self, lane: usize) -> Option<LaneConstraint> {
        self.lanes.constraints.take(lane)
    }
}
