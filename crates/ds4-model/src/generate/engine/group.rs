//! Texts in lanes.

use burn_ds4_ops::sampling::MAX_TOP_LOG_PROBS;

use super::config::Request;
use super::lanes::{Lanes, Settled, StepKind};
use super::scheduler::GroupId;
use super::setup::Setup;
use super::text::{Text, Texts};
use crate::generate::request_id::RequestId;

/// Numbers of log-probabilities that a step may list: few, since each makes a kind of step. A text
/// is told as many as it wants.
const LISTED: [usize; 3] = [0, 5, MAX_TOP_LOG_PROBS];

/// Texts that are decoded side by side.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) id: GroupId,
    pub(super) lanes: Lanes,
    /// The text of each lane.
    pub(super) texts: Vec<Option<RequestId>>,
}

impl Group {
    /// Its lanes, all of whose steps are [counted](super::state::Engine).
    pub(super) fn settled(&mut self) -> Settled<'_> {
        self.lanes.settled().expect("its steps were counted")
    }

    pub(super) fn texts<'t>(&'t self, texts: &'t Texts) -> impl Iterator<Item = (usize, &'t Text)> {
        let own = self.texts.iter().enumerate();
        own.filter_map(|(lane, id)| Some((lane, texts.get(&(*id)?)?)))
    }

    /// What the next step has to do.
    pub(super) fn kind(&self, setup: &Setup, texts: &Texts) -> StepKind {
        let requests = || self.texts(texts).map(|(_, text)| &text.request);
        let listed = requests().filter_map(|request| request.log_probs).max();
        StepKind {
            // Only clustered heads tell.
            greedy: setup.model.flash_head.is_some() && requests().all(Request::is_greedy),
            penalties: requests().any(|request| request.sampling.changes_logits()),
            constrained: self.lanes.is_constrained(),
            log_probs: listed.and_then(|most| LISTED.into_iter().find(|listed| *listed >= most)),
        }
    }
}
