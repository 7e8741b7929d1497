//! Everything a model remembers of the positions it has seen, kept outside the modules.
//!
//! A [`Cache`] holds, for every layer, the key/value rows of the sliding window, the compressed rows, the indexer's rows and the
//! raw projections from which the next compressed row will be pooled. One forward call is a [`Step`]: [`Cache::begin`] computes
//! the indices and masks that all layers share, [`Cache::commit`] makes the new positions count.
//!
//! Every row's place is a function of its position alone, so that rolling back is a matter of forgetting positions. The positions
//! live in a tensor: inside one capacity, neither the shapes nor the host's branches of a step depend on them. That tensor and
//! the rows are written in place, so that a recorded step goes on where the last one ended each time it is replayed.

mod constants;
mod ring;
mod sequences;
mod step;

use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::attention::FEW_TOKENS;

use crate::config::{AttentionKind, ModelConfig};
use crate::rope::{RotaryConfig, RotaryTable};

use constants::Constants;
pub(crate) use ring::Ring;
pub use step::Step;
pub(crate) use step::{CompressedPlaces, CompressedStep, ManyStep, mask};

static NEXT_EPOCH: AtomicU64 = AtomicU64::new(1);

/// Unlike that of any other cache of the process before, and of the same one.
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
    /// More positions were to be removed than there are.
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
        "cannot roll sequence {sequence} back to {requested} positions: the cache keeps what is needed from {oldest} on \
         (raise CacheConfig::rollback)"
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
    /// There are not so many sequences.
    #[error("{argument} is {sequence}, the cache has {batch} sequences")]
    NoSuchSequence {
        /// Which one is meant.
        argument: &'static str,
        /// Index that was given.
        sequence: usize,
        /// Number of sequences of the cache.
        batch: usize,
    },
    /// A cache of one sequence was expected.
    #[error("{argument} has {batch} sequences, expected 1")]
    NotOneSequence {
        /// Which cache is meant.
        argument: &'static str,
        /// Number of its sequences.
        batch: usize,
    },
    /// The rows of another cache mean something else.
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
    /// By at most this many positions below the greatest length reached (to the empty sequence always).
    /// Memory per position is then that of the compressed rows alone.
    Bounded(usize),
}

/// How to make a [`Cache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Number of sequences.
    pub batch: usize,
    /// Positions that fit before the cache first grows, at most as many as the model supports; it grows by doubling.
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

/// Geometry of the layers that a [`Cache`] serves.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheLayout {
    /// Attention kind of each layer.
    pub layers: Vec<AttentionKind>,
    /// Positions of the sliding window, the query's own included.
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

    fn has_window_only(&self) -> bool {
        self.layers.contains(&AttentionKind::Window)
    }

    fn has_compressed(&self) -> bool {
        self.layers.iter().any(|kind| kind.ratio().is_some())
    }
}

/// Rows and raw projections of one compressor.
#[derive(Clone, Debug)]
pub(crate) struct CompressedCache {
    /// Compressed rows: `[batch, rows, width]`.
    pub(crate) rows: Ring,
    /// Raw projections of the newest positions, values then scores: f32 `[batch, slots, 2 · series · width]`.
    pub(crate) raw: Ring,
}

/// What one attention layer remembers.
#[derive(Clone, Debug)]
pub struct LayerCache {
    pub(crate) kind: AttentionKind,
    /// Key/value rows of the newest positions: `[batch, slots, head_dim]`.
    pub(crate) window: Ring,
    pub(crate) compressed: Option<CompressedCache>,
    pub(crate) indexer: Option<CompressedCache>,
}

