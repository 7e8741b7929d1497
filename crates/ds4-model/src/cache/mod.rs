//! State that a model keeps of earlier positions, outside the modules.
//!
//! A [`Cache`] holds, for every layer, the key/value rows of the sliding window, the compressed
//! rows, the indexer's rows and the raw projections from which the next compressed row will be
//! pooled. One forward call is a [`Step`]: [`Cache::begin`] computes the indices and masks that all
//! layers share, [`Cache::commit`] makes the new positions count.
//!
//! Every row's slot is a function of its position alone, so rolling back only forgets positions.
//! The positions are in a tensor: within one capacity, neither the shapes nor the host's branches
//! of a step depend on them. That tensor and the rows are written in place, so that each replay of
//! a recorded step continues where the last one ended.

mod mark;
mod ring;
mod sequences;
mod step;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::attention::{CompressorState, DECODE_TOKENS};
use burn_ds4_ops::device::{check_tensors, may_allocate};

use crate::config::{AttentionKind, ModelConfig};
use crate::placement::Placement;
use crate::rope::{RotaryConfig, RotaryTable};

pub(crate) use mark::CacheMark;
pub(crate) use ring::Ring;
pub use step::Step;
pub(crate) use step::{CompressedStep, OpenStep, PrefillStep, mask};

static NEXT_EPOCH: AtomicU64 = AtomicU64::new(1);

/// A number that no other cache of the process has had, nor this one before.
fn new_epoch() -> u64 {
    NEXT_EPOCH.fetch_add(1, Ordering::Relaxed)
}

/// Why a cache refused a request. The cache is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// A step, or a cache, of size 0.
    #[error("{argument} must be at least 1")]
    Zero {
        /// What was 0.
        argument: &'static str,
    },
    /// A sequence would become longer than the model supports.
    #[error("{requested} positions exceed the model's maximum of {maximum}")]
    TooLong {
        /// Positions that were asked for.
        requested: usize,
        /// Positions that the model supports.
        maximum: usize,
    },
    /// The cache would take more memory than the device has.
    #[error("a cache of {positions} positions takes {bytes} bytes, which do not fit in memory")]
    OutOfMemory {
        /// Positions that the cache would have memory for.
        positions: usize,
        /// Bytes that it would take.
        bytes: usize,
    },
    /// Devices that have parts of every layer cannot exchange what they have.
    #[error(transparent)]
    Group(#[from] burn_ds4_ops::collective::GroupError),
    /// More positions were to be removed than there are.
    #[error("cannot remove {count} positions of sequence {sequence}, it has {length}")]
    RemoveBeyondStart {
        /// Index of the sequence in the batch.
        sequence: usize,
        /// Positions that were to be removed.
        count: usize,
        /// Length of the sequence.
        length: usize,
    },
    /// A sequence was to be cut to more positions than it has.
    #[error("cannot truncate sequence {sequence} to {requested} positions, it has {length}")]
    TruncateBeyondEnd {
        /// Index of the sequence in the batch.
        sequence: usize,
        /// Length that was asked for.
        requested: usize,
        /// Length of the sequence.
        length: usize,
    },
    /// The rows that the shorter sequence needs have been overwritten.
    #[error(
        "cannot roll sequence {sequence} back to {requested} positions: the cache keeps what is \
         needed from {oldest} on (raise CacheConfig::rollback)"
    )]
    RolledOver {
        /// Index of the sequence in the batch.
        sequence: usize,
        /// Length that was asked for.
        requested: usize,
        /// Shortest length, other than 0, that can be gone back to.
        oldest: usize,
    },
    /// The layers of the model are not those the cache was made for.
    #[error("the cache was made for layers {actual:?}, the model has {expected:?}")]
    LayoutMismatch {
        /// Attention kinds of the model's layers.
        expected: Vec<AttentionKind>,
        /// Attention kinds of the cache's layers.
        actual: Vec<AttentionKind>,
    },
    /// The step was not begun by this cache, or the cache has begun another or was truncated since.
    #[error("the step does not follow on the cache as it is now")]
    StaleStep,
    /// The number of sequences is not that of the cache.
    #[error("{argument} has {actual} sequences, the cache has {expected}")]
    BatchMismatch {
        /// What has the wrong number of sequences.
        argument: &'static str,
        /// Number of sequences of the cache.
        expected: usize,
        /// Number that was given.
        actual: usize,
    },
    /// There is no sequence with this index.
    #[error("{argument} is {sequence}, the cache has {batch} sequences")]
    NoSuchSequence {
        /// Which one is meant.
        argument: &'static str,
        /// Index that was given.
        sequence: usize,
        /// Number of sequences of the cache.
        batch: usize,
    },
    /// The other cache differs, so that its rows mean something else.
    #[error("{argument} has {property} {actual}, the cache has {expected}")]
    NotAlike {
        /// Which cache is meant.
        argument: &'static str,
        /// Field of [`CacheLayout`] or [`CacheConfig`], or `device`.
        property: &'static str,
        /// What the cache has.
        expected: String,
        /// What the other has.
        actual: String,
    },
}

