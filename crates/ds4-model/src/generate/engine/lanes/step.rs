//! The work of one step.

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::sampling::{apply_penalties, log_probs, sample, verify};

use super::super::drafter::{Features, Verified};
use super::super::results::StepResults;
use super::super::setup::Setup;
use super::{Lanes, StepKind};
use crate::cache::OpenStep;
use crate::generate::error::GenerateError;
use crate::model::Passing;
use crate::trace::Trace;

impl Lanes {
    /// Enqueues one step.
    pub(super) fn enqueue(
        &mut self,
        setup: &Setup,
        drafts: usize,
    ) -> Result<StepResults, GenerateError> {
        let open = setup.model.open(1 + drafts, &mut self.caches.trunk)?;
        let last = self.links.devices().len() - 1;
        let mut given = None;
        for part in 0..last {
            let rows = self.pass(setup, open, (part, given));
            given = Some(self.links.deliver(rows, part + 1));
        }
        let results = self.finish(setup, open, given)?;
        let trunk = &mut self.caches.trunk;
        self.links.hand_back(results.next.as_ref(), trunk, false);
        Ok(results)
    }

    /// Enqueues the part of a step of a device other than the last, after what it was given by the
    /// one before. Returns what it passes on.
    pub(super) fn pass(
        &mut self,
        setup: &Setup,
        open: OpenStep,
        (part, given): (usize, Option<Tensor<2>>),
    ) -> Tensor<2> {
        let inputs = self.links.inputs(part).narrow(1, 0, open.count());
        self.run(setup, open, part, (inputs, given)).rows()
    }

    fn run(
        &mut self,
        setup: &Setup,
        open: OpenStep,
        part: usize,
        (inputs, given): (Tensor<2, Int>, Option<Tensor<2>>),
    ) -> Passing {
        let (model, trunk) = (setup.model, &mut self.caches.trunk);
        let given = given.map(|rows| model.passed(rows, inputs.dims()));
        let step = trunk.step(open, part);
        let (given, cache) = ((inputs, given), (&step, &mut *trunk));
        let passing = model.run_part(part, given, cache, setup.taps(), &Trace::off());
        trunk.advance(part, step);
        passing
    }

    /// Enqueues the part of a step of the last device.
    pub(super) fn finish(
        &mut self,
        setup: &Setup,
        open: OpenStep,
        given: Option<Tensor<2>>,
    ) -> Result<StepResults, GenerateError> {
        let (lanes, rows) = (self.lanes(), open.count());
        let drafts = rows - 1;
        let inputs = self.inputs().narrow(1, 0, rows);
        let (device, dtype) = (inputs.device(), inputs.dtype());
        let drafted = match drafts {
            0 => Tensor::zeros([lanes, 0], (&device, dtype)),
            _ => inputs.clone().narrow(1, 1, drafts),
        };
        // Nobody else may hold the inputs when they are written.
        let last = self.links.devices().len() - 1;
        let passing = self.run(setup, open, last, (inputs, given));
        self.caches.trunk.close(open)?;
        let features = Features::of(passing, [lanes, rows]);
        let hidden = setup.model.hidden(features.streams.clone());
        let mut results = self.choose(setup, hidden, drafted.clone())?;
        if let (Some(oracle), Some(accepted)) = (&setup.oracle, &mut results.accepted) {
            // Vacant lanes have no positions.
            let positions = (self.caches.trunk.start() - drafts as i64).clamp_min(0);
            let standing = oracle.clone().select(0, positions).clamp_max(drafts as i64);
            *accepted = standing.cast(accepted.dtype());
            let first = results.tokens.clone().narrow(1, 0, 1);
            // The first step of a text has none.
            let drafted = drafted.clone().clamp_min(0).cast(first.dtype());
            results.tokens = Tensor::cat(vec![drafted, first], 1);
        }
        drop(drafted);
        if let Some(counts) = self.counts.as_mut().filter(|_| self.kind.penalties) {
            let counted = counts.count(results.tokens.clone());
            counted.map_err(GenerateError::Logits)?;
        }
        let tokens = results.tokens.clone().cast(dtype);
        let (next, accepted, newest) = match &results.accepted {
            None => (tokens.clone(), None, None),
            Some(accepted) => {
                let accepted = accepted.clone().cast(dtype);
                self.caches.trunk.keep_first(drafts, Some(accepted.clone()));
                let newest = match lanes {
                    1 => accepted.clone(),
                    _ => {
                        let first = self.numbers.clone().cast(dtype) * rows as i64;
                        accepted.clone() + first
                    }
                };
                let all = tokens.clone().reshape([lanes * rows]);
                let next = all.select(0, newest.clone()).reshape([lanes, 1]);
                (next, Some(accepted), Some(newest))
            }
        };
        let mut columns = vec![next.clone()];
        if let (Some(drafter), Some(cache)) = (&setup.drafter, &mut self.caches.draft) {
            let none = || Tensor::zeros([lanes], (&device, dtype));
            let verified = Verified {
                features,
                tokens,
                accepted: accepted.unwrap_or_else(none),
                newest: newest.unwrap_or_else(none),
                next,
            };
            results.drafted = drafter.draft(verified, cache, drafts)?;
            let new = results.drafted.clone();
            columns.extend(new.map(|new| new.cast(dtype)));
            let missing = setup.config.drafts - drafts;
            if missing > 0 {
                columns.push(Tensor::full([lanes, missing], -1, (&device, dtype)));
            }
        }
        let columns = match columns.len() {
            1 => columns.remove(0),
            _ => Tensor::cat(columns, 1),
        };
        let inputs = self.inputs.take().expect("they are put back");
        let [_, width] = inputs.dims();
        self.inputs = Some(inputs.slice_assign([0..lanes, 0..width], columns));
        if self.links.is_divided() {
            let lengths = self.caches.trunk.start().cast(dtype).reshape([lanes, 1]);
            results.next = Some(Tensor::cat(vec![self.inputs(), lengths], 1));
        }
        Ok(results)
    }

