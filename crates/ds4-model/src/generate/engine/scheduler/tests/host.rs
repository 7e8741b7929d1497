//! What the scheduler is told of devices.

use std::collections::BTreeMap;

use super::super::*;

/// Bytes of a lane and of a prompt in progress, without pages.
pub(super) const RING: usize = 16;
/// Positions of a page.
pub(super) const PAGE: usize = 8;
/// Bytes of a device that a recording holds.
pub(super) const RECORDING: usize = 20;
/// Kinds of steps of which a group has recordings at most.
pub(super) const MOST_KINDS: usize = 4;

pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit
    }
}

#[derive(Debug)]
pub(super) struct Text {
    pub(super) new: NewTask,
    pub(super) tokens: usize,
    /// Positions that the model has.
    pub(super) length: usize,
    pub(super) lane: Option<Place>,
    /// Whether its prompt has begun, and lanes were promised to it.
    pub(super) is_begun: bool,
    /// Whether a device has had no memory for it.
    pub(super) is_refused: bool,
    /// Pages that it has, and those of them that nobody else has.
    pub(super) pages: usize,
    pub(super) own: usize,
}

impl Text {
    /// Pages that it lacks for its next steps.
    pub(super) fn lacks(&self, limits: &Limits) -> usize {
        let needed = self.length + limits.ahead;
        let needed = needed.min(self.new.all).min(limits.reach);
        needed.div_ceil(PAGE).saturating_sub(self.pages)
    }
}

#[derive(Default)]
pub(super) struct Host {
    /// Tokens that are kept of texts.
    pub(super) kept: BTreeMap<RequestId, usize>,
    /// Kinds of steps that are recorded of each group, the one that is replayed last.
    pub(super) recorded: BTreeMap<GroupId, Vec<usize>>,
    /// Bytes that the devices have, and those of caches.
    pub(super) device: usize,
    pub(super) used: usize,
    /// Whether this plan has given something back.
    pub(super) has_given: bool,
    /// Pages that there are, and those that texts have. A text that is kept has one.
    pub(super) pages: usize,
    pub(super) taken: usize,
}

impl Host {
    /// Bytes of all recordings.
    pub(super) fn recorded_bytes(&self) -> usize {
        self.recorded.values().map(Vec::len).sum::<usize>() * RECORDING
    }

    pub(super) fn free(&self) -> usize {
        let used = self.used + self.recorded_bytes();
        self.device.saturating_sub(used)
    }

    pub(super) fn free_page_count(&self) -> usize {
        self.pages - self.taken - self.kept.len()
    }
}

impl Memory for Host {
    fn bytes_of(&self, [texts, padding]: Size) -> usize {
        (RING + padding) * texts
    }

    fn spare_pages(&self) -> usize {
        self.free_page_count()
    }

    fn free_pages(&mut self, wanted: usize) -> usize {
        while self.free_page_count() < wanted && self.kept.pop_last().is_some() {}
        wanted.saturating_sub(self.free_page_count())
    }

    fn has_place(&self, caches: &[Size]) -> bool {
        let bytes = caches.iter().map(|size| self.bytes_of(*size)).sum();
        self.free() >= bytes
    }

    fn known(&self, id: RequestId) -> usize {
        self.kept.get(&id).copied().unwrap_or(0)
    }

    fn drop_recordings(&mut self, decoded: &[GroupId], caches: &[Size]) -> bool {
        let known = self.recorded.clone();
        for (id, kinds) in &mut self.recorded {
            let kept = usize::from(decoded.contains(id)).min(kinds.len());
            kinds.drain(..kinds.len() - kept);
        }
        let is_enough = caches.is_empty() || self.has_place(caches);
        if !is_enough {
            self.recorded = known.clone();
        }
        let is_any = self.recorded != known;
        self.has_given |= is_any;
        is_any
    }

    fn give_back(&mut self) -> bool {
        let is_any = !std::mem::take(&mut self.kept).is_empty();
        self.has_given |= is_any;
        is_any
    }
}