/// How far a [`Cache`] can be rolled back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rollback {
    /// By any number of positions. Window rows and raw projections of all positions are kept.
    #[default]
    Unlimited,
    /// By at most this many positions below the greatest length reached (to the empty sequence
    /// always). Memory per position is then that of the compressed rows alone.
    Bounded(usize),
}

/// How to make a [`Cache`].
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

/// Geometry of the layers that a [`Cache`] serves.
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
    /// As [`Cache::new`], but for memory that there is not.
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
        Ok(self.bytes_at(&config, capacity))
    }

    /// The layout of some of the layers.
    pub(crate) fn of_layers(&self, layers: Range<usize>) -> Self {
        Self {
            layers: self.layers[layers].to_vec(),
            ..self.clone()
        }
    }

    /// The options as a cache uses them, and its first capacity.
    fn checked(&self, config: CacheConfig) -> Result<(CacheConfig, usize), CacheError> {
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

    fn bytes_at(&self, config: &CacheConfig, capacity: usize) -> usize {
        let rings = self.layers.iter();
        let rings = rings.map(|kind| self.ring_bytes(*kind, config, capacity));
        rings.fold(0, usize::saturating_add)
    }

    /// Bytes of the rings of a layer, of all sequences.
    fn ring_bytes(&self, kind: AttentionKind, config: &CacheConfig, capacity: usize) -> usize {
        let LayerRings {
            window,
            compressed,
            indexer,
        } = LayerRings::new(kind, self, config, capacity);
        let compressors = [compressed, indexer].into_iter().flatten().flatten();
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
        let bytes = kinds.map(|kind| self.ring_bytes(*kind, &config, capacity));
        bytes.collect()
    }

    /// Bytes of the rotary tables at most, which caches share, and each device has that has layers
    /// of all kinds.
    pub(crate) fn table_bytes(&self, config: CacheConfig) -> usize {
        self.table_bytes_at(self.first_capacity(&config))
    }

    /// Whether the rotary tables of a cache of so many positions can be made at once. If not, what
    /// they hold begins to be worked out by another thread.
    pub(crate) fn has_tables_ready(&self, positions: usize) -> bool {
        let positions = positions.min(self.max_positions);
        let tables = [
            (self.has_window_only(), &self.rotary),
            (self.has_compressed(), &self.compressed_rotary),
        ];
        let tables = tables.into_iter().filter(|(is_used, _)| *is_used);
        let ready = tables.map(|(_, rotary)| RotaryTable::is_ready(rotary, positions));
        // Of all tables, at the same time.
        ready.fold(true, |all, own| all & own)
    }

    fn first_capacity(&self, config: &CacheConfig) -> usize {
        config.capacity.min(self.max_positions).max(1)
    }

    /// Positions of the window that a cache of this capacity keeps. In one that is cut, all
    /// positions are visible.
    fn window_at(&self, capacity: usize) -> usize {
        self.window.min(capacity.max(WHOLE_WINDOW)).max(1)
    }

    /// Checks that there may be memory for a cache.
    fn check_memory(
        &self,
        config: &CacheConfig,
        capacity: usize,
        device: &Device,
    ) -> Result<(), CacheError> {
        let bytes = self.bytes_at(config, capacity);
        let bytes = bytes.saturating_add(self.table_bytes_at(capacity));
        match may_allocate(device, bytes) {
            true => Ok(()),
            false => Err(CacheError::OutOfMemory {
                positions: capacity,
                bytes,
            }),
        }
    }

    fn has_window_only(&self) -> bool {
        self.layers.contains(&AttentionKind::Window)
    }

    fn has_compressed(&self) -> bool {
        self.layers.iter().any(|kind| kind.ratio().is_some())
    }
}

