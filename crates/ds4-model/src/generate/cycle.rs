//! Speculative decoding as one recorded cycle: verify drafts, keep those that stand, and draft anew, without the host in between.
//!
//! A cycle has the same shapes whatever comes of it, and what comes of it stays on the device: the trunk runs over the last token and
//! all drafts, the MTP layer over as many positions, and both caches then keep the positions whose tokens stand. What the MTP layer
//! has made of the others lies beyond its length, where the next cycle writes.

use std::collections::VecDeque;

use burn::tensor::{IndexingUpdateOp, Int, Tensor};
use burn_ds4_ops::readback::Readback;
use burn_ds4_ops::sampling::{self, Draws, MAX_COLUMNS, Sampling};
use burn_ds4_ops::topk::{Windows, top_k_ids};

use super::choice::Choice;
use super::driver::ids_tensor;
use super::error::GenerateError;
use super::recorder::{Outcome, Recorder, WORTH_RECORDING, record, spoiled};
use super::target::{device_error, read_tokens};
use super::verifier::Verdict;
use crate::cache::Cache;
use crate::graph::Refusal;
use crate::model::Model;
use crate::trace::Trace;

/// Cycles that a device has to do yet while the host reads what came of the one before: enough not to keep it waiting.
const CYCLES_AHEAD: usize = 1;

/// What a cycle works on, which whoever has the cycle owns: of the trunk, and of the MTP layer. Between cycles they are equally long.
pub(super) struct Caches<'c> {
    pub(super) trunk: &'c mut Cache,
    pub(super) mtp: &'c mut Cache,
}

impl Caches<'_> {
    fn epochs(&self) -> [u64; 2] {
        [self.trunk.epoch(), self.mtp.epoch()]
    }

    /// Tells the host how many positions a step of each has lost again on the device.
    fn settle(&mut self, trunk: usize, mtp: usize) {
        self.trunk.settle(trunk);
        self.mtp.settle(mtp);
    }
}

/// Greedy decoding of one sequence with a fixed number of drafts by the MTP layer.
#[derive(Debug)]
pub(super) struct Cycle<'a> {
    /// Its recording goes before all that it reads and writes.
    recorder: Recorder<sampling::Verdict, [u64; 2]>,
    model: &'a Model,
    drafts: usize,
    /// The last token, which is in no cache yet, and its drafts: `[1, 1 + drafts]`, always in the same place. Taken while they are
    /// written.
    inputs: Option<Tensor<2, Int>>,
    /// Where each of them is written.
    places: Vec<Tensor<1, Int>>,
    /// How drafts are chosen.
    choose: Choice,
    /// What a greedy choice does not read.
    draws: Draws,
    /// Whether the inputs are those that the text goes on from.
    entered: bool,
    /// What came of cycles that were replayed and that the host does not count yet.
    ahead: VecDeque<Readback>,
    /// Of a recording that has failed, until a round was launched after it.
    spoiled: Option<Refusal>,
}

impl<'a> Cycle<'a> {
    /// Makes a cycle of `drafts` drafts, of which there is at least one; `None` where a model's drafts are chosen by other means than
    /// its output matrix, or from too many.
    pub(super) fn new(model: &'a Model, drafts: usize) -> Option<Self> {
        let [vocabulary, _] = model.embedding.dims();
        let mtp = model.mtp.as_ref()?;
        if model.flash_head.is_some() || mtp.flash_head.is_some() || vocabulary > MAX_COLUMNS {
            return None;
        }
        let device = model.embedding.val().device();
        let place = |place: usize| Tensor::from_data([place as i32], &device);
        Some(Self {
            recorder: Recorder::new("cycle", true),
            model,
            drafts,
            inputs: None,
            places: (0..=drafts).map(place).collect(),
            choose: likeliest,
            draws: Draws {
                seeds: Tensor::zeros([1, 2], &device),
                positions: Tensor::zeros([1], &device),
            },
            entered: false,
            ahead: VecDeque::new(),
            spoiled: None,
        })
    }

    /// Drafts a cycle.
    pub(super) fn drafts(&self) -> usize {
        self.drafts
    }

    /// Cycles that were replayed.
    pub(super) fn replays(&self) -> usize {
        self.recorder.replays()
    }

    /// Why there are no graphs, though the device has them.
    pub(super) fn refusal(&self) -> Option<&str> {
        self.recorder.refusal()
    }

