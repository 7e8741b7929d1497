//! Lengths that a sequence can go back to however far it has gone since.

use super::layer::LayerCache;
use super::ring::Ring;
use super::state::Cache;

/// The rows of a cache of one sequence that later positions overwrite, as they are at some length.
#[derive(Clone, Debug)]
pub(crate) struct CacheMark {
    length: usize,
    rings: Vec<Ring>,
}

impl CacheMark {
    pub(crate) fn bytes(&self) -> usize {
        self.rings.iter().map(Ring::bytes).sum()
    }
}

impl Cache {
    /// Marks the length of the only sequence. The next step copies what it writes.
    pub(crate) fn mark(&self) -> CacheMark {
        let rings = self.layers.iter().flat_map(LayerCache::wrapping);
        CacheMark {
            length: self.lengths[0],
            rings: rings.cloned().collect(),
        }
    }

    /// Goes back to a length that the only sequence has had.
    pub(crate) fn return_to(&mut self, mark: &CacheMark) {
        let rings = self.layers.iter_mut().flat_map(LayerCache::wrapping_mut);
        for (ring, marked) in rings.zip(&mark.rings) {
            // A window that is cut to the capacity is longer in a larger cache.
            let slots = ring.slots();
            *ring = marked.clone();
            ring.grow(slots);
        }
        self.set_length(mark.length);
    }
}