/// Sizes of one sequence's part of a [`Ring`].
#[derive(Clone, Copy)]
struct RingSizes {
    slots: usize,
    width: usize,
    dtype: FloatDType,
}

impl RingSizes {
    fn bytes(self) -> usize {
        bytes_of([self.slots, self.width], self.dtype.into())
    }
}

/// Bytes of a tensor, or the largest number where they are more.
fn bytes_of<const D: usize>(shape: [usize; D], dtype: DType) -> usize {
    let sizes = shape.into_iter();
    sizes.fold(dtype.size(), usize::saturating_mul)
}

/// Sizes of a layer's rings at some capacity.
struct LayerRings {
    window: RingSizes,
    /// Rows and raw projections.
    compressed: Option<[RingSizes; 2]>,
    indexer: Option<[RingSizes; 2]>,
}

impl LayerRings {
    fn new(
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
            kind.ratio().map(|ratio| {
                let rows = RingSizes {
                    slots: capacity.div_ceil(ratio),
                    width,
                    dtype: config.dtype,
                };
                let raw = RingSizes {
                    slots: slots(step::raw_history(ratio, series)),
                    width: width.saturating_mul(2 * series),
                    dtype: FloatDType::F32,
                };
                [rows, raw]
            })
        };
        let overlap = matches!(kind, AttentionKind::CompressedSparse { .. });
        let history = step::window_history(layout.window_at(capacity));
        Self {
            window: RingSizes {
                slots: slots(history.saturating_add(DECODE_TOKENS)),
                width: layout.head_dim,
                dtype: config.dtype,
            },
            compressed: compressor(1 + usize::from(overlap), layout.head_dim),
            indexer: compressor(2, layout.index_head_dim).filter(|_| overlap),
        }
    }
}

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

/// State of a stack of layers for a batch of sequences, which may have different lengths.
///
/// The layers may be on several devices. Each of them then has the lengths of the sequences.
///
/// # Example
///
/// What [`Model::forward`](crate::model::Model::forward) does with a cache, and a rollback.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use ds4_model::cache::{Cache, CacheConfig, CacheError, CacheLayout};
/// use ds4_model::checkpoint::Checkpoint;
///
/// let checkpoint = Checkpoint::open("../../assets/ds4-tiny".as_ref())?;
/// let layout = CacheLayout::trunk(checkpoint.config());
/// let mut cache = Cache::new(layout, CacheConfig::default(), &Device::flex())?;
/// let step = cache.begin(5)?;
/// // Here, each layer writes its rows for the step.
/// cache.commit(step)?;
/// assert_eq!(cache.lengths(), [5]);
/// cache.remove_newest(2)?;
/// assert_eq!(cache.lengths(), [3]);
/// assert!(matches!(cache.remove_newest(4), Err(CacheError::RemoveBeyondStart { .. })));
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "kv_cache")]
#[doc(alias = "KVCache")]
#[derive(Clone, Debug)]
pub struct Cache {
    layout: CacheLayout,
    config: CacheConfig,
    layers: Vec<LayerCache>,
    /// In the order of the layers.
    parts: Vec<Part>,
    lengths: Vec<usize>,
    /// Greatest length whose rows may have been written, per sequence.
    high_water: Vec<usize>,
    /// Whether each sequence is vacant: steps add no positions to it.
    vacant: Vec<bool>,
    capacity: usize,
    /// Changes whenever a tensor that steps use is replaced by another.
    epoch: u64,
    /// The step that may be committed.
    open_step: Option<u64>,
}

