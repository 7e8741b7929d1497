//! A cache, its memory and what is in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_ds4_ops::device::check_tensors;

use super::error::CacheError;
use super::layer::{CompressedCache, LayerCache, Rows};
use super::layout::{CacheConfig, CacheLayout, CompressorRings, LayerRings, RingSizes};
use super::part::Part;
use super::pool::{Page, PagePool, PoolRows};
use super::ring::Ring;
use crate::config::AttentionKind;
use crate::placement::Placement;
use crate::rope::RotaryTable;

static NEXT_EPOCH: AtomicU64 = AtomicU64::new(1);

/// A number that no other cache of the process has had, nor this one before.
pub(super) fn new_epoch() -> u64 {
    NEXT_EPOCH.fetch_add(1, Ordering::Relaxed)
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
    pub(super) layout: CacheLayout,
    pub(super) config: CacheConfig,
    pub(super) layers: Vec<LayerCache>,
    /// In the order of the layers.
    pub(super) parts: Vec<Part>,
    pub(super) lengths: Vec<usize>,
    /// Greatest length whose rows may have been written, per sequence.
    pub(super) high_water: Vec<usize>,
    /// Whether each sequence is vacant: steps add no positions to it.
    pub(super) vacant: Vec<bool>,
    pub(super) capacity: usize,
    /// Changes whenever a tensor that steps use is replaced by another.
    pub(super) epoch: u64,
    /// The step that may be committed.
    pub(super) open_step: Option<u64>,
    /// Where compressed rows are, if they are in pages, and the pages of each sequence.
    pub(super) pool: Option<PagePool>,
    pub(super) pages: Vec<Vec<Arc<Page>>>,
    /// Whether steps take no pages themselves.
    pub(super) is_provided: bool,
    /// Compressed ids of the positions of each sequence, where engrams need them.
    pub(super) engram_ids: Vec<Vec<u32>>,
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
        Self::with_pool(layout, config, placement, None)
    }

    pub(super) fn with_pool(
        layout: CacheLayout,
        config: CacheConfig,
        placement: &Placement,
        pool: Option<&PagePool>,
    ) -> Result<Self, CacheError> {
        let (config, capacity) = layout.checked(config)?;
        let layers = layout.layers.len();
        assert_eq!(placement.layers(), layers, "placement: number of layers");
        let mut parts = Vec::new();
        for run in placement.runs() {
            let own = layout.of_layers(run.layers.clone());
            own.check_memory(&config, capacity, pool.is_some(), &run.device)?;
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
            pool: pool.cloned(),
            pages: vec![Vec::new(); pool.map_or(0, |_| config.batch)],
            is_provided: false,
            engram_ids: vec![Vec::new(); config.batch],
            layout,
            config,
        };
        let mut rows = pool.map(|pool| pool.rows().iter());
        let parts = cache.parts.iter();
        let layers = parts.flat_map(|part| {
            let kinds = cache.layout.layers[part.layers.clone()].iter();
            kinds.map(|kind| (*kind, &part.device))
        });
        let layers = layers.map(|(kind, device)| cache.new_layer(kind, device, &mut rows));
        cache.layers = layers.collect();
        cache.widen_tables(capacity);
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
    pub(super) fn granted(&self, told: Result<(), String>) -> Result<(), CacheError> {
        told.map_err(|reason| {
            log::warn!("there is no memory for a cache: {reason}");
            CacheError::OutOfMemory {
                positions: self.capacity,
                bytes: self.bytes(),
            }
        })
    }

    /// A layer, whose compressed rows are the next ones of a pool if there is one.
    fn new_layer<'p>(
        &self,
        kind: AttentionKind,
        device: &Device,
        pool: &mut Option<impl Iterator<Item = &'p PoolRows>>,
    ) -> LayerCache {
        let sizes = LayerRings::new(kind, &self.layout, &self.config, self.capacity);
        let ring = |sizes: RingSizes| {
            let RingSizes {
                slots,
                width,
                dtype,
            } = sizes;
            Ring::new(self.config.batch, slots, width, dtype, device)
        };
        let mut compressor = |CompressorRings { rows, raw }| CompressedCache {
            rows: match pool {
                None => Rows::Own(ring(rows)),
                Some(pool) => {
                    let rows = pool.next().expect("a pool for the same layers");
                    Rows::Paged(rows.clone(), 0)
                }
            },
            raw: raw.map(ring),
        };
        LayerCache {
            kind,
            window: ring(sizes.window),
            compressed: sizes.compressed.map(&mut compressor),
            indexer: sizes.indexer.map(&mut compressor),
        }
    }

    /// Puts compressed ids of new positions behind those of a sequence that is so long, and returns
    /// all of them.
    pub(crate) fn add_engram_ids(
        &mut self,
        (sequence, length): (usize, usize),
        new: impl IntoIterator<Item = u32>,
    ) -> &[u32] {
        let ids = &mut self.engram_ids[sequence];
        // Those of positions that were removed go, and random ones have none.
        ids.resize(length, 0);
        ids.extend(new);
        ids
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

    /// The caches of the layers, for a [`Step`](super::Step) of this cache.
    pub fn layers_mut(&mut self) -> &mut [LayerCache] {
        &mut self.layers
    }

    /// A number that changes whenever a tensor that a recorded step reads or writes is replaced,
    /// and that differs between caches.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
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
        for sequence in 0..self.pages.len() {
            self.provide(sequence, positions)?;
        }
        let pages: Vec<i32> = self
            .pages
            .iter()
            .flatten()
            .map(|page| page.number())
            .collect();
        for layer in &mut self.layers {
            for compressor in layer.compressors_mut() {
                if let Rows::Paged(rows, _) = &mut compressor.rows {
                    rows.fill_random(&pages, distribution);
                }
            }
            for ring in layer.rings_mut() {
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

    /// Grows the capacity to at least `positions`. If it has to grow, it at least doubles.
    pub(super) fn reserve(&mut self, positions: usize) -> Result<(), CacheError> {
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
            let is_paged = self.pool.is_some();
            own.check_memory(&self.config, capacity, is_paged, &part.device)?;
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
                if let (Some(cache), Some(CompressorRings { rows, raw })) = (cache, sizes) {
                    if let Some(ring) = cache.rows.own_mut() {
                        ring.grow(rows.slots);
                    }
                    if let (Some(ring), Some(raw)) = (&mut cache.raw, raw) {
                        ring.grow(raw.slots);
                    }
                }
            }
        }
        self.widen_tables(capacity);
        Ok(())
    }

    /// Bytes of device memory that the cache holds, without what it shares: rotary tables, and
    /// pages.
    pub fn bytes(&self) -> usize {
        let layouts = self.parts.iter();
        let layouts = layouts.map(|part| self.layout.of_layers(part.layers.clone()));
        let bytes =
            layouts.map(|layout| layout.bytes_at(&self.config, self.capacity, self.pool.is_some()));
        bytes.sum()
    }
}
