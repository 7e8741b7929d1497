//! Bytes of the parts of a model.

use std::ops::Range;

use super::share::share_of_bytes;

/// A part of a model, for which a placement has a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The token embeddings.
    Embedding,
    /// A layer of the trunk.
    Layer(usize),
    /// The head, the norm and the output matrix.
    Head,
    /// What drafts.
    Drafter,
}

/// Bytes that something takes on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartBytes {
    /// Of weights.
    pub weights: usize,
    /// Of the caches of all texts.
    pub cache: usize,
}

impl PartBytes {
    /// Weights and caches together.
    pub fn total(self) -> usize {
        self.weights.saturating_add(self.cache)
    }

    fn plus(self, other: Self) -> Self {
        Self {
            weights: self.weights.saturating_add(other.weights),
            cache: self.cache.saturating_add(other.cache),
        }
    }
}

/// Bytes of the parts of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelBytes {
    /// Of the token embeddings. What drafts has a copy of them where it is on another device.
    pub embedding: usize,
    /// Of each layer.
    pub layers: Vec<PartBytes>,
    /// Of the weights of each layer of which devices can have parts.
    pub divided: Vec<usize>,
    /// Of head, norm and output matrix.
    pub head: usize,
    /// Of what drafts, if there is anything.
    pub drafter: Option<PartBytes>,
    /// Of what the caches have on each device, however many layers are there.
    pub tables: usize,
}

impl ModelBytes {
    /// Says that so many bytes of those of a part are weights of which devices can have parts.
    pub(crate) fn divide(&mut self, place: Place, bytes: usize) {
        if let Place::Layer(layer) = place {
            self.divided.resize(self.layers.len().max(layer + 1), 0);
            self.divided[layer] = self.divided[layer].saturating_add(bytes);
        }
    }

    /// Adds bytes of weights to those of a part.
    pub(crate) fn add(&mut self, place: Place, bytes: usize) {
        let weights = match place {
            Place::Embedding => &mut self.embedding,
            Place::Layer(layer) => {
                let layers = self.layers.len().max(layer + 1);
                self.layers.resize(layers, PartBytes::default());
                &mut self.layers[layer].weights
            }
            Place::Head => &mut self.head,
            Place::Drafter => &mut self.drafter.get_or_insert_default().weights,
        };
        *weights = weights.saturating_add(bytes);
    }

    /// Bytes of all weights on one device.
    pub fn weights(&self) -> usize {
        let layers = self.layers.iter().map(|layer| layer.weights);
        let drafter = self.drafter.iter().map(|drafter| drafter.weights);
        let parts = layers.chain(drafter).chain([self.embedding, self.head]);
        parts.fold(0, usize::saturating_add)
    }

    /// Bytes of a rank of `ranks`, each of which has a part of every layer.
    pub(super) fn of_rank(&self, rank: usize, ranks: usize) -> PartBytes {
        let divided = self.divided.iter().copied().chain(std::iter::repeat(0));
        let layers = self.layers.iter().zip(divided);
        let layers = layers.map(|(layer, divided)| PartBytes {
            weights: share_of_bytes(layer.weights, divided, ranks),
            cache: layer.cache,
        });
        let head = self.head.div_ceil(ranks);
        let own = PartBytes {
            weights: self.embedding.saturating_add(head),
            cache: self.tables,
        };
        let bytes = layers.fold(own, PartBytes::plus);
        if rank + 1 < ranks {
            return bytes;
        }
        // What drafts needs the whole output matrix.
        let whole = PartBytes {
            weights: self.head,
            cache: 0,
        };
        bytes.plus(whole).plus(self.drafter.unwrap_or_default())
    }

    /// Bytes of a run of layers, with what else is on its device.
    pub(super) fn of_run(&self, run: &Range<usize>) -> PartBytes {
        let (is_first, is_last) = (run.start == 0, run.end == self.layers.len());
        let tables = PartBytes {
            weights: 0,
            cache: self.tables,
        };
        let layers = self.layers[run.clone()].iter();
        let mut bytes = layers.fold(tables, |sum, layer| sum.plus(*layer));
        let mut more = |weights| {
            bytes = bytes.plus(PartBytes { weights, cache: 0 });
        };
        if is_first {
            more(self.embedding);
        }
        if is_last {
            more(self.head);
            if self.drafter.is_some() && !is_first {
                more(self.embedding);
            }
        }
        match self.drafter.filter(|_| is_last) {
            Some(drafter) => bytes.plus(drafter),
            None => bytes,
        }
    }
}
