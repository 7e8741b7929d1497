//! Which rows a cache has, and the bytes that they take.

use std::ops::Range;

use burn::tensor::{DType, Device, FloatDType};
use burn_ds4_ops::attention::DECODE_TOKENS;
use burn_ds4_ops::device::may_allocate;

use super::error::CacheError;
use crate::config::{AttentionKind, ModelConfig};
use crate::rope::{RotaryConfig, RotaryTable};

/// How far a [`Cache`](super::Cache) can be rolled back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rollback {
    /// By any number of positions. Window rows and raw projections of all positions are kept.
    #[default]
    Unlimited,
    /// By at most this many positions below the greatest length reached (to the empty sequence
    /// always). Memory per position is then that of the compressed rows alone.
    Bounded(usize),
}

/// How to make a [`Cache`](super::Cache).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Number of sequences.
    pub batch: usize,
    /// Positions that fit before the cache first grows, at most as many as the model supports. The
    /// cache grows by doubling.
    pub capacity: usize,
    /// How far the cache can be rolled back.
    pub rollback: Rollback,
    /// Dtype of window and compressed rows: the dtype of the model's activations.
    pub dtype: FloatDType,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            batch: 1,
            capacity: 256,
            rollback: Rollback::default(),
            dtype: FloatDType::F32,
        }
    }
}

/// The longest window that a cache keeps whole whatever its capacity, so that the bits of results
/// do not depend on it. Released models have 128 positions.
const WHOLE_WINDOW: usize = 1024;

/// Geometry of the layers that a [`Cache`](super::Cache) serves.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheLayout {
    /// Attention kind of each layer.
    pub layers: Vec<AttentionKind>,
    /// Positions of the sliding window, the query's own included. One of more than 1024 positions
    /// takes no more memory than the capacity of the cache does.
    pub window: usize,
    /// Width of a key/value row.
    pub head_dim: usize,
    /// Width of an indexer row.
    pub index_head_dim: usize,
    /// Rotary embedding of window-only layers.
    pub rotary: RotaryConfig,
    /// Rotary embedding of compressed layers.
    pub compressed_rotary: RotaryConfig,
    /// Longest supported sequence.
    pub max_positions: usize,
}

impl CacheLayout {
    /// The trunk of a model.
    pub fn trunk(config: &ModelConfig) -> Self {
        Self::with_layers(config, config.layers.clone())
    }

    /// The MTP layer of a model, whose attention has a sliding window only.
    pub fn mtp(config: &ModelConfig) -> Self {
        Self::with_layers(config, vec![AttentionKind::Window])
    }

    /// The DSpark drafter of a model: its layers have a sliding window only. A draft sees as many
    /// earlier positions as the window has, besides the block's.
    ///
    /// # Panics
    ///
    /// If the configuration has no DSpark drafter.
    pub fn dspark(config: &ModelConfig) -> Self {
        let dspark = config.dspark.as_ref();
        let layers = dspark.expect("a DSpark drafter").layers;
        let layout = Self::with_layers(config, vec![AttentionKind::Window; layers]);
        Self {
            window: layout.window.saturating_add(1),
            ..layout
        }
    }

    fn with_layers(config: &ModelConfig, layers: Vec<AttentionKind>) -> Self {
        Self {
            layers,
            window: config.sliding_window,
            head_dim: config.head_dim,
            index_head_dim: config.index_head_dim,
            rotary: RotaryConfig {
                dim: config.rope_head_dim,
                theta: config.rope_theta,
                yarn: None,
            },
            compressed_rotary: RotaryConfig {
                dim: config.rope_head_dim,
                theta: config.compress_rope_theta,
                yarn: config.yarn,
            },
            max_positions: config.max_position_embeddings,
        }
    }

    /// Bytes of device memory that a cache takes that is made like this, without making it. Rotary
    /// tables are not counted: caches on a device share them.
    ///
    /// # Errors
    ///
    /// As [`Cache::new`](super::Cache::new), but for memory that there is not.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use ds4_model::cache::{Cache, CacheConfig, CacheLayout, Rollback};
    /// use ds4_model::checkpoint::Checkpoint;
    ///
    /// let checkpoint = Checkpoint::open("../../assets/ds4-tiny".as_ref())?;
    /// let layout = CacheLayout::trunk(checkpoint.config());
    /// let options = CacheConfig { rollback: Rollback::Bounded(1), ..CacheConfig::default() };
    /// let bytes = layout.bytes(options)?;
    /// // Rows of all positions take more.
    /// assert!(layout.bytes(CacheConfig::default())? > bytes);
    /// assert_eq!(Cache::new(layout, options, &Device::flex())?.bytes(), bytes);
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn bytes(&self, config: CacheConfig) -> Result<usize, CacheError> {
        let (config, capacity) = self.checked(config)?;
        Ok(self.bytes_at(&config, capacity, false))
    }

    /// The same without what is in pages.
    pub(crate) fn ring_bytes_in_pages(&self, config: CacheConfig) -> Result<usize, CacheError> {
        let (config, capacity) = self.checked(config)?;
        Ok(self.bytes_at(&config, capacity, true))
    }

