//! Results of a step: on the device, on their way to the host, and there.

use burn::backend::ExecutionError;
use burn::tensor::{Int, Tensor};
use burn_ds4_ops::readback::Readback;
use burn_ds4_ops::sampling::{LogProbs, accept_drafts};

use crate::generate::error::GenerateError;

/// A draft that is left out because the drafter has little confidence in it. Any negative number is
/// no token.
pub(super) const LEFT_OUT: i32 = -2;

/// Results of a step on the device.
#[derive(Debug)]
pub(super) struct StepResults {
    /// `[lanes, rows]`
    pub(super) tokens: Tensor<2, Int>,
    /// `[lanes]`; `None` without drafts.
    pub(super) accepted: Option<Tensor<1, Int>>,
    /// Drafts for the next step, negative where there is none: i32 `[lanes, drafts]`; `None`
    /// without drafts.
    pub(super) drafted: Option<Tensor<2, Int>>,
    /// f32 `[lanes, rows, vocabulary]`, if computed for all tokens.
    pub(super) logits: Option<Tensor<3>>,
    pub(super) log_probs: Option<LogProbs>,
    /// The inputs of the next step and the lengths of the texts, for the devices of other layers:
    /// `lanes * columns` inputs, then `lanes` lengths; `None` where there are none.
    pub(super) next: Option<Tensor<1, Int>>,
}

/// What a device's part of a step results in.
#[derive(Debug)]
pub(super) enum PartResults {
    /// What it passes on to the next device.
    Passed(Box<Tensor<2>>),
    /// Nothing that is not exchanged within the part.
    Exchanged,
    /// The results of the step.
    Chosen(Box<StepResults>),
}

/// A step that the host has not counted yet.
#[derive(Debug)]
pub(super) struct Pending {
    read: Readback,
    rows: usize,
    /// Drafts for the next step.
    drafted: usize,
    log_probs: Option<usize>,
}

/// What the host learns of a step.
#[derive(Debug)]
pub(super) struct Outcome {
    /// Drafts of each lane that were verified.
    pub(super) drafts: usize,
    pub(super) accepted: Vec<usize>,
    tokens: Vec<i32>,
    /// Those of each lane for the next step.
    drafted: Vec<i32>,
    log_probs: Option<ListedLogProbs>,
}

/// Log-probabilities of all rows of a step.
#[derive(Debug)]
struct ListedLogProbs {
    top: usize,
    ids: Vec<i32>,
    chosen: Vec<f32>,
    listed: Vec<f32>,
}

impl Outcome {
    /// Whether there is a row with no token to choose.
    pub(super) fn has_failures(&self) -> bool {
        let mut tokens = (0..self.accepted.len()).flat_map(|lane| self.tokens(lane));
        tokens.any(|token| *token < 0)
    }

    /// Accepted drafts of a lane.
    pub(super) fn accepted(&self, lane: usize) -> usize {
        self.accepted[lane]
    }

    /// The tokens that a lane has gained, negative where there is none to choose.
    pub(super) fn tokens(&self, lane: usize) -> &[i32] {
        let first = lane * (1 + self.drafts);
        &self.tokens[first..=first + self.accepted[lane]]
    }

    /// Drafts of a lane that the next step verifies, which are those before the first that is no
    /// token, and those that were dropped, because the drafter had no numbers to choose by.
    pub(super) fn drafted(&self, lane: usize) -> (usize, usize) {
        let own = self.of_drafter(lane);
        let drafted = own.iter().take_while(|draft| **draft >= 0).count();
        match own.get(drafted) {
            None | Some(&LEFT_OUT) => (drafted, 0),
            Some(_) => (drafted, own.len() - drafted),
        }
    }

    /// Drafts of a lane that the next step verifies.
    pub(super) fn next_drafts(&self, lane: usize) -> impl Iterator<Item = u32> {
        let own = self.of_drafter(lane).iter();
        own.map_while(|draft| u32::try_from(*draft).ok())
    }

    /// What the drafter has made for a lane.
    fn of_drafter(&self, lane: usize) -> &[i32] {
        let count = self.drafted.len() / self.accepted.len();
        &self.drafted[lane * count..][..count]
    }

    /// The log-probability of a lane's token, and the most likely ones with theirs.
    pub(super) fn log_probs(&self, lane: usize, token: usize) -> Option<(f32, Vec<(u32, f32)>)> {
        let log_probs = self.log_probs.as_ref()?;
        let row = lane * (1 + self.drafts) + token;
        let rows = row * log_probs.top..(row + 1) * log_probs.top;
        let listed = log_probs.ids[rows.clone()].iter();
        let listed = listed.zip(&log_probs.listed[rows]);
        let listed = listed.filter_map(|(id, value)| Some((u32::try_from(*id).ok()?, *value)));
        Some((log_probs.chosen[row], listed.collect()))
    }
}

impl StepResults {
    /// The results where the most likely tokens (`[lanes, rows]`) are known, and nothing else.
    pub(super) fn of_greedy(
        tokens: Tensor<2, Int>,
        drafts: Tensor<2, Int>,
    ) -> Result<Self, GenerateError> {
        let [_, count] = drafts.dims();
        let (tokens, accepted) = match count {
            0 => (tokens, None),
            _ => {
                let verified = accept_drafts(tokens, drafts).map_err(GenerateError::Logits)?;
                (verified.tokens, Some(verified.accepted))
            }
        };
        Ok(Self {
            tokens,
            accepted,
            drafted: None,
            logits: None,
            log_probs: None,
            next: None,
        })
    }
}

impl Pending {
    /// Begins to read the results of a step.
    pub(super) fn of(results: &StepResults) -> Self {
        let flat = |tensor: &Tensor<2, Int>| {
            let [rows, columns] = tensor.dims();
            tensor.clone().reshape([rows * columns])
        };
        let [_, rows] = results.tokens.dims();
        let mut numbers = vec![flat(&results.tokens)];
        numbers.extend(results.accepted.clone());
        numbers.extend(results.drafted.as_ref().map(flat));
        let mut values = Vec::new();
        let log_probs = results.log_probs.as_ref().map(|listed| {
            let [count, top] = listed.top.dims();
            values.push(listed.chosen.clone());
            if top > 0 {
                numbers.push(flat(&listed.top_ids));
                values.push(listed.top.clone().reshape([count * top]));
            }
            top
        });
        Self {
            read: Readback::begin_both(&numbers, &values),
            rows,
            drafted: results.drafted.as_ref().map_or(0, |own| own.dims()[1]),
            log_probs,
        }
    }

    pub(super) fn wait(self, lanes: usize) -> Result<Outcome, ExecutionError> {
        let read = self.read.wait_both()?;
        let (numbers, values) = (read.ints, read.floats);
        let count = lanes * self.rows;
        let (tokens, rest) = numbers.split_at(count);
        let drafts = self.rows - 1;
        let (accepted, rest) = match drafts {
            0 => (vec![0; lanes], rest),
            _ => {
                let (accepted, rest) = rest.split_at(lanes);
                let accepted = accepted.iter().map(|count| *count as usize);
                (accepted.collect(), rest)
            }
        };
        let (drafted, ids) = rest.split_at(lanes * self.drafted);
        let log_probs = self.log_probs.map(|top| {
            let (chosen, listed) = values.split_at(count);
            ListedLogProbs {
                top,
                ids: ids.to_vec(),
                chosen: chosen.to_vec(),
                listed: listed.to_vec(),
            }
        });
        Ok(Outcome {
            drafts,
            accepted,
            tokens: tokens.to_vec(),
            drafted: drafted.to_vec(),
            log_probs,
        })
    }
}