    /// Whether a recording can be made now, and be of use for so many tokens.
    pub(super) fn is_worth_recording(&self, caches: [&Cache; 2], tokens: usize) -> bool {
        let rooms = caches.map(|cache| cache.capacity() - cache.lengths()[0]);
        let fewest = rooms.into_iter().fold(tokens, usize::min);
        self.recorder.is_wanted() && !self.entered && fewest >= WORTH_RECORDING * (self.drafts + 1)
    }

    /// A few cycles from a token and its drafts on, of which the last is recorded and replayed: what comes of each.
    ///
    /// It comes of none if recording fails: no tokens are lost, and there will be no more recordings.
    pub(super) fn record(
        &mut self,
        caches: Caches,
        last: u32,
        drafts: &[u32],
    ) -> Result<Vec<Verdict>, GenerateError> {
        let device = self.places[0].device();
        self.inputs = Some(ids_tensor(&[&[last], drafts].concat(), &device));
        self.entered = true;
        // Shares its buffers with what it is of until the next cycle, which thus leaves them alone and writes copies.
        let before = (
            caches.trunk.clone(),
            caches.mtp.clone(),
            self.inputs.clone(),
        );
        let mut context = (self, caches);
        // Safety: this, the caches and the model own or borrow every tensor of the cycle.
        let (mut verdicts, outcome) = unsafe {
            record(
                &device,
                &mut context,
                |(cycle, caches)| cycle.launch(caches),
                |(cycle, caches)| cycle.step(caches),
            )
        };
        let (cycle, mut caches) = context;
        match outcome {
            Outcome::Recorded(recording) => {
                let last = cycle.settle_launched(&recording.results, &mut caches);
                cycle.recorder.keep(recording, caches.epochs());
                cycle.recorder.in_time(verdicts, last)
            }
            Outcome::Broken(error) => cycle.recorder.in_time(verdicts, Err(error)),
            Outcome::Refused(refusal) => {
                cycle.recorder.refuse(&refusal);
                Ok(verdicts)
            }
            Outcome::Spoiled(refusal) => {
                cycle.recorder.refuse(&refusal);
                // On with what there was before.
                (*caches.trunk, *caches.mtp, cycle.inputs) = before;
                cycle.spoiled = Some(refusal);
                verdicts.clear();
                Ok(verdicts)
            }
        }
    }

