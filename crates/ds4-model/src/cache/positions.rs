//! Steps that add positions to a cache, and what removes them.

use burn::tensor::{Int, Tensor};

use super::error::CacheError;
use super::layout::{Rollback, shortest_history};
use super::state::{Cache, new_epoch};
use super::step::{OpenStep, Step, StepShape};

impl Cache {
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
        if !self.is_provided {
            self.provide_all(count)?;
        }
        self.raise_high_water(count);
        let open = OpenStep::new(count);
        self.open_step = Some(open.id);
        Ok(open)
    }

    /// What the layers of a device need for a step.
    pub(crate) fn step(&mut self, open: OpenStep, part: usize) -> Step {
        let longest = self.lengths.iter().max().copied().unwrap_or(0);
        let shape = StepShape {
            batch: self.config.batch,
            span: self.layout.window_at(self.capacity),
            end: longest + open.count,
        };
        let part = &self.parts[part];
        Step::new(open, shape, part, &self.layers[part.layers.clone()])
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

    /// Removes the newest `count` positions of every sequence; see
    /// [`truncate_to`](Self::truncate_to).
    ///
    /// # Errors
    ///
    /// If a sequence is shorter than `count`, or farther back than
    /// [`CacheConfig::rollback`](super::CacheConfig::rollback) allows.
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
    /// [`DECODE_TOKENS`](burn_ds4_ops::attention::DECODE_TOKENS) positions in all sequences
    /// together. Otherwise they are the same up to rounding: more positions are summed in another
    /// order.
    ///
    /// # Errors
    ///
    /// If the number of lengths is not that of the sequences, a length exceeds its sequence's, or
    /// is farther back than [`CacheConfig::rollback`](super::CacheConfig::rollback) allows.
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
        for (sequence, length) in lengths.iter().enumerate() {
            self.unshare(sequence, *length)?;
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
                part.start = Some(part.uploaded(lengths));
            }
            self.epoch = new_epoch();
        }
        self.lengths = lengths.to_vec();
        Ok(())
    }

    /// Checks that all rows that a sequence of `length` positions needs are still there.
    fn check_reachable(&self, sequence: usize, length: usize) -> Result<(), CacheError> {
        let Rollback::Bounded(rollback) = self.config.rollback else {
            return Ok(());
        };
        let high_water = self.high_water[sequence];
        // Before any ring has wrapped, nothing is lost.
        let untouched = rollback + shortest_history(&self.layout, self.capacity);
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
}
