//! Sequences that join and leave one by one, while the others stay where they are.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_ds4_ops::device::check_tensors;

use super::error::CacheError;
use super::layer::LayerCache;
use super::layout::Rollback;
use super::part::Part;
use super::pool::PagePool;
use super::ring::Ring;
use super::state::{Cache, new_epoch};

impl Cache {
    /// Makes the sequence at index `sequence` a copy of the one at index `from` of `source`,
    /// growing the cache if need be. Its previous contents are lost.
    ///
    /// The source may have another capacity. The other sequences stay as they are.
    ///
    /// # Errors
    ///
    /// If there is no such sequence, the source was made for another model or dtype, is on another
    /// device or has another rollback, or the cache cannot grow for want of memory.
    ///
    /// # Example
    ///
    /// A text that was processed by itself joins a batch.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use ds4_model::cache::{Cache, CacheConfig, CacheLayout};
    /// use ds4_model::checkpoint::Checkpoint;
    ///
    /// let device = Device::flex();
    /// let checkpoint = Checkpoint::open("../../assets/ds4-tiny".as_ref())?;
    /// let layout = CacheLayout::trunk(checkpoint.config());
    /// let mut prompt = Cache::new(layout.clone(), CacheConfig::default(), &device)?;
    /// let step = prompt.begin(3)?;
    /// prompt.commit(step)?;
    /// let options = CacheConfig { batch: 2, ..CacheConfig::default() };
    /// let mut lanes = Cache::new(layout, options, &device)?;
    /// lanes.vacate(0)?;
    /// lanes.adopt(1, &prompt, 0)?;
    /// assert_eq!(lanes.lengths(), [0, 3]);
    /// // A step adds no position to a vacant sequence.
    /// let step = lanes.begin(1)?;
    /// lanes.commit(step)?;
    /// assert_eq!(lanes.lengths(), [0, 4]);
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn adopt(
        &mut self,
        sequence: usize,
        source: &Cache,
        from: usize,
    ) -> Result<(), CacheError> {
        self.check_sequence("sequence", sequence)?;
        source.check_sequence("from", from)?;
        self.check_source(source, true)?;
        let length = source.lengths[from];
        self.reserve(length)?;
        let pages = source.pages_of(from, length, false)?;
        self.open_step = None;
        self.set_pages(sequence, pages);
        for (own, source) in self.layers.iter_mut().zip(&source.layers) {
            for (own, source) in own.rings_mut().zip(source.rings()) {
                own.adopt(sequence, source, [from, 1], None);
            }
        }
        for (own, source) in self.parts.iter_mut().zip(&source.parts) {
            let newest = source.start().narrow(0, from, 1);
            own.change(|start, _| {
                let newest = newest.cast(start.dtype());
                set(start, sequence, newest)
            });
        }
        self.engram_ids[sequence].clone_from(&source.engram_ids[from]);
        self.lengths[sequence] = length;
        self.high_water[sequence] = source.high_water[from];
        self.set_vacant(sequence, false);
        Ok(())
    }

    /// Makes sequences from index `to` on copies of those from index `from` on of `source`, each as
    /// short as `lengths` says. From there, it can be rolled back as far as this cache allows, and
    /// the source does. A source that `is_left` is not written to any more: its pages go on here.
    ///
    /// # Errors
    ///
    /// As [`adopt`](Self::adopt), but for the rollback.
    pub(crate) fn adopt_run(
        &mut self,
        to: usize,
        source: &Cache,
        from: usize,
        lengths: &[usize],
        is_left: bool,
    ) -> Result<(), CacheError> {
        let count = lengths.len();
        self.check_sequence("sequence", to + count - 1)?;
        source.check_sequence("from", from + count - 1)?;
        self.check_source(source, false)?;
        self.reserve(lengths.iter().copied().max().unwrap_or(0))?;
        let sequences = lengths.iter().enumerate();
        let pages =
            sequences.map(|(index, length)| source.pages_of(from + index, *length, is_left));
        let pages = pages.collect::<Result<Vec<_>, _>>()?;
        self.open_step = None;
        for (index, pages) in pages.into_iter().enumerate() {
            self.set_pages(to + index, pages);
        }
        for part in 0..self.parts.len() {
            let Part { device, layers, .. } = &self.parts[part];
            // Of rings with as many slots.
            let mut known: Vec<([usize; 2], Tensor<1, Int>)> = Vec::new();
            let mut rows_of = |slots: [usize; 2]| match known.iter().find(|own| own.0 == slots) {
                Some((_, rows)) => rows.clone(),
                None => {
                    let rows = newest_rows(slots, from, lengths, device);
                    known.push((slots, rows.clone()));
                    rows
                }
            };
            let own = self.layers[layers.clone()].iter_mut();
            for (own, source) in own.zip(&source.layers[layers.clone()]) {
                for (own, source) in own.own_rows_mut().zip(source.own_rows()) {
                    own.adopt(to, source, [from, count], None);
                }
                for (own, source) in own.wrapping_mut().zip(source.wrapping()) {
                    let slots = [own.slots(), source.slots()];
                    let rows = (slots[0] != slots[1]).then(|| rows_of(slots));
                    own.adopt(to, source, [from, count], rows);
                }
            }
            let part = &mut self.parts[part];
            let new = part.uploaded(lengths);
            part.change(|start, _| start.slice_assign(to..to + count, new));
        }
        self.engram_ids[to..to + count].clone_from_slice(&source.engram_ids[from..from + count]);
        self.lengths[to..to + count].copy_from_slice(lengths);
        // What the source has overwritten is lost here, too: a larger rollback brings nothing back.
        let rollback = |cache: &Self, unlimited| match cache.config.rollback {
            Rollback::Bounded(positions) => positions,
            Rollback::Unlimited => unlimited,
        };
        let (own, of_source) = (rollback(self, 0), rollback(source, usize::MAX));
        for (index, length) in lengths.iter().enumerate() {
            let lost = source.high_water[from + index].saturating_sub(of_source);
            self.high_water[to + index] = (*length).max(lost + own);
        }
        (to..to + count).for_each(|sequence| self.set_vacant(sequence, false));
        Ok(())
    }

