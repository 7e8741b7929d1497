//! Texts in lanes.

use burn_ds4_ops::sampling::MAX_TOP_LOG_PROBS;

use super::config::Request;
use super::lanes::{Lanes, StepKind};
use super::setup::Setup;
use super::text::Text;

/// Numbers of log-probabilities that a step may list: few, since each makes a kind of step. A text
/// is told as many as it wants.
const LISTED: [usize; 3] = [0, 5, MAX_TOP_LOG_PROBS];

/// Texts in lanes of one size.
#[derive(Debug)]
pub(super) struct Group {
    /// Which one it is of those with lanes of its size.
    pub(super) way: usize,
    pub(super) lanes: Lanes,
    pub(super) texts: Vec<Option<Text>>,
    /// Steps since when few of the lanes have texts.
    pub(super) roomy_steps: usize,
}

impl Group {
    pub(super) fn new(way: usize, lanes: Lanes) -> Self {
        Self {
            way,
            texts: std::iter::repeat_with(|| None)
                .take(lanes.lanes())
                .collect(),
            lanes,
            roomy_steps: 0,
        }
    }

    pub(super) fn texts(&self) -> impl Iterator<Item = &Text> {
        self.texts.iter().flatten()
    }

    /// What the next step has to do.
    pub(super) fn kind(&self, setup: &Setup) -> StepKind {
        let requests = || self.texts().map(|text| &text.request);
        StepKind {
            // Only clustered heads tell.
            greedy: setup.model.flash_head.is_some() && requests().all(Request::is_greedy),
            penalties: requests().any(|request| request.sampling.changes_logits()),
            constrained: self.lanes.is_constrained(),
            log_probs: requests()
                .filter_map(|request| request.log_probs)
                .max()
                .and_then(|most| LISTED.into_iter().find(|listed| *listed >= most)),
        }
    }
}