/// Everything a stack of layers remembers of a batch of sequences, which may have different lengths.
#[derive(Clone, Debug)]
pub struct Cache {
    layout: CacheLayout,
    config: CacheConfig,
    layers: Vec<LayerCache>,
    rotary: Option<RotaryTable>,
    compressed_rotary: Option<RotaryTable>,
    lengths: Vec<usize>,
    /// Greatest length whose rows may have been written, per sequence.
    high_water: Vec<usize>,
    /// The lengths, on the device: `[batch]`. Taken while they change, so that they change in place.
    start: Option<Tensor<1, Int>>,
    /// Sequences that steps add no positions to.
    vacant: Vec<bool>,
    /// Positions that a step of one adds to each, on the device: `[batch]`, 0 for those that are vacant. Nothing while none ever was.
    active: Option<Tensor<1, Int>>,
    constants: Constants,
    capacity: usize,
    /// Another whenever a tensor that steps use has been replaced by another.
    epoch: u64,
    /// The step that may be committed.
    open_step: Option<u64>,
    device: Device,
}

impl Cache {
    /// Makes an empty cache.
    ///
    /// # Errors
    ///
    /// If the batch is empty, or a layer compresses blocks of no tokens.
    pub fn new(
        layout: CacheLayout,
        config: CacheConfig,
        device: &Device,
    ) -> Result<Self, CacheError> {
        if config.batch == 0 {
            return Err(CacheError::Zero { argument: "batch" });
        }
        if layout.layers.iter().any(|kind| kind.ratio() == Some(0)) {
            return Err(CacheError::Zero { argument: "ratio" });
        }
        let config = CacheConfig {
            // More room than there are positions is never used.
            rollback: match config.rollback {
                Rollback::Bounded(rollback) => {
                    Rollback::Bounded(rollback.min(layout.max_positions))
                }
                Rollback::Unlimited => Rollback::Unlimited,
            },
            ..config
        };
        let capacity = config.capacity.min(layout.max_positions).max(1);
        let mut cache = Self {
            rotary: layout
                .has_window_only()
                .then(|| RotaryTable::new(&layout.rotary, capacity, device)),
            compressed_rotary: layout
                .has_compressed()
                .then(|| RotaryTable::new(&layout.compressed_rotary, capacity, device)),
            lengths: vec![0; config.batch],
            high_water: vec![0; config.batch],
            start: Some(Tensor::zeros([config.batch], device)),
            vacant: vec![false; config.batch],
            active: None,
            constants: Constants::new(config.batch, device),
            layers: Vec::new(),
            capacity,
            epoch: new_epoch(),
            open_step: None,
            layout,
            config,
            device: device.clone(),
        };
        cache.layers = cache
            .layout
            .layers
            .iter()
            .map(|kind| cache.new_layer(*kind))
            .collect();
        Ok(cache)
    }

    fn new_layer(&self, kind: AttentionKind) -> LayerCache {
        let ring = |slots, width, dtype: FloatDType| {
            Ring::new(self.config.batch, slots, width, dtype, &self.device)
        };
        let compressor = |ratio: usize, series: usize, width: usize| CompressedCache {
            rows: ring(self.capacity.div_ceil(ratio), width, self.config.dtype),
            raw: ring(
                self.slots(step::raw_history(ratio, series)),
                2 * series * width,
                FloatDType::F32,
            ),
        };
        let window = ring(
            self.slots(step::window_history(self.layout.window) + FEW_TOKENS),
            self.layout.head_dim,
            self.config.dtype,
        );
        let (compressed, indexer) = match kind {
            AttentionKind::Window => (None, None),
            AttentionKind::HeavilyCompressed { ratio } => {
                (Some(compressor(ratio, 1, self.layout.head_dim)), None)
            }
            AttentionKind::CompressedSparse { ratio } => (
                Some(compressor(ratio, 2, self.layout.head_dim)),
                Some(compressor(ratio, 2, self.layout.index_head_dim)),
            ),
        };
        LayerCache {
            kind,
            window,
            compressed,
            indexer,
        }
    }