/// What the layers of one device have in common.
#[derive(Clone, Debug)]
struct Part {
    device: Device,
    layers: Range<usize>,
    rotary: Option<RotaryTable>,
    compressed_rotary: Option<RotaryTable>,
    /// The lengths, on the device: `[batch]`. Taken while they are updated, so that the update is
    /// in place.
    start: Option<Tensor<1, Int>>,
    /// Positions that a step of one position adds to each sequence, on the device: `[batch]`, 0 for
    /// vacant ones. `None` until a sequence becomes vacant for the first time.
    active: Option<Tensor<1, Int>>,
}

impl Part {
    fn new(
        layout: &CacheLayout,
        batch: usize,
        capacity: usize,
        device: &Device,
        layers: Range<usize>,
    ) -> Self {
        let own = layout.of_layers(layers.clone());
        let table = |is_used: bool, rotary: &RotaryConfig| {
            is_used.then(|| RotaryTable::new(rotary, capacity, device))
        };
        Self {
            device: device.clone(),
            layers,
            rotary: table(own.has_window_only(), &own.rotary),
            compressed_rotary: table(own.has_compressed(), &own.compressed_rotary),
            start: Some(Tensor::zeros([batch], device)),
            active: None,
        }
    }

    fn start(&self) -> Tensor<1, Int> {
        self.start.clone().expect("lengths are put back")
    }

    /// Changes the lengths in place.
    fn change(
        &mut self,
        change: impl FnOnce(Tensor<1, Int>, Option<&Tensor<1, Int>>) -> Tensor<1, Int>,
    ) {
        let start = self.start.take().expect("lengths are put back");
        self.start = Some(change(start, self.active.as_ref()));
    }

    /// Adds `count` positions to the sequences that are not vacant.
    fn advance(&mut self, count: usize) {
        self.change(|start, active| match active {
            None => start + count as i64,
            Some(active) if count == 1 => start + active.clone(),
            Some(active) => start + active.clone() * count as i64,
        });
    }

    /// Sets the length of every sequence, in a tensor of its own.
    fn replace(&mut self, lengths: &[usize]) {
        let lengths: Vec<i32> = lengths.iter().map(|length| *length as i32).collect();
        let data = TensorData::from(lengths.as_slice());
        self.start = Some(Tensor::from_data(data, &self.device));
    }
}

impl Cache {
    /// Makes an empty cache.
    ///
    /// # Errors
    ///
    /// If the batch is empty, a layer compresses blocks of no tokens, or the cache does not fit the
    /// host's memory, where that is the device's.
    pub fn new(
        layout: CacheLayout,
        config: CacheConfig,
        device: &Device,
    ) -> Result<Self, CacheError> {
        let placement = Placement::single(device, layout.layers.len());
        Self::placed(layout, config, &placement)
    }

    /// Makes an empty cache like [`new`](Self::new), each layer where the placement has it.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    ///
    /// # Panics
    ///
    /// If the placement is of another number of layers.
    pub fn placed(
        layout: CacheLayout,
        config: CacheConfig,
        placement: &Placement,
    ) -> Result<Self, CacheError> {
        let (config, capacity) = layout.checked(config)?;
        let layers = layout.layers.len();
        assert_eq!(placement.layers(), layers, "placement: number of layers");
        let mut parts = Vec::new();
        for run in placement.runs() {
            let own = layout.of_layers(run.layers.clone());
            own.check_memory(&config, capacity, &run.device)?;
            let (device, layers) = (&run.device, run.layers.clone());
            parts.push(Part::new(&layout, config.batch, capacity, device, layers));
        }
        let mut cache = Self {
            lengths: vec![0; config.batch],
            high_water: vec![0; config.batch],
            vacant: vec![false; config.batch],
            layers: Vec::new(),
            parts,
            capacity,
            epoch: new_epoch(),
            open_step: None,
            layout,
            config,
        };
        let parts = cache.parts.iter();
        let layers = parts.flat_map(|part| {
            let kinds = cache.layout.layers[part.layers.clone()].iter();
            kinds.map(|kind| cache.new_layer(*kind, &part.device))
        });
        cache.layers = layers.collect();
        cache.check_granted()?;
        Ok(cache)
    }