    /// Makes the sequence at index `sequence` vacant: it has no positions, and steps add none to
    /// it, until it [adopts](Self::adopt) another.
    ///
    /// A step still computes something for it, from its own row of the tokens. No other sequence
    /// depends on that.
    ///
    /// # Errors
    ///
    /// If there is no such sequence.
    pub fn vacate(&mut self, sequence: usize) -> Result<(), CacheError> {
        self.check_sequence("sequence", sequence)?;
        self.open_step = None;
        for part in &mut self.parts {
            part.change(|start, _| {
                let none = Tensor::zeros([1], (&start.device(), start.dtype()));
                set(start, sequence, none)
            });
        }
        self.set_pages(sequence, Vec::new());
        self.lengths[sequence] = 0;
        self.high_water[sequence] = 0;
        self.set_vacant(sequence, true);
        Ok(())
    }

    /// Sets the length of the only sequence, whose rows have been put in place.
    pub(super) fn set_length(&mut self, length: usize) {
        self.epoch = new_epoch();
        self.open_step = None;
        for part in &mut self.parts {
            let like = (&part.device, part.start().dtype());
            part.start = Some(Tensor::full([1], length as i64, like));
        }
        self.lengths[0] = length;
        self.high_water[0] = length;
    }

    /// A cache of these sequences in this order, `None` for one that is vacant, in memory of its
    /// own. The host has to know their lengths.
    ///
    /// # Errors
    ///
    /// [`CacheError::OutOfMemory`] if a device has none.
    pub(crate) fn with_sequences(&self, sequences: &[Option<usize>]) -> Result<Self, CacheError> {
        let batch = sequences.len();
        let rings = self.layers.iter().flat_map(LayerCache::rings);
        let mut rings: Vec<Ring> = rings.map(|ring| ring.with_batch(batch)).collect();
        let rows: Vec<_> = rings.iter().map(Ring::all).collect();
        self.granted(check_tensors(&rows))?;
        drop(rows);
        let kept: Vec<(usize, usize)> = sequences
            .iter()
            .enumerate()
            .filter_map(|(to, from)| Some((to, (*from)?)))
            .collect();
        let follows = |a: &(usize, usize), b: &(usize, usize)| (a.0 + 1, a.1 + 1) == *b;
        for run in kept.chunk_by(follows) {
            let (to, from) = run[0];
            let own = self.layers.iter().flat_map(LayerCache::rings);
            for (ring, source) in rings.iter_mut().zip(own) {
                ring.adopt(to, source, [from, run.len()], None);
            }
        }
        let mut cache = self.clone();
        let own = cache.layers.iter_mut().flat_map(LayerCache::rings_mut);
        own.zip(rings).for_each(|(ring, new)| *ring = new);
        let of = |numbers: &[usize]| -> Vec<usize> {
            let own = sequences.iter();
            own.map(|from| from.map_or(0, |from| numbers[from]))
                .collect()
        };
        let ids = |from: &Option<usize>| from.map(|from| self.engram_ids[from].clone());
        cache.engram_ids = sequences
            .iter()
            .map(|from| ids(from).unwrap_or_default())
            .collect();
        (cache.lengths, cache.high_water) = (of(&self.lengths), of(&self.high_water));
        let vacant = sequences.iter();
        let vacant = vacant.map(|from| from.is_none_or(|from| self.vacant[from]));
        cache.vacant = vacant.collect();
        let active = cache.vacant.iter().map(|vacant| usize::from(!vacant));
        let active: Vec<usize> = active.collect();
        if self.pool.is_some() {
            let pages =
                |from: &Option<usize>| from.map_or(Vec::new(), |from| self.pages[from].clone());
            cache.pages = sequences.iter().map(pages).collect();
            cache.widen_tables(cache.capacity);
        }
        for part in &mut cache.parts {
            part.active = Some(part.uploaded(&active));
            part.start = Some(part.uploaded(&cache.lengths));
        }
        cache.config.batch = batch;
        cache.epoch = new_epoch();
        cache.open_step = None;
        Ok(cache)
    }

