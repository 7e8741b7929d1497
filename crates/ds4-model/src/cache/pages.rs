//! Caches whose compressed rows are in pages.

use std::sync::Arc;

use super::error::CacheError;
use super::layer::Rows;
use super::layout::{CacheConfig, CacheLayout};
use super::pool::{Page, PagePool, table_row};
use super::state::Cache;
use crate::placement::Placement;

impl Cache {
    /// Makes an empty cache like [`placed`](Self::placed), whose compressed rows are in pages of a
    /// pool, which was made for the same layers, dtype and placement.
    ///
    /// A sequence takes pages as it becomes longer, and gives them back when it becomes vacant or
    /// the cache goes. The capacity is the positions that the steps of the cache can reach: more of
    /// it takes no memory to speak of.
    ///
    /// # Errors
    ///
    /// As [`placed`](Self::placed).
    ///
    /// # Example
    ///
    /// Two texts of any lengths share a pool.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, FloatDType};
    /// use ds4_model::cache::{Cache, CacheConfig, CacheError, CacheLayout, PagePool};
    /// use ds4_model::checkpoint::Checkpoint;
    /// use ds4_model::placement::Placement;
    ///
    /// let checkpoint = Checkpoint::open("../../assets/ds4-tiny".as_ref())?;
    /// let layout = CacheLayout::trunk(checkpoint.config());
    /// let placement = Placement::single(&Device::flex(), layout.layers.len());
    /// let pool = PagePool::new(&layout, FloatDType::F32, &placement, 256);
    /// pool.grow(3)?;
    /// let cache = || Cache::in_pages(layout.clone(), CacheConfig::default(), &placement, &pool);
    /// let (mut long, mut short) = (cache()?, cache()?);
    /// let step = long.begin(pool.positions() + 1)?;
    /// long.commit(step)?;
    /// let step = short.begin(1)?;
    /// short.commit(step)?;
    /// assert_eq!(pool.free(), 0);
    /// // No page is left for more.
    /// let refused = short.begin(pool.positions()).unwrap_err();
    /// assert_eq!(refused, CacheError::NoPages { missing: 1, all: 3 });
    /// drop(long);
    /// assert_eq!(pool.free(), 2);
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn in_pages(
        layout: CacheLayout,
        config: CacheConfig,
        placement: &Placement,
        pool: &PagePool,
    ) -> Result<Self, CacheError> {
        Self::with_pool(layout, config, placement, Some(pool))
    }

    /// Has steps take no pages: those that sequences need are [provided](Self::provide) before.
    /// What a step writes beyond them is lost.
    pub(crate) fn take_no_pages(&mut self) {
        self.is_provided = true;
    }

    /// A number that changes when the rows of the pool are replaced, as it becomes larger.
    pub(crate) fn pool_epoch(&self) -> u64 {
        self.pool.as_ref().map_or(0, |pool| pool.len() as u64)
    }

    /// Pages that a sequence has.
    pub(crate) fn pages_of_sequence(&self, sequence: usize) -> usize {
        self.pages.get(sequence).map_or(0, Vec::len)
    }

    /// Lets a sequence have pages for so many positions.
    ///
    /// # Errors
    ///
    /// [`CacheError::NoPages`] if there are too few. It has those that it had, then.
    pub(crate) fn provide(&mut self, sequence: usize, positions: usize) -> Result<(), CacheError> {
        let Some(pool) = &self.pool else {
            return Ok(());
        };
        let own = &self.pages[sequence];
        let missing = pool.pages_for(positions).saturating_sub(own.len());
        if missing == 0 {
            return Ok(());
        }
        let more = pool.take(missing)?;
        let pages = own.iter().cloned().chain(more).collect();
        self.set_pages(sequence, pages);
        Ok(())
    }

    /// Provides for `count` more positions of every sequence that is not vacant.
    pub(super) fn provide_all(&mut self, count: usize) -> Result<(), CacheError> {
        for sequence in 0..self.pages.len() {
            if !self.vacant[sequence] {
                self.provide(sequence, self.lengths[sequence].saturating_add(count))?;
            }
        }
        Ok(())
    }

    /// Gives a sequence these pages in place of its own.
    pub(super) fn set_pages(&mut self, sequence: usize, pages: Vec<Arc<Page>>) {
        let Some(pool) = &self.pool else {
            return;
        };
        let reach = pool.pages_for(self.capacity);
        for part in &mut self.parts {
            let row = table_row(&pages, reach, &part.device);
            part.pages = part.pages.take().map(|table| {
                let row = row.cast(table.dtype());
                table.slice_assign([sequence..sequence + 1, 0..reach], row)
            });
        }
        self.pages[sequence] = pages;
    }

    /// The pages of the first `length` positions of a sequence for another one that goes on from
    /// there. Where both may go on, the last of them is copied if it is not full.
    pub(super) fn pages_of(
        &self,
        sequence: usize,
        length: usize,
        is_left: bool,
    ) -> Result<Vec<Arc<Page>>, CacheError> {
        let Some(pool) = &self.pool else {
            return Ok(Vec::new());
        };
        let mut pages = self.pages[sequence][..pool.pages_for(length)].to_vec();
        if !is_left && !length.is_multiple_of(pool.positions()) {
            let own = pool.take(1)?;
            let last = pages.len() - 1;
            pool.copy(&pages[last], &own[0]);
            pages.splice(last.., own);
        }
        Ok(pages)
    }

    /// Lets a sequence write from a length on, which it has had, where others have the page, too.
    pub(super) fn unshare(&mut self, sequence: usize, length: usize) -> Result<(), CacheError> {
        let Some(pool) = &self.pool else {
            return Ok(());
        };
        let whole = length / pool.positions();
        let others = self.pages[sequence].iter().skip(whole);
        if others.clone().all(|page| Arc::strong_count(page) == 1) {
            return Ok(());
        }
        let pages = self.pages_of(sequence, length, false)?;
        self.set_pages(sequence, pages);
        Ok(())
    }

    /// Lets tables reach so many positions.
    pub(super) fn widen_tables(&mut self, capacity: usize) {
        let Some(pool) = &self.pool else {
            return;
        };
        let reach = pool.pages_for(capacity);
        for part in &mut self.parts {
            part.pages = Some(part.new_table(&self.pages, reach));
        }
        for layer in &mut self.layers {
            for compressor in layer.compressors_mut() {
                if let Rows::Paged(rows, slots) = &mut compressor.rows {
                    *slots = reach * rows.all().dims()[1];
                }
            }
        }
    }
}
