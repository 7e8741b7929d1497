//! The memory of devices that caches may take.

use burn::tensor::Device;

use super::recorder;
use super::scheduler::Size;
use super::setup::Setup;
use crate::cache::CacheError;
use crate::generate::error::GenerateError;

/// Bytes of a device that are left for what steps and chunks of prompts work with: a tenth of what
/// is free, and so many where it has four times as many.
const WORKSPACE: u64 = 2 << 30;

/// Bytes of the first pages where they are not made at once: what is recorded is recorded anew when
/// there are more.
const FIRST_BYTES: usize = 16 << 20;
/// Pages of a text by whose bytes devices are compared.
const USUAL_PAGES: usize = 4;

/// Bytes on each of some devices.
type DeviceBytes = Vec<(Device, usize)>;

fn add_bytes(all: &mut DeviceBytes, device: &Device, bytes: usize) {
    match all.iter_mut().find(|(own, _)| own == device) {
        Some((_, sum)) => *sum = sum.saturating_add(bytes),
        None => all.push((device.clone(), bytes)),
    }
}

fn sum_of(all: &[(Device, usize)]) -> usize {
    let bytes = all.iter().map(|(_, bytes)| *bytes);
    bytes.fold(0, usize::saturating_add)
}

/// What caches may take of so many free bytes.
fn without_workspace(free: u64) -> u64 {
    free - (free / 10).max(WORKSPACE.min(free / 4))
}

/// What the caches of all texts may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    /// Pages of compressed rows.
    pub(super) pages: usize,
    /// Bytes of the rings of lanes and of prompts.
    pub(super) rings: usize,
    /// Whether all pages are made when the first is needed. Otherwise there are twice as many when
    /// they do not suffice.
    pub(super) at_once: bool,
}

impl Budget {
    /// That of an engine which has none yet.
    pub(super) const NONE: Self = Self {
        pages: 0,
        rings: 0,
        at_once: false,
    };
}