    /// Chooses the token after each row, and verifies the drafts.
    fn choose(
        &self,
        setup: &Setup,
        hidden: Tensor<3>,
        drafts: Tensor<2, Int>,
    ) -> Result<StepResults, GenerateError> {
        let model = setup.model;
        let [lanes, rows, _] = hidden.dims();
        let logits = match &model.flash_head {
            None => model.logits_of(hidden),
            Some(head) if self.is_plainly_greedy(setup) => {
                return StepResults::of_greedy(head.greedy_tokens(hidden)?, drafts);
            }
            Some(head) => head.logits(hidden)?,
        };
        let mut logits = match setup.processor {
            None => logits,
            Some(process) => process(logits),
        };
        let [_, _, vocabulary] = logits.dims();
        // Log-probabilities are those before penalties and masks.
        let raw = self.kind.log_probs.map(|top| (logits.clone(), top));
        if let Some(counts) = self.counts.as_ref().filter(|_| self.kind.penalties) {
            let applied = apply_penalties(logits, drafts.clone(), &self.params, counts);
            logits = applied.map_err(GenerateError::Logits)?;
        }
        if self.kind.constrained {
            logits = self.constraints.apply(logits);
        }
        let flat = |logits: Tensor<3>| logits.reshape([lanes * rows, vocabulary]);
        let positions = self.caches.trunk.start();
        let positions = match rows {
            1 => positions,
            _ => positions - (rows as i64 - 1),
        };
        let (tokens, accepted) = if rows == 1 {
            let tokens = sample(flat(logits.clone()), &self.params, positions);
            (
                tokens.map_err(GenerateError::Logits)?.reshape([lanes, 1]),
                None,
            )
        } else {
            let verified = verify(logits.clone(), drafts, &self.params, positions);
            let verified = verified.map_err(GenerateError::Logits)?;
            (verified.tokens, Some(verified.accepted))
        };
        let all = || tokens.clone().reshape([lanes * rows]);
        let listed = raw.map(|(raw, top)| log_probs(flat(raw), all(), top));
        let log_probs = listed.transpose().map_err(GenerateError::Logits)?;
        Ok(StepResults {
            tokens,
            accepted,
            drafted: None,
            logits: Some(logits),
            log_probs,
            next: None,
        })
    }

    /// Whether the most likely tokens are chosen and nothing else is wanted.
    fn is_plainly_greedy(&self, setup: &Setup) -> bool {
        let StepKind {
            greedy,
            constrained,
            log_probs,
            ..
        } = self.kind;
        greedy && !constrained && log_probs.is_none() && setup.processor.is_none()
    }
}
