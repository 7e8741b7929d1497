//! Lengths that a text can be continued from.

use super::setup::Caches;
use crate::cache::{Cache, CacheMark};

/// What the caches of a text have, at some length, that later positions overwrite.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    pub(super) length: usize,
    caches: Vec<CacheMark>,
}

/// Bytes that marks hold.
pub(super) fn bytes_of(marks: &[Mark]) -> usize {
    let caches = marks.iter().flat_map(|mark| &mark.caches);
    caches.map(CacheMark::bytes).sum()
}

impl Caches {
    /// Marks the length of the only text.
    pub(super) fn mark(&self) -> Mark {
        Mark {
            length: self.trunk.lengths()[0],
            caches: self.both().map(Cache::mark).collect(),
        }
    }

    pub(super) fn return_to(&mut self, mark: &Mark) {
        for (cache, mark) in self.both_mut().zip(&mark.caches) {
            cache.return_to(mark);
        }
    }
}
