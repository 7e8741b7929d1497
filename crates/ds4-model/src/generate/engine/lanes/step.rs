//! The work of one step.

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::sampling::{apply_penalties, log_probs, sample, verify};

use super::state::{Lanes, StepKind};
use crate::cache::OpenStep;
use crate::generate::engine::drafter::{Features, Verified};
use crate::generate::engine::results::StepResults;
use crate::generate::engine::setup::Setup;
use crate::generate::error::GenerateError;
use crate::model::Passing;

/// What tokens are chosen by.
enum Scores {
    /// Hidden states that the head multiplies: `[lanes, rows, d_model]`.
    Hidden(Tensor<3>),
    /// f32 `[lanes, rows, vocabulary]`
    Logits(Tensor<3>),
}

impl Lanes {
    /// Enqueues what follows the trunk, whose logits may be known.
    pub(super) fn conclude(
        &mut self,
        setup: &Setup,
        open: OpenStep,
        passing: Passing,
        logits: Option<Tensor<3>>,
    ) -> Result<StepResults, GenerateError> {
        let (lanes, rows) = (self.lanes(), open.count());
        let drafts = rows - 1;
        let inputs = self.inputs();
        let (device, dtype) = (inputs.device(), inputs.dtype());
        let drafted = match drafts {
            0 => Tensor::zeros([lanes, 0], (&device, dtype)),
            _ => inputs.clone().narrow(1, 1, drafts),
        };
        // Nobody else may hold the inputs when they are written.
        drop(inputs);
        self.caches.trunk.close(open)?;
        let features = Features::of(setup.model, passing, [lanes, rows]);
        let scores = match logits {
            Some(logits) => Scores::Logits(logits),
            None => Scores::Hidden(setup.model.hidden(features.streams.clone())),
        };
        let mut results = self.choose(setup, scores, drafted.clone())?;
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
            let count = self.new_drafts;
            results.drafted = drafter.draft(verified, cache, count)?;
            let new = results.drafted.clone();
            columns.extend(new.map(|new| new.cast(dtype)));
            let missing = setup.config.drafts - count;
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
            let inputs = self.inputs().reshape([lanes * width]);
            let lengths = self.caches.trunk.start().cast(dtype);
            results.next = Some(Tensor::cat(vec![inputs, lengths], 0));
        }
        Ok(results)
    }

    /// Chooses the token after each row, and verifies the drafts.
    fn choose(
        &self,
        setup: &Setup,
        scores: Scores,
        drafts: Tensor<2, Int>,
    ) -> Result<StepResults, GenerateError> {
        let model = setup.model;
        let logits = match (scores, &model.flash_head) {
            (Scores::Logits(logits), _) => logits,
            (Scores::Hidden(hidden), None) => model.logits_of(hidden),
            (Scores::Hidden(hidden), Some(head)) if self.is_plainly_greedy(setup) => {
                return StepResults::of_greedy(head.greedy_tokens(hidden)?, drafts);
            }
            (Scores::Hidden(hidden), Some(head)) => head.logits(hidden)?,
        };
        let mut logits = match setup.processor {
            None => logits,
            Some(process) => process(logits),
        };
        let [lanes, rows, vocabulary] = logits.dims();
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