impl Setup<'_> {
    /// Bytes that the rings of caches take on each device.
    fn bytes_by_device(&self, [texts, padding]: Size) -> Result<DeviceBytes, GenerateError> {
        let model = self.model.config();
        let options = self.cache_config([1, padding]);
        let (layout, placement) = self.model.trunk_cache();
        let mut all = DeviceBytes::new();
        for run in placement.runs() {
            let own = layout.of_layers(run.layers.clone());
            add_bytes(&mut all, &run.device, own.ring_bytes_in_pages(options)?);
        }
        if let Some(drafter) = &self.drafter {
            add_bytes(
                &mut all,
                self.device(),
                drafter.layout(model).bytes(options)?,
            );
        }
        for (_, bytes) in &mut all {
            *bytes = bytes.saturating_mul(texts);
        }
        Ok(all)
    }

    /// Bytes that the rings of caches take.
    pub(super) fn bytes_of(&self, size: Size) -> Result<usize, GenerateError> {
        Ok(sum_of(&self.bytes_by_device(size)?))
    }

    /// Bytes that a text takes which is kept: its pages, and the rings at its end.
    pub(super) fn kept_bytes(&self, length: usize) -> Result<usize, GenerateError> {
        let pages = self.pool.pages_for(length);
        let pages = pages.saturating_mul(sum_of(self.pool.page_bytes()));
        Ok(pages.saturating_add(self.bytes_of([1, 0])?))
    }

    /// The most bytes that caches may take, from the memory that is free now; `None` where no
    /// device tells.
    pub(super) fn free_for_caches(&self) -> Result<Option<usize>, GenerateError> {
        let mut all = self.bytes_by_device([1, 0])?;
        for (device, page) in self.pool.page_bytes() {
            add_bytes(&mut all, device, page.saturating_mul(USUAL_PAGES));
        }
        let whole = sum_of(&all);
        let bounds = all.iter().filter_map(|(device, own)| {
            let left = without_workspace((self.free_memory)(device)?);
            // All devices have as much of each text as of this one.
            let bytes = u128::from(left) * whole as u128 / (*own).max(1) as u128;
            // The marks in what is kept make way for texts, so they do not take most of it from
            // the start.
            let bytes = bytes - (self.config.prefix_bytes as u128).min(bytes / 2);
            Some(usize::try_from(bytes).unwrap_or(usize::MAX))
        });
        Ok(bounds.min())
    }

    /// Divides what caches may take between pages and rings: as much as all lanes need for these,
    /// but no more than a half.
    pub(super) fn divided(&self) -> Result<Budget, GenerateError> {
        let lanes = self.config.lanes;
        let page = sum_of(self.pool.page_bytes());
        let kept = self.config.prefix_bytes / page.max(1);
        let most = self.pool.pages_for(self.reach()).saturating_mul(lanes);
        let most = most.saturating_add(kept).min(self.pool.most());
        let most = self.config.pages.map_or(most, |pages| pages.min(most));
        let Some(bytes) = self.config.cache_bytes else {
            return Ok(Budget {
                pages: most,
                rings: usize::MAX,
                at_once: false,
            });
        };
        let ring = self.bytes_of([1, 0])?;
        // A lane, and the prompt that enters it, at least.
        let wanted = ring.saturating_mul(lanes + 2).min(bytes / 2);
        let rings = wanted.max(ring.saturating_mul(2)).min(bytes);
        // One page is nobody's.
        let mut pages = ((bytes - rings) / page.max(1)).saturating_sub(1);
        let by_device = self.bytes_by_device([1, 0])?;
        let mut at_once = false;
        for (device, page) in self.pool.page_bytes() {
            if let Some(free) = (self.free_memory)(device) {
                at_once = true;
                let own = by_device.iter().find(|(own, _)| own == device);
                let own = own.map_or(0, |(_, bytes)| bytes.saturating_mul(rings / ring.max(1)));
                let left = without_workspace(free).saturating_sub(own as u64);
                pages = pages.min(usize::try_from(left).unwrap_or(usize::MAX) / page.max(&1));
            }
        }
        Ok(Budget {
            pages: pages.min(most),
            rings,
            at_once,
        })
    }

    /// Begins to work out what the rotary tables of caches hold.
    pub(super) fn begin_tables(&self) {
        let (layout, _) = self.model.trunk_cache();
        layout.begin_tables(self.reach());
        if let Some(drafter) = &self.drafter {
            drafter
                .layout(self.model.config())
                .begin_tables(self.reach());
        }
    }

    /// Pages that may be made yet.
    pub(super) fn pages_to_make(&self) -> usize {
        let (have, most) = (self.pool.len(), self.budget.pages);
        match self.budget.at_once && have > 0 {
            true => 0,
            false => most.saturating_sub(have),
        }
    }

    /// Makes so many pages at least, if they may be made and devices have memory for them.
    pub(super) fn make_pages(&self, least: usize) -> bool {
        let most = self.pages_to_make();
        if least > most {
            return false;
        }
        let page = sum_of(self.pool.page_bytes()).max(1);
        let mut more = match (self.budget.at_once, self.pool.len()) {
            (true, _) => most,
            (false, 0) => least.max(FIRST_BYTES / page).min(most),
            (false, have) => least.max(have).min(most),
        };
        recorder::note_launch();
        if self.budget.at_once {
            // What others have left is in pieces until it is given back.
            self.step_devices().iter().for_each(Device::memory_cleanup);
        }
        while self.pool.grow(more).is_err() {
            if more == least {
                return false;
            }
            more = (more / 2).max(least);
        }
        true
    }

    /// Whether all devices have memory for the rings of some caches, beside what there is but for
    /// so many bytes.
    pub(super) fn has_place(
        &self,
        caches: &[Size],
        dropped: &[(&Device, u64)],
    ) -> Result<bool, GenerateError> {
        let mut needed = DeviceBytes::new();
        for size in caches.iter().filter(|[texts, _]| *texts > 0) {
            for (device, own) in self.bytes_by_device(*size)? {
                add_bytes(&mut needed, &device, own);
            }
        }
        Ok(needed.iter().all(|(device, own)| {
            let dropped = dropped.iter().filter(|(of, _)| *of == device);
            let dropped: u64 = dropped.map(|(_, bytes)| bytes).sum();
            let free = (self.free_memory)(device).map(|free| free.saturating_add(dropped));
            free.is_none_or(|free| *own as u64 <= without_workspace(free))
        }))
    }
}

/// What was made, or `None` where there was no memory for it.
pub(super) fn if_fitting<T>(made: Result<T, GenerateError>) -> Result<Option<T>, GenerateError> {
    match made {
        Ok(made) => Ok(Some(made)),
        Err(GenerateError::Cache(CacheError::OutOfMemory { .. } | CacheError::NoPages { .. })) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

#[cfg(all(test, feature = "flex"))]
#[path = "memory_tests.rs"]
mod tests;