    /// Slots of a ring from which the newest `history` rows are read. Those of a window have room for the new rows of few tokens, which
    /// are written before earlier ones are read.
    fn slots(&self, history: usize) -> usize {
        match self.config.rollback {
            Rollback::Bounded(rollback) => history + rollback,
            Rollback::Unlimited => self.capacity.max(history),
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

    /// Positions that a step may have without making the cache grow before a step of one position would.
    ///
    /// Sums over another capacity may round differently where there is no kernel, so a speculative step that keeps to it gives the
    /// bits of single steps.
    pub fn room(&self) -> usize {
        let longest = self.lengths.iter().max().copied().unwrap_or(0);
        match self.capacity - longest {
            // It grows anyway, and doubles.
            0 => self.capacity,
            room => room,
        }
    }

    /// How far sequences can be rolled back from their greatest length.
    pub(crate) fn rollback(&self) -> usize {
        match self.config.rollback {
            Rollback::Bounded(rollback) => rollback,
            Rollback::Unlimited => usize::MAX,
        }
    }

    /// The caches of the layers, for a [`Step`] of this cache.
    pub fn layers_mut(&mut self) -> &mut [LayerCache] {
        &mut self.layers
    }

    /// Prepares a forward call over `count` new positions of every sequence, growing the cache if need be.
    ///
    /// The positions count once the step is [committed](Self::commit); a step that is dropped leaves the lengths as they were,
    /// but uses up rollback room like one that was committed and truncated.
    ///
    /// # Errors
    ///
    /// If `count` is 0, a sequence would become too long, or dropped steps have overwritten rows that are still needed.
    pub fn begin(&mut self, count: usize) -> Result<Step, CacheError> {
        if count == 0 {
            return Err(CacheError::Zero { argument: "count" });
        }
        let needed = self.check_step(count)?;
        self.reserve(needed);
        self.raise_high_water(count);
        if self.constants.prune() {
            self.epoch = new_epoch();
        }
        let step = Step::new(self, count);
        self.open_step = Some(step.id());
        Ok(step)
    }

    /// Makes the positions of `step`, the last one begun, count.
    ///
    /// # Errors
    ///
    /// If the step was begun by another cache, or this one has begun another step or was truncated since.
    pub fn commit(&mut self, step: Step) -> Result<(), CacheError> {
        if self.open_step != Some(step.id()) {
            return Err(CacheError::StaleStep);
        }
        let count = step.count();
        // What it has derived from the lengths is not to hold on to them.
        drop(step);
        self.add_positions(count);
        let start = self.start.take().expect("lengths are put back");
        self.start = Some(match &self.active {
            None => start + count as i64,
            Some(active) if count == 1 => start + active.clone(),
            Some(active) => start + active.clone() * count as i64,
        });
        Ok(())
    }

    /// Counts the `count` positions of a recorded step that was replayed, which [may be](Self::check_replay).
    pub(crate) fn commit_replay(&mut self, count: usize) {
        self.raise_high_water(count);
        self.add_positions(count);
    }

    /// Whether a recorded step of `count` positions may be replayed. `false` if the cache has to grow first.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin).
    pub(crate) fn check_replay(&self, count: usize) -> Result<bool, CacheError> {
        Ok(self.check_step(count)? <= self.capacity)
    }

    /// Another number whenever a tensor that a recorded step reads or writes has become another one, and for every cache made.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Positions that a step of `count` more needs room for.
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

    /// The lengths, on the device: `[batch]`. Whoever holds on to them keeps the next step from writing them in place.
    pub(crate) fn start(&self) -> Tensor<1, Int> {
        self.start.clone().expect("lengths are put back")
    }

    /// Of the newest `count` positions of every sequence, keeps the first `kept` (`[batch]`): on the device, in place. The host goes
    /// on counting all of them until it [learns](Self::settle) how many are left. No sequence may be vacant.
    pub(crate) fn keep_first(&mut self, count: usize, kept: Tensor<1, Int>) {
        self.open_step = None;
        let start = self.start.take().expect("lengths are put back");
        let fallen = kept.cast(start.dtype()) - count as i64;
        self.start = Some(start + fallen);
    }

    /// Counts `removed` positions fewer of every sequence, which the device has already been told.
    pub(crate) fn settle(&mut self, removed: usize) {
        for length in &mut self.lengths {
            *length -= removed;
        }
    }

    /// Whether the cache's layers are of these kinds.
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

    /// Removes the newest `count` positions of every sequence.
    ///
    /// # Errors
    ///
    /// If a sequence is shorter than `count`, or farther back than [`CacheConfig::rollback`] allows.
    pub fn truncate(&mut self, count: usize) -> Result<(), CacheError> {
        let lengths = self
            .lengths
            .iter()
            .enumerate()
            .map(|(sequence, length)| {
                length
                    .checked_sub(count)
                    .ok_or(CacheError::TruncateBeyondEnd {
                        sequence,
                        requested: 0,
                        length: *length,
                    })
            })
            .collect::<Result<Vec<_>, _>>()?;
        self.truncate_to(&lengths)
    }

    /// Shortens each sequence to its own length.
    ///
    /// # Errors
    ///
    /// If the number of lengths is not that of the sequences, a length exceeds its sequence's, or is farther back than
    /// [`CacheConfig::rollback`] allows.
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
            let start = self.start.take().expect("lengths are put back");
            self.start = Some(start - first as i64);
        } else {
            let start: Vec<i32> = lengths.iter().map(|length| *length as i32).collect();
            self.start = Some(Tensor::from_data(
                TensorData::from(start.as_slice()),
                &self.device,
            ));
            self.epoch = new_epoch();
        }
        self.lengths = lengths.to_vec();
        Ok(())
    }