    /// Checks that devices have given memory to the rows. Nothing else has been launched with them
    /// yet, so that nothing else is lost with them.
    fn check_granted(&self) -> Result<(), CacheError> {
        for part in &self.parts {
            let layers = self.layers[part.layers.clone()].iter();
            let rows: Vec<_> = layers.flat_map(LayerCache::rings).map(Ring::all).collect();
            let tables = [&part.rotary, &part.compressed_rotary]
                .into_iter()
                .flatten();
            let tables: Vec<_> = tables.map(RotaryTable::angles).collect();
            self.granted(check_tensors(&rows).and_then(|()| check_tensors(&tables)))?;
        }
        Ok(())
    }

    /// What a device has said of memory.
    fn granted(&self, told: Result<(), String>) -> Result<(), CacheError> {
        told.map_err(|reason| {
            log::warn!("there is no memory for a cache: {reason}");
            CacheError::OutOfMemory {
                positions: self.capacity,
                bytes: self.bytes(),
            }
        })
    }

    fn new_layer(&self, kind: AttentionKind, device: &Device) -> LayerCache {
        let sizes = LayerRings::new(kind, &self.layout, &self.config, self.capacity);
        let ring = |sizes: RingSizes| {
            let RingSizes {
                slots,
                width,
                dtype,
            } = sizes;
            Ring::new(self.config.batch, slots, width, dtype, device)
        };
        let compressor = |[rows, raw]: [RingSizes; 2]| CompressedCache {
            rows: ring(rows),
            raw: ring(raw),
        };
        LayerCache {
            kind,
            window: ring(sizes.window),
            compressed: sizes.compressed.map(compressor),
            indexer: sizes.indexer.map(compressor),
        }
    }

    /// Number of sequences.
    pub fn batch(&self) -> usize {
        self.config.batch
    }

    /// Positions of each sequence.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Positions that fit before the cache grows again.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The caches of the layers, for a [`Step`] of this cache.
    pub fn layers_mut(&mut self) -> &mut [LayerCache] {
        &mut self.layers
    }

    /// Prepares a forward call over `count` new positions of every sequence, growing the cache if
    /// need be.
    ///
    /// The positions count once the step is [committed](Self::commit). A step that is dropped
    /// leaves the lengths as they were, but uses up rollback like one that was committed and
    /// truncated.
    ///
    /// # Errors
    ///
    /// If `count` is 0, a sequence would become too long, the cache cannot grow for want of memory,
    /// or dropped steps have overwritten rows that are still needed.
    pub fn begin(&mut self, count: usize) -> Result<Step, CacheError> {
        let open = self.open(count)?;
        Ok(self.step(open, 0))
    }

    /// Prepares for a step like [`begin`](Self::begin), of which each device has a
    /// [part](Self::step).
    pub(crate) fn open(&mut self, count: usize) -> Result<OpenStep, CacheError> {
        if count == 0 {
            return Err(CacheError::Zero { argument: "count" });
        }
        let needed = self.check_step(count)?;
        self.reserve(needed)?;
        self.raise_high_water(count);
        let open = OpenStep::new(count);
        self.open_step = Some(open.id);
        Ok(open)
    }

    /// What the layers of a device need for a step.
    pub(crate) fn step(&mut self, open: OpenStep, part: usize) -> Step {
        Step::new(self, part, open)
    }

    /// Adds the positions of a step to the lengths on a device, all of whose layers have taken it.
    pub(crate) fn advance(&mut self, part: usize, step: Step) {
        let count = step.count();
        // Drop what the step derived from the lengths, so that they are updated in place.
        drop(step);
        self.parts[part].advance(count);
    }

    /// Counts the positions of a step by which the lengths on all devices have
    /// [advanced](Self::advance).
    pub(crate) fn close(&mut self, open: OpenStep) -> Result<(), CacheError> {
        self.check_open(open.id)?;
        self.add_positions(open.count);
        Ok(())
    }

