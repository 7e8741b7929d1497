//! Texts in lanes.

use super::config::Request;
use super::lanes::{Lanes, StepKind};
use super::setup::Setup;
use super::text::Text;

/// Texts in lanes of one size.
#[derive(Debug)]
pub(super) struct Group {
    /// Which one it is of those with lanes of its size.
    pub(super) way: usize,
    pub(super) lanes: Lanes,
    pub(super) texts: Vec<Option<Text>>,
}

impl Group {
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
            log_probs: requests().filter_map(|request| request.log_probs).max(),
        }
    }
}