    /// The layout of some of the layers.
    pub(crate) fn of_layers(&self, layers: Range<usize>) -> Self {
        Self {
            layers: self.layers[layers].to_vec(),
            ..self.clone()
        }
    }

    /// The options as a cache uses them, and its first capacity.
    pub(super) fn checked(&self, config: CacheConfig) -> Result<(CacheConfig, usize), CacheError> {
        if config.batch == 0 {
            return Err(CacheError::Zero { argument: "batch" });
        }
        if self.layers.iter().any(|kind| kind.ratio() == Some(0)) {
            return Err(CacheError::Zero { argument: "ratio" });
        }
        let config = CacheConfig {
            // Rolling back by more than all positions is never needed.
            rollback: match config.rollback {
                Rollback::Bounded(rollback) => Rollback::Bounded(rollback.min(self.max_positions)),
                Rollback::Unlimited => Rollback::Unlimited,
            },
            ..config
        };
        Ok((config, self.first_capacity(&config)))
    }

    pub(super) fn bytes_at(&self, config: &CacheConfig, capacity: usize, is_paged: bool) -> usize {
        let rings = self.layers.iter();
        let rings = rings.map(|kind| self.ring_bytes(*kind, config, capacity, is_paged));
        rings.fold(0, usize::saturating_add)
    }

    /// Bytes of the rings of a layer, of all sequences.
    fn ring_bytes(
        &self,
        kind: AttentionKind,
        config: &CacheConfig,
        capacity: usize,
        is_paged: bool,
    ) -> usize {
        let LayerRings {
            window,
            compressed,
            indexer,
        } = LayerRings::new(kind, self, config, capacity);
        let compressors = [compressed, indexer].into_iter().flatten();
        let compressors = compressors.flat_map(|sizes| {
            let rows = (!is_paged).then_some(sizes.rows);
            rows.into_iter().chain(sizes.raw)
        });
        let rings = compressors.chain([window]);
        let bytes = rings.fold(0, |sum: usize, ring| sum.saturating_add(ring.bytes()));
        bytes.saturating_mul(config.batch)
    }

    fn table_bytes_at(&self, capacity: usize) -> usize {
        let tables = [
            (self.has_window_only(), &self.rotary),
            (self.has_compressed(), &self.compressed_rotary),
        ];
        let tables = tables.iter().filter(|(is_used, _)| *is_used);
        let rows = capacity.checked_next_power_of_two().unwrap_or(capacity);
        let tables = tables.map(|(_, rotary)| bytes_of([rows, rotary.dim], DType::F32));
        tables.fold(0, usize::saturating_add)
    }

    /// Bytes of the rows of each layer, in a cache that is made like this.
    pub(crate) fn layer_bytes(&self, config: CacheConfig) -> Vec<usize> {
        let capacity = self.first_capacity(&config);
        let kinds = self.layers.iter();
        let bytes = kinds.map(|kind| self.ring_bytes(*kind, &config, capacity, false));
        bytes.collect()
    }

    /// Bytes of the rotary tables at most, which caches share, and each device has that has layers
    /// of all kinds.
    pub(crate) fn table_bytes(&self, config: CacheConfig) -> usize {
        self.table_bytes_at(self.first_capacity(&config))
    }

    /// Begins to work out what the rotary tables of a cache of so many positions hold, by another
    /// thread.
    pub(crate) fn begin_tables(&self, positions: usize) {
        let positions = positions.min(self.max_positions);
        let tables = [
            (self.has_window_only(), &self.rotary),
            (self.has_compressed(), &self.compressed_rotary),
        ];
        let tables = tables.into_iter().filter(|(is_used, _)| *is_used);
        for (_, rotary) in tables {
            RotaryTable::is_ready(rotary, positions);
        }
    }

    fn first_capacity(&self, config: &CacheConfig) -> usize {
        config.capacity.min(self.max_positions).max(1)
    }

    /// Positions of the window that a cache of this capacity keeps. In one that is cut, all
    /// positions are visible.
    pub(super) fn window_at(&self, capacity: usize) -> usize {
        self.window.min(capacity.max(WHOLE_WINDOW)).max(1)
    }

    /// Checks that there may be memory for a cache.
    pub(super) fn check_memory(
        &self,
        config: &CacheConfig,
        capacity: usize,
        is_paged: bool,
        device: &Device,
    ) -> Result<(), CacheError> {
        let bytes = self.bytes_at(config, capacity, is_paged);
        let bytes = bytes.saturating_add(self.table_bytes_at(capacity));
        match may_allocate(device, bytes) {
            true => Ok(()),
            false => Err(CacheError::OutOfMemory {
                positions: capacity,
                bytes,
            }),
        }
    }

    pub(super) fn has_window_only(&self) -> bool {
        self.layers.contains(&AttentionKind::Window)
    }

    pub(super) fn has_compressed(&self) -> bool {
        self.layers.iter().any(|kind| kind.ratio().is_some())
    }
}

/// Sizes of one sequence's part of a [`Ring`].
#[derive(Clone, Copy)]
pub(super) struct RingSizes {
    pub(super) slots: usize,
    pub(super) width: usize,
    pub(super) dtype: FloatDType,
}