    /// Makes every sequence `positions` long, vacant ones too, with rows drawn from `distribution` that no model has computed; what the cache
    /// held is lost.
    ///
    /// For measurements at a context that would take long to compute. Norms leave rows of variance 1, so `Normal(0, 1)` comes close to
    /// what a model computes; zeros would not do, as an indexer chooses among equal scores in another time.
    ///
    /// # Errors
    ///
    /// If the model does not support so many positions. The cache is unchanged then.
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
        self.reserve(positions);
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
        self.active = None;
        self.start = Some(Tensor::full(
            [self.config.batch],
            positions as i64,
            &self.device,
        ));
        self.open_step = None;
        self.epoch = new_epoch();
        Ok(())
    }

    /// Whether all rows that a sequence of `length` positions needs are still there.
    fn check_reachable(&self, sequence: usize, length: usize) -> Result<(), CacheError> {
        let Rollback::Bounded(rollback) = self.config.rollback else {
            return Ok(());
        };
        let high_water = self.high_water[sequence];
        // Before any ring has wrapped, nothing is lost.
        let untouched = rollback + step::shortest_history(&self.layout);
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

    /// Makes room for `positions` positions, at least doubling the capacity where it has to grow.
    fn reserve(&mut self, positions: usize) {
        if positions <= self.capacity {
            return;
        }
        self.epoch = new_epoch();
        let doubled = self.capacity.saturating_mul(2).max(positions);
        self.capacity = doubled
            .checked_next_power_of_two()
            .unwrap_or(doubled)
            .min(self.layout.max_positions);
        let capacity = self.capacity;
        for table in [&mut self.rotary, &mut self.compressed_rotary]
            .into_iter()
            .flatten()
        {
            table.grow(capacity);
        }
        let unlimited = self.config.rollback == Rollback::Unlimited;
        for layer in &mut self.layers {
            let ratio = layer.kind.ratio().unwrap_or(1);
            for compressed in [&mut layer.compressed, &mut layer.indexer]
                .into_iter()
                .flatten()
            {
                compressed.rows.grow(capacity.div_ceil(ratio));
                if unlimited {
                    compressed.raw.grow(capacity);
                }
            }
            if unlimited {
                layer.window.grow(capacity);
            }
        }
    }

    /// Bytes of device memory that the cache holds.
    pub fn bytes(&self) -> usize {
        let rings = self.layers.iter().map(|layer| {
            let compressed = [&layer.compressed, &layer.indexer]
                .into_iter()
                .flatten()
                .map(|compressed| compressed.rows.bytes() + compressed.raw.bytes());
            layer.window.bytes() + compressed.sum::<usize>()
        });
        let tables = [
            (&self.rotary, &self.layout.rotary),
            (&self.compressed_rotary, &self.layout.compressed_rotary),
        ];
        let tables = tables
            .iter()
            .filter(|(table, _)| table.is_some())
            .map(|(_, config)| self.capacity * config.dim * DType::F32.size());
        rings.sum::<usize>() + tables.sum::<usize>()
    }
}