    fn set_vacant(&mut self, sequence: usize, vacant: bool) {
        if self.vacant[sequence] == vacant {
            return;
        }
        self.vacant[sequence] = vacant;
        for part in &mut self.parts {
            let (active, is_new) = part.take_active();
            if is_new {
                // From now on steps read it.
                self.epoch = new_epoch();
            }
            let now = Tensor::full([1], i64::from(!vacant), (&part.device, active.dtype()));
            part.active = Some(set(active, sequence, now));
        }
    }

    /// The device, or the devices and the layers that each has.
    fn devices(&self) -> String {
        match &self.parts[..] {
            [part] => format!("{:?}", part.device),
            parts => {
                let parts = parts.iter().map(|part| (&part.device, &part.layers));
                format!("{:?}", parts.collect::<Vec<_>>())
            }
        }
    }

    fn check_sequence(&self, argument: &'static str, sequence: usize) -> Result<(), CacheError> {
        let batch = self.config.batch;
        if sequence < batch {
            return Ok(());
        }
        Err(CacheError::NoSuchSequence {
            argument,
            sequence,
            batch,
        })
    }

    fn check_source(&self, source: &Cache, with_rollback: bool) -> Result<(), CacheError> {
        let argument = "source";
        let properties = |cache: &Cache| {
            let layout = &cache.layout;
            [
                ("layers", format!("{:?}", layout.layers)),
                ("window", format!("{}", layout.window)),
                ("head_dim", format!("{}", layout.head_dim)),
                ("index_head_dim", format!("{}", layout.index_head_dim)),
                ("rotary", format!("{:?}", layout.rotary)),
                (
                    "compressed_rotary",
                    format!("{:?}", layout.compressed_rotary),
                ),
                ("max_positions", format!("{}", layout.max_positions)),
                ("rollback", format!("{:?}", cache.config.rollback)),
                ("dtype", format!("{:?}", cache.config.dtype)),
                ("device", cache.devices()),
                (
                    "pool",
                    cache.pool.as_ref().map_or(String::new(), PagePool::name),
                ),
            ]
        };
        let mut pairs = properties(self).into_iter().zip(properties(source));
        let differing = pairs.find(|((property, own), (_, source))| {
            own != source && (with_rollback || *property != "rollback")
        });
        match differing {
            None => Ok(()),
            Some(((property, expected), (_, actual))) => Err(CacheError::NotAlike {
                argument,
                property,
                expected,
                actual,
            }),
        }
    }
}

/// The rows of a ring with slots for positions modulo the second number, of sequences from index
/// `from` on, that have the newest positions of each in a ring of the first number of slots:
/// `[lengths · slots]`. Where there is no such position, any row.
fn newest_rows(
    [slots, source]: [usize; 2],
    from: usize,
    lengths: &[usize],
    device: &Device,
) -> Tensor<1, Int> {
    let rows = lengths.iter().enumerate().flat_map(|(index, length)| {
        (0..slots).map(move |slot| {
            let wraps = length.saturating_sub(slot + 1) / slots;
            let position = slot + wraps * slots;
            ((from + index) * source + position % source) as i32
        })
    });
    let rows: Vec<i32> = rows.collect();
    Tensor::from_data(TensorData::from(rows.as_slice()), device)
}

/// Writes one of `numbers` in place.
fn set(numbers: Tensor<1, Int>, index: usize, number: Tensor<1, Int>) -> Tensor<1, Int> {
    numbers.slice_assign(index..index + 1, number)
}

#[cfg(test)]
#[path = "sequences_tests.rs"]
mod tests;