impl RingSizes {
    pub(super) fn bytes(self) -> usize {
        bytes_of([self.slots, self.width], self.dtype.into())
    }
}

/// Bytes of a tensor, or the largest number where they are more.
fn bytes_of<const D: usize>(shape: [usize; D], dtype: DType) -> usize {
    let sizes = shape.into_iter();
    sizes.fold(dtype.size(), usize::saturating_mul)
}

/// Sizes of a compressor's rows, and of its raw projections if it pools several positions.
#[derive(Clone, Copy)]
pub(super) struct CompressorRings {
    pub(super) rows: RingSizes,
    pub(super) raw: Option<RingSizes>,
}

/// Sizes of a layer's rings at some capacity.
pub(super) struct LayerRings {
    pub(super) window: RingSizes,
    pub(super) compressed: Option<CompressorRings>,
    pub(super) indexer: Option<CompressorRings>,
}

impl LayerRings {
    pub(super) fn new(
        kind: AttentionKind,
        layout: &CacheLayout,
        config: &CacheConfig,
        capacity: usize,
    ) -> Self {
        // Slots of a ring from which the newest `history` rows are read. For a window, that
        // includes the new rows of a decode step, which are written before earlier ones are read.
        let slots = |history: usize| match config.rollback {
            Rollback::Bounded(rollback) => history.saturating_add(rollback),
            Rollback::Unlimited => capacity.max(history),
        };
        let compressor = |series: usize, width: usize| {
            let ratio = kind.ratio().filter(|_| kind.compresses());
            ratio.map(|ratio| {
                let rows = RingSizes {
                    slots: capacity.div_ceil(ratio),
                    width,
                    dtype: config.dtype,
                };
                let raw = RingSizes {
                    slots: slots(raw_history(ratio, series)),
                    width: width.saturating_mul(2 * series),
                    dtype: FloatDType::F32,
                };
                // A shared row of one position is not pooled.
                let pools = ratio > 1 || !matches!(kind, AttentionKind::Shared(_));
                let raw = (series > 0 && pools).then_some(raw);
                CompressorRings { rows, raw }
            })
        };
        // An indexer's keys that are made of the other rows have no projections of their own.
        let (indexed, index_series) = match kind {
            AttentionKind::CompressedSparse { .. } => (true, 2),
            AttentionKind::Shared(_) => (true, 0),
            AttentionKind::Window | AttentionKind::HeavilyCompressed { .. } => (false, 0),
        };
        let overlap = matches!(kind, AttentionKind::CompressedSparse { .. });
        let history = window_history(layout.window_at(capacity));
        Self {
            window: RingSizes {
                slots: slots(history.saturating_add(DECODE_TOKENS)),
                width: layout.head_dim,
                dtype: config.dtype,
            },
            compressed: compressor(1 + usize::from(overlap), layout.head_dim),
            indexer: compressor(index_series, layout.index_head_dim).filter(|_| indexed),
        }
    }
}

/// Rows before a step's first position that its window reaches.
///
/// At least one, so that no tensor is empty. In a window of one position, that row is not visible.
pub(super) fn window_history(window: usize) -> usize {
    window.saturating_sub(1).max(1)
}

/// Raw projections before a step's first position that its first block pools.
pub(super) fn raw_history(ratio: usize, series: usize) -> usize {
    series.saturating_mul(ratio).saturating_sub(1).max(1)
}

/// The shortest history that any ring of the layout is read over.
pub(super) fn shortest_history(layout: &CacheLayout, capacity: usize) -> usize {
    layout
        .layers
        .iter()
        .filter_map(|kind| match kind {
            AttentionKind::Window => None,
            AttentionKind::CompressedSparse { ratio } => Some(raw_history(*ratio, 2)),
            AttentionKind::HeavilyCompressed { ratio } => Some(raw_history(*ratio, 1)),
            AttentionKind::Shared(shared) => {
                let pools = shared.makes_rows() && shared.ratio > 1;
                pools.then(|| raw_history(shared.ratio, 1))
            }
        })
        .chain([window_history(layout.window_at(capacity))])
        .min()
        .unwrap_or(0)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{Device, Int, Tensor};

    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::repository::path;

    #[test]
    fn rows_of_one_position_are_pooled_where_layers_do_not_share_them() {
        let checkpoint = Checkpoint::open(&path("assets/ds4-tiny")).unwrap();
        let config = ModelConfig {
            layers: vec![
                AttentionKind::HeavilyCompressed { ratio: 1 },
                AttentionKind::CompressedSparse { ratio: 1 },
            ],
            num_mtp_layers: 0,
            num_hash_layers: 0,
            ..checkpoint.config().clone()
        };
        let device = Device::flex();
        let model = config.init(&device);
        let mut cache = model.new_cache(CacheConfig::default()).unwrap();
        for count in [20, 1] {
            let ids = Tensor::<2, Int>::ones([1, count], &device);
            let logits = model.forward(ids, &mut cache).unwrap();
            assert!(logits.is_finite().all().into_scalar::<bool>());
        }
    }
}
