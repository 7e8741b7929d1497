//! The caches' bytes among those of a model.

use burn::tensor::FloatDType;

use super::layout::{CacheConfig, CacheLayout, Rollback};
use crate::config::{MAX_DRAFTS, ModelConfig};
use crate::placement::ModelBytes;

impl ModelBytes {
    /// Sets the bytes of the caches of one text of so many positions. Of more texts together, which
    /// are shorter, the caches take a little more.
    #[must_use]
    pub fn with_caches(
        mut self,
        config: &ModelConfig,
        dtype: FloatDType,
        positions: usize,
    ) -> Self {
        let options = CacheConfig {
            capacity: positions,
            rollback: Rollback::Bounded(MAX_DRAFTS),
            dtype,
            ..CacheConfig::default()
        };
        let trunk = CacheLayout::trunk(config);
        let rings = trunk.layer_bytes(options);
        for (layer, cache) in self.layers.iter_mut().zip(rings) {
            layer.cache = cache;
        }
        self.tables = trunk.table_bytes(options);
        if let Some(drafter) = &mut self.drafter {
            let layout = match config.dspark {
                Some(_) => CacheLayout::dspark(config),
                None => CacheLayout::mtp(config),
            };
            let rings: usize = layout.layer_bytes(options).iter().sum();
            drafter.cache = rings.saturating_add(layout.table_bytes(options));
        }
        self
    }
}
