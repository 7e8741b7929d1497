//! A group of lanes, as the scheduler knows it.

use super::plan::{GroupId, Place};
use crate::generate::request_id::RequestId;

#[derive(Debug)]
pub(super) struct Group {
    pub(super) id: GroupId,
    pub(super) lanes: Vec<Option<RequestId>>,
    /// Steps since when they are roomy.
    pub(super) roomy_steps: usize,
}

impl Group {
    pub(super) fn new(id: GroupId, lanes: Vec<Option<RequestId>>) -> Self {
        Self {
            id,
            lanes,
            roomy_steps: 0,
        }
    }

    pub(super) fn texts(&self) -> usize {
        self.lanes.iter().flatten().count()
    }

    /// A lane without a text.
    pub(super) fn vacant(&self) -> Option<Place> {
        let lane = self.lanes.iter().position(Option::is_none)?;
        Some(Place {
            group: self.id,
            lane,
        })
    }
}