    /// Adds the positions of `step`, the last one begun, to the lengths.
    ///
    /// # Errors
    ///
    /// If the step was begun by another cache, or this one has begun another step or was truncated
    /// since.
    pub fn commit(&mut self, step: Step) -> Result<(), CacheError> {
        self.check_open(step.id())?;
        let count = step.count();
        // Drop what the step derived from the lengths, so that they are updated in place.
        drop(step);
        self.add_positions(count);
        self.parts.iter_mut().for_each(|part| part.advance(count));
        Ok(())
    }

    fn check_open(&self, id: u64) -> Result<(), CacheError> {
        match self.open_step == Some(id) {
            true => Ok(()),
            false => Err(CacheError::StaleStep),
        }
    }

    /// Counts `count` positions of a recorded step that was replayed and has written `written`, for
    /// which there was capacity.
    pub(crate) fn commit_replay(&mut self, written: usize, count: usize) {
        self.raise_high_water(written);
        self.add_positions(count);
    }

    /// A number that changes whenever a tensor that a recorded step reads or writes is replaced,
    /// and that differs between caches.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Positions that the cache needs capacity for in a step of `count` more.
    fn check_step(&self, count: usize) -> Result<usize, CacheError> {
        let longest = self.lengths.iter().max().copied().unwrap_or(0);
        let needed = longest
            .checked_add(count)
            .filter(|needed| *needed <= self.layout.max_positions)
            .ok_or(CacheError::TooLong {
                requested: longest.saturating_add(count),
                maximum: self.layout.max_positions,
            })?;
        for (sequence, length) in self.lengths.iter().enumerate() {
            self.check_reachable(sequence, *length)?;
        }
        Ok(needed)
    }

    fn raise_high_water(&mut self, count: usize) {
        for (high_water, length) in self.high_water.iter_mut().zip(&self.lengths) {
            *high_water = (*high_water).max(length + count);
        }
    }

    fn add_positions(&mut self, count: usize) {
        self.open_step = None;
        let lengths = self.lengths.iter_mut().zip(&self.vacant);
        for (length, _) in lengths.filter(|(_, vacant)| !**vacant) {
            *length += count;
        }
    }

    /// The lengths, on the device of the last layer: `[batch]`. While the caller holds them, the
    /// next step cannot update them in place.
    pub(crate) fn start(&self) -> Tensor<1, Int> {
        self.last().start()
    }

    /// Sets the lengths on a device, in place: what [`start`](Self::start) has, moved there.
    pub(crate) fn set_start(&mut self, part: usize, lengths: Tensor<1, Int>) {
        let batch = self.config.batch;
        self.parts[part].change(|start, _| {
            let lengths = lengths.cast(start.dtype());
            start.slice_assign(0..batch, lengths)
        });
    }

    fn last(&self) -> &Part {
        self.parts.last().expect("a placement has a device")
    }

    /// Removes the newest `count` positions of every sequence but the first `kept` (`[batch]`; none
    /// without it) of them, in place, on the device of the last layer; the others have to be
    /// [told](Self::set_start). The host counts all of them until [`settle`](Self::settle) tells it
    /// how many are left.
    pub(crate) fn keep_first(&mut self, count: usize, kept: Option<Tensor<1, Int>>) {
        self.open_step = None;
        let count = count as i64;
        let part = self.parts.last_mut().expect("a placement has a device");
        part.change(|start, active| match (kept, active) {
            (None, None) => start - count,
            (None, Some(active)) => start - active.clone() * count,
            (Some(kept), None) => {
                let kept = kept.cast(start.dtype());
                start + (kept - count)
            }
            (Some(kept), Some(active)) => {
                let kept = kept.cast(start.dtype());
                start + (kept - count) * active.clone()
            }
        });
    }

    /// Of the newest `count` positions of each sequence, counts the first `kept`; the device has
    /// already removed the others. Vacant sequences have none.
    pub(crate) fn settle(&mut self, count: usize, kept: &[usize]) {
        let lengths = self.lengths.iter_mut().zip(kept).zip(&self.vacant);
        for ((length, kept), _) in lengths.filter(|(_, vacant)| !**vacant) {
            *length -= count - kept;
        }
    }