    /// Replays the recorded cycle: what comes of it, which may be more than the `tokens` that are wanted. `None` if that is not possible
    /// now. Where the cycle cannot be enough for them, another is replayed before it is read.
    pub(super) fn replay(
        &mut self,
        mut caches: Caches,
        tokens: usize,
    ) -> Result<Option<Verdict>, GenerateError> {
        while !self.recorder.is_late() && self.ahead.len() <= CYCLES_AHEAD {
            match self.run_ahead(&caches, tokens) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => self.recorder.defer(error),
            }
        }
        let Some(read) = self.ahead.pop_front() else {
            return self.recorder.late().map(|()| None);
        };
        let verdict = self.arrived(read)?;
        let [trunk, mtp] = self.written();
        caches.trunk.commit_replay(trunk);
        caches.mtp.commit_replay(mtp);
        caches.settle(self.drafts - verdict.accepted, mtp - 1 - verdict.accepted);
        Ok(Some(verdict))
    }

    /// Positions that a cycle writes in each cache.
    fn written(&self) -> [usize; 2] {
        [self.drafts + 1, 2 * self.drafts]
    }

    /// Replays another cycle, and begins to read what comes of it. `false` if that is not possible now, or if those that are ahead could
    /// be enough for `tokens`.
    fn run_ahead(&mut self, caches: &Caches, tokens: usize) -> Result<bool, GenerateError> {
        let [trunk, mtp] = self.written();
        let before = self.ahead.len() * trunk;
        // There may be room for fewer drafts where a step is refused.
        let fits = |cache: &Cache, count| cache.check_replay(before + count).unwrap_or(false);
        let fits = tokens > before && fits(caches.trunk, trunk) && fits(caches.mtp, mtp);
        let epochs = caches.epochs();
        // Safety: no tensor of the cycle has been replaced, as the epochs say, which no other caches have had: the caches, the model
        // and this own or borrow them all, and none is shared with another thread.
        if !fits || !unsafe { self.recorder.replay(&epochs) }? {
            return Ok(false);
        }
        self.ahead.extend(self.recorder.results().map(read));
        Ok(true)
    }

    /// Ends the cycles, and what was recorded. If there were any, the drafts that the last has made: the MTP layer has seen all
    /// tokens before them.
    pub(super) fn leave(&mut self) -> Result<Option<Vec<u32>>, GenerateError> {
        self.recorder.forget();
        let inputs = self.inputs.take();
        if !std::mem::take(&mut self.entered) {
            return Ok(None);
        }
        let inputs = inputs.map(read_tokens).transpose()?;
        Ok(inputs.map(|inputs| inputs[1..].to_vec()))
    }

    /// What came of a round that was launched, which says so where a recording that failed has left it nothing to work with.
    pub(super) fn explain(
        &mut self,
        round: Result<(), GenerateError>,
    ) -> Result<(), GenerateError> {
        match self.spoiled.take() {
            Some(refusal) => round.map_err(|error| spoiled(&refusal, error)),
            None => round,
        }
    }

    /// One cycle that is launched, and what comes of it.
    fn launch(&mut self, caches: &mut Caches) -> Result<Verdict, GenerateError> {
        let verdict = self.step(caches)?;
        self.settle_launched(&verdict, caches)
    }

    /// Reads what came of a cycle that the host counts all positions of.
    fn settle_launched(
        &self,
        verdict: &sampling::Verdict,
        caches: &mut Caches,
    ) -> Result<Verdict, GenerateError> {
        let verdict = self.arrived(read(verdict))?;
        let fallen = self.drafts - verdict.accepted;
        caches.settle(fallen, fallen);
        Ok(verdict)
    }

    /// Enqueues one cycle.
    fn step(&mut self, caches: &mut Caches) -> Result<sampling::Verdict, GenerateError> {
        let Caches { trunk, mtp } = caches;
        let (model, trace) = (self.model, &Trace::off());
        let inputs = self.inputs.clone().expect("they are put back");
        let dtype = inputs.dtype();
        let streams = model.forward_streams(inputs.clone(), trunk, trace)?;
        let verdict = sampling::verify(
            model.logits(streams.clone()),
            inputs.narrow(1, 1, self.drafts),
            &Sampling::default(),
            self.draws.clone(),
        )
        .map_err(device_error)?;
        let tokens = verdict.tokens.clone().cast(dtype);
        // Of the last token that stands: as many positions as drafts that stand come before it.
        let newest = verdict.accepted.clone().cast(dtype);
        trunk.keep_first(self.drafts, newest.clone());
        self.put(0, tokens.clone().select(1, newest.clone()));

        let streams = model.forward_mtp(streams, tokens, mtp, trace)?;
        mtp.keep_first(self.drafts, newest.clone());
        let mut streams = streams.select(1, newest);
        for place in 1..=self.drafts {
            let draft = (self.choose)(model.mtp_logits(streams.clone()));
            self.put(place, draft.clone());
            if place < self.drafts {
                // The layer's own streams stand in for the trunk's, which do not exist yet.
                streams = model.forward_mtp(streams, draft, mtp, trace)?;
            }
        }
        mtp.truncate(self.drafts - 1)?;
        Ok(verdict)
    }

    /// Writes one of the inputs, in place.
    fn put(&mut self, place: usize, token: Tensor<2, Int>) {
        let inputs = self.inputs.take().expect("they are put back");
        let token = token.cast(inputs.dtype());
        let place = self.places[place].clone();
        self.inputs = Some(inputs.select_assign(1, place, token, IndexingUpdateOp::Assign));
    }

    /// What came of a cycle.
    fn arrived(&self, read: Readback) -> Result<Verdict, GenerateError> {
        let numbers = read.wait().map_err(device_error)?;
        let accepted = numbers[0] as usize;
        let tokens = numbers.into_iter().skip(1).take(accepted + 1);
        let tokens = tokens.map(u32::try_from).collect::<Result<_, _>>();
        let [len, _] = self.model.embedding.dims();
        Ok(Verdict {
            accepted,
            tokens: tokens.map_err(|_| GenerateError::NoCandidate { len })?,
        })
    }
}

/// Begins to read what came of a cycle: the only read of it.
fn read(verdict: &sampling::Verdict) -> Readback {
    let tokens = verdict.tokens.clone();
    let [_, count] = tokens.dims();
    Readback::begin([verdict.accepted.clone(), tokens.reshape([count])])
}

/// The token of the highest logit, of equal ones the lowest id.
fn likeliest(logits: Tensor<3>) -> Tensor<2, Int> {
    let [_, _, vocabulary] = logits.dims();
    top_k_ids(logits.reshape([1, vocabulary]), Windows::All, 1)
}

#[cfg(test)]
#[path = "cycle_tests.rs"]
mod tests;
