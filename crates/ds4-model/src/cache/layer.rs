//! What a cache has of one layer.

use burn_ds4_ops::attention::CompressorState;

use super::ring::Ring;
use crate::config::AttentionKind;

/// Rows and raw projections of one compressor.
#[derive(Clone, Debug)]
pub(crate) struct CompressedCache {
    /// Compressed rows: `[batch, rows, width]`.
    pub(crate) rows: Ring,
    /// Raw projections of the newest positions, values then scores: f32
    /// `[batch, slots, 2 · series · width]`.
    pub(crate) raw: Ring,
}

impl CompressedCache {
    /// Puts back what was taken for an operation.
    pub(crate) fn put(&mut self, state: CompressorState) {
        self.raw.put(state.raw);
        self.rows.put(state.rows);
    }
}

/// State of one attention layer.
#[derive(Clone, Debug)]
pub struct LayerCache {
    pub(crate) kind: AttentionKind,
    /// Key/value rows of the newest positions: `[batch, slots, head_dim]`.
    pub(crate) window: Ring,
    pub(crate) compressed: Option<CompressedCache>,
    pub(crate) indexer: Option<CompressedCache>,
}

impl LayerCache {
    pub(super) fn rings(&self) -> impl Iterator<Item = &Ring> {
        let compressed = [&self.compressed, &self.indexer].into_iter().flatten();
        let compressed = compressed.flat_map(|cache| [&cache.rows, &cache.raw]);
        std::iter::once(&self.window).chain(compressed)
    }

    pub(super) fn rings_mut(&mut self) -> impl Iterator<Item = &mut Ring> {
        let compressed = [&mut self.compressed, &mut self.indexer];
        let compressed = compressed.into_iter().flatten();
        let compressed = compressed.flat_map(|cache| [&mut cache.rows, &mut cache.raw]);
        std::iter::once(&mut self.window).chain(compressed)
    }

    /// The rings that wrap around. Compressed rows stay in place.
    pub(super) fn wrapping(&mut self) -> impl Iterator<Item = &mut Ring> {
        let compressed = [&mut self.compressed, &mut self.indexer];
        let compressed = compressed.into_iter().flatten();
        std::iter::once(&mut self.window).chain(compressed.map(|cache| &mut cache.raw))
    }
}