    /// Checks that the cache's layers are of these kinds.
    pub(crate) fn check_layers(
        &self,
        kinds: impl Iterator<Item = AttentionKind>,
    ) -> Result<(), CacheError> {
        let expected: Vec<AttentionKind> = kinds.collect();
        if expected == self.layout.layers {
            return Ok(());
        }
        Err(CacheError::LayoutMismatch {
            expected,
            actual: self.layout.layers.clone(),
        })
    }

    /// Removes the newest `count` positions of every sequence; see
    /// [`truncate_to`](Self::truncate_to).
    ///
    /// # Errors
    ///
    /// If a sequence is shorter than `count`, or farther back than [`CacheConfig::rollback`]
    /// allows.
    ///
    /// # Example
    ///
    /// Positions that come again have the same logits.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use ds4_model::cache::CacheConfig;
    /// use ds4_model::checkpoint::{Checkpoint, LoadOptions};
    ///
    /// let device = Device::flex();
    /// let checkpoint = Checkpoint::open("../../assets/ds4-tiny".as_ref())?;
    /// let model = checkpoint.load(&LoadOptions::default(), &device)?;
    /// let mut cache = model.new_cache(CacheConfig::default())?;
    /// model.forward(Tensor::from_ints([[0, 1]], &device), &mut cache)?;
    /// let logits = model.forward(Tensor::from_ints([[2, 3]], &device), &mut cache)?;
    /// cache.remove_newest(2)?;
    /// let again = model.forward(Tensor::from_ints([[2, 3]], &device), &mut cache)?;
    /// again.into_data().assert_eq(&logits.into_data(), true);
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn remove_newest(&mut self, count: usize) -> Result<(), CacheError> {
        let lengths = self
            .lengths
            .iter()
            .enumerate()
            .map(|(sequence, length)| {
                length
                    .checked_sub(count)
                    .ok_or(CacheError::RemoveBeyondStart {
                        sequence,
                        count,
                        length: *length,
                    })
            })
            .collect::<Result<Vec<_>, _>>()?;
        self.truncate_to(&lengths)
    }

    /// Shortens each sequence to its own length.
    ///
    /// Positions that come again have the bits that they had if the calls that compute them begin
    /// and end where the first ones did, or if both have up to
    /// [`DECODE_TOKENS`] positions in all sequences together. Otherwise they are the same up to
    /// rounding: more positions are summed in another order.
    ///
    /// # Errors
    ///
    /// If the number of lengths is not that of the sequences, a length exceeds its sequence's, or
    /// is farther back than [`CacheConfig::rollback`] allows.
    pub fn truncate_to(&mut self, lengths: &[usize]) -> Result<(), CacheError> {
        if lengths.len() != self.lengths.len() {
            return Err(CacheError::BatchMismatch {
                argument: "lengths",
                expected: self.lengths.len(),
                actual: lengths.len(),
            });
        }
        for (sequence, (new, old)) in lengths.iter().zip(&self.lengths).enumerate() {
            if new > old {
                return Err(CacheError::TruncateBeyondEnd {
                    sequence,
                    requested: *new,
                    length: *old,
                });
            }
            self.check_reachable(sequence, *new)?;
        }
        if lengths == self.lengths {
            return Ok(());
        }
        for (high_water, length) in self.high_water.iter_mut().zip(lengths) {
            if *length == 0 {
                *high_water = 0;
            }
        }
        self.open_step = None;
        let mut removed = self.lengths.iter().zip(lengths).map(|(old, new)| old - new);
        let first = removed.next().unwrap_or(0);
        if removed.all(|other| other == first) {
            for part in &mut self.parts {
                part.change(|start, _| start - first as i64);
            }
        } else {
            for part in &mut self.parts {
                part.replace(lengths);
            }
            self.epoch = new_epoch();
        }
        self.lengths = lengths.to_vec();
        Ok(())
    }

    /// Makes every sequence, vacant ones too, `positions` long, with rows drawn from `distribution`
    /// instead of computed by a model. The previous contents of the cache are lost.
    ///
    /// For measurements at a context that would take long to compute. Norms leave rows of variance
    /// 1, so `Normal(0, 1)` comes close to what a model computes. Zeros would not do, because an
    /// indexer takes another time to choose among equal scores.
    ///
    /// # Errors
    ///
    /// If the model does not support so many positions, or there is no memory for them. The cache
    /// is unchanged then.
    pub fn fill_random(
        &mut self,
        positions: usize,
        distribution: Distribution,
    ) -> Result<(), CacheError> {
        if positions > self.layout.max_positions {
            return Err(CacheError::TooLong {
                requested: positions,
                maximum: self.layout.max_positions,
            });
        }
        self.reserve(positions)?;
        for layer in &mut self.layers {
            let compressed = [&mut layer.compressed, &mut layer.indexer];
            let compressed = compressed.into_iter().flatten();
            let rings =
                compressed.flat_map(|compressed| [&mut compressed.rows, &mut compressed.raw]);
            for ring in rings.chain([&mut layer.window]) {
                ring.fill_random(distribution);
            }
        }
        self.lengths.fill(positions);
        self.high_water.fill(positions);
        self.vacant.fill(false);
        for part in &mut self.parts {
            part.active = None;
            let lengths = Tensor::full([self.config.batch], positions as i64, &part.device);
            part.start = Some(lengths);
        }
        self.open_step = None;
        self.epoch = new_epoch();
        Ok(())
    }

    /// Checks that all rows that a sequence of `length` positions needs are still there.
    fn check_reachable(&self, sequence: usize, length: usize) -> Result<(), CacheError> {
        let Rollback::Bounded(rollback) = self.config.rollback else {
            return Ok(());
        };
        let high_water = self.high_water[sequence];
        // Before any ring has wrapped, nothing is lost.
        let untouched = rollback + step::shortest_history(&self.layout, self.capacity);
        let oldest = high_water.saturating_sub(rollback);
        if length == 0 || length >= oldest || high_water <= untouched {
            return Ok(());
        }
        Err(CacheError::RolledOver {
            sequence,
            requested: length,
            oldest,
        })
    }

    /// Grows the capacity to at least `positions`. If it has to grow, it at least doubles.
    fn reserve(&mut self, positions: usize) -> Result<(), CacheError> {
        if positions <= self.capacity {
            return Ok(());
        }
        let doubled = self.capacity.saturating_mul(2).max(positions);
        let capacity = doubled
            .checked_next_power_of_two()
            .unwrap_or(doubled)
            .min(self.layout.max_positions);
        for part in &self.parts {
            let own = self.layout.of_layers(part.layers.clone());
            own.check_memory(&self.config, capacity, &part.device)?;
        }
        self.epoch = new_epoch();
        self.capacity = capacity;
        for part in &mut self.parts {
            let tables = [
                (&mut part.rotary, &self.layout.rotary),
                (&mut part.compressed_rotary, &self.layout.compressed_rotary),
            ];
            for (table, config) in tables {
                if let Some(table) = table {
                    table.grow(config, capacity);
                }
            }
        }
        for layer in &mut self.layers {
            let sizes = LayerRings::new(layer.kind, &self.layout, &self.config, capacity);
            layer.window.grow(sizes.window.slots);
            let compressors = [
                (&mut layer.compressed, sizes.compressed),
                (&mut layer.indexer, sizes.indexer),
            ];
            for (cache, sizes) in compressors {
                if let (Some(cache), Some([rows, raw])) = (cache, sizes) {
                    cache.rows.grow(rows.slots);
                    cache.raw.grow(raw.slots);
                }
            }
        }
        Ok(())
    }

    /// Bytes of device memory that the cache holds, without the rotary tables, which it shares.
    pub fn bytes(&self) -> usize {
        let layouts = self.parts.iter();
        let layouts = layouts.map(|part| self.layout.of_layers(part.layers.clone()));
        let bytes = layouts.map(|layout| layout.bytes_at(&self.config, self.capacity));
        bytes.sum()
    }
}

#[cfg(all(test, feature = "flex"))]
#[path = "window_tests.rs"]
mod tests;
