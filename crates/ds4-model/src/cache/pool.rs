//! Pages of compressed rows that the sequences of several caches share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::{
    Device, Distribution, FloatDType, IndexingUpdateOp, Int, Shape, Tensor, TensorData,
};
use burn_ds4_ops::device::{check_tensors, copied, may_allocate};

use super::error::CacheError;
use super::layout::{CacheConfig, CacheLayout, LayerRings, RingSizes};
use crate::placement::Placement;

/// Compressed rows of all layers, in pages.
///
/// A page has what so many positions of one sequence leave in every layer. A sequence takes one
/// after the other as it becomes longer; none of its rows moves. A page goes back when nobody holds
/// it any more. The first page is nobody's: what is written beyond the pages of a sequence goes
/// there.
#[derive(Clone, Debug)]
pub struct PagePool {
    /// Of each compressor, in the order of the layers.
    rows: Arc<Vec<PoolRows>>,
    numbers: Arc<Mutex<Numbers>>,
    positions: usize,
    /// Bytes of a page on each device that has compressors.
    bytes: Vec<(Device, usize)>,
}

/// The rows of a compressor in all pages: `[pages, rows of a page, width]`. Taken while they are
/// written.
#[derive(Clone, Debug)]
pub(crate) struct PoolRows(Arc<Mutex<Option<Tensor<3>>>>);

/// Pages that nobody holds, the next one last, and how many there are.
#[derive(Debug)]
struct Numbers {
    free: Vec<u32>,
    all: usize,
}

/// A page for as long as somebody holds it.
#[derive(Debug)]
pub(crate) struct Page {
    number: u32,
    numbers: Arc<Mutex<Numbers>>,
}

impl Page {
    pub(super) fn number(&self) -> i32 {
        self.number as i32
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        lock(&self.numbers).free.push(self.number);
    }
}

/// A value, whoever else has failed with it.
fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PoolRows {
    fn new(sizes: RingSizes, device: &Device) -> Self {
        let shape = [1, sizes.slots, sizes.width];
        let rows = Tensor::zeros(shape, (device, sizes.dtype.into()));
        Self(Arc::new(Mutex::new(Some(rows))))
    }

    pub(crate) fn all(&self) -> Tensor<3> {
        lock(&self.0).clone().expect("rows are put back")
    }

    pub(crate) fn take(&self) -> Tensor<3> {
        lock(&self.0).take().expect("rows are put back")
    }

    pub(crate) fn put(&self, rows: Tensor<3>) {
        *lock(&self.0) = Some(rows);
    }

    /// Replaces the rows of some pages by random ones.
    pub(super) fn fill_random(&self, pages: &[i32], distribution: Distribution) {
        let all = self.take();
        let ([_, count, width], device) = (all.dims(), all.device());
        let numbers = Tensor::from_data(TensorData::from(pages), &device);
        let shape = Shape::new([pages.len(), count, width]);
        let new = Tensor::random(shape, distribution, (&device, all.dtype()));
        self.put(all.select_assign(0, numbers, new, IndexingUpdateOp::Assign));
    }
}

impl PagePool {
    /// An empty pool for caches of a model's layers, each on the device that the placement has it
    /// on, with rows of `dtype`. A page has `positions` positions, or the next number that all
    /// layers divide into whole rows. Kernels read pages of 256 as fast as rows in their order.
    ///
    /// # Panics
    ///
    /// If the placement is of another number of layers, or a layer compresses blocks of no tokens.
    pub fn new(
        layout: &CacheLayout,
        dtype: FloatDType,
        placement: &Placement,
        positions: usize,
    ) -> Self {
        let layers = layout.layers.len();
        assert_eq!(placement.layers(), layers, "placement: number of layers");
        let ratios = layout.layers.iter().filter_map(|kind| kind.ratio());
        let multiple = ratios.fold(1, |sum: usize, ratio| {
            sum.saturating_mul(ratio / greatest_divisor(sum, ratio))
        });
        let whole = positions.max(1).checked_next_multiple_of(multiple);
        let positions = whole.unwrap_or(multiple);
        let options = CacheConfig {
            dtype,
            ..CacheConfig::default()
        };
        let (mut rows, mut bytes) = (Vec::new(), Vec::<(Device, usize)>::new());
        for run in placement.runs() {
            let kinds = layout.layers[run.layers.clone()].iter();
            for kind in kinds {
                let sizes = LayerRings::new(*kind, layout, &options, positions);
                let compressors = [sizes.compressed, sizes.indexer].into_iter().flatten();
                for sizes in compressors.map(|sizes| sizes.rows) {
                    rows.push(PoolRows::new(sizes, &run.device));
                    match bytes.iter_mut().find(|(device, _)| *device == run.device) {
                        Some((_, sum)) => *sum = sum.saturating_add(sizes.bytes()),
                        None => bytes.push((run.device.clone(), sizes.bytes())),
                    }
                }
            }
        }
        Self {
            rows: Arc::new(rows),
            numbers: Arc::new(Mutex::new(Numbers {
                free: Vec::new(),
                all: 0,
            })),
            positions,
            bytes,
        }
    }

    /// What tells it from others.
    pub(super) fn name(&self) -> String {
        format!("{:p}", Arc::as_ptr(&self.numbers))
    }

    /// Positions of a page.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Pages that so many positions of a sequence take.
    pub fn pages_for(&self, positions: usize) -> usize {
        positions.div_ceil(self.positions)
    }

    /// The most pages that sequences may hold: 31 bits count what each compressor has.
    pub(crate) fn most(&self) -> usize {
        let of_page = self.rows.iter().map(|rows| {
            let [_, count, width] = rows.all().dims();
            count * width
        });
        let widest = of_page.max().unwrap_or(0).max(1);
        (i32::MAX as usize / widest).saturating_sub(1)
    }

    /// Pages that sequences may hold.
    pub fn len(&self) -> usize {
        lock(&self.numbers).all
    }

    /// Whether there is no page.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Pages that nobody holds.
    pub fn free(&self) -> usize {
        lock(&self.numbers).free.len()
    }

    /// Bytes of a page on each device that has some of it.
    pub fn page_bytes(&self) -> &[(Device, usize)] {
        &self.bytes
    }

    /// Bytes of all pages, that of nobody included.
    pub fn bytes(&self) -> usize {
        let page: usize = self.bytes.iter().map(|(_, bytes)| bytes).sum();
        page.saturating_mul(self.len() + 1)
    }

    /// Makes so many pages more. All rows are copied, one compressor's after the other's.
    ///
    /// # Errors
    ///
    /// [`CacheError::OutOfMemory`] where a device has no memory. The pool is as it was.
    pub fn grow(&self, more: usize) -> Result<(), CacheError> {
        let all = self.len();
        let refused = || CacheError::OutOfMemory {
            positions: more.saturating_mul(self.positions),
            bytes: self.bytes(),
        };
        let numbers = u32::try_from(all.saturating_add(more)).map_err(|_| refused())?;
        let fits =
            |(device, bytes): &(Device, usize)| may_allocate(device, bytes.saturating_mul(more));
        if !self.bytes.iter().all(fits) {
            return Err(refused());
        }
        // Until all of them are there, rows stay as they were.
        let grown: Vec<Tensor<3>> = self
            .rows
            .iter()
            .map(|rows| grown(rows.all(), more))
            .collect();
        check_tensors(&grown).map_err(|reason| {
            log::warn!("there is no memory for pages: {reason}");
            refused()
        })?;
        for (rows, grown) in self.rows.iter().zip(grown) {
            rows.put(grown);
        }
        let mut own = lock(&self.numbers);
        own.free.extend((all as u32 + 1..=numbers).rev());
        own.all = numbers as usize;
        Ok(())
    }

    /// Takes so many pages.
    ///
    /// # Errors
    ///
    /// [`CacheError::NoPages`] where they are more than are free. None is taken then.
    pub(crate) fn take(&self, count: usize) -> Result<Vec<Arc<Page>>, CacheError> {
        let mut own = lock(&self.numbers);
        let Some(left) = own.free.len().checked_sub(count) else {
            return Err(CacheError::NoPages {
                missing: count - own.free.len(),
                all: own.all,
            });
        };
        let taken = own.free.split_off(left).into_iter().rev();
        let page = |number| Page {
            number,
            numbers: self.numbers.clone(),
        };
        Ok(taken.map(|number| Arc::new(page(number))).collect())
    }

    /// Copies the rows of a page to another.
    pub(crate) fn copy(&self, from: &Page, to: &Page) {
        for rows in self.rows.iter() {
            let all = rows.take();
            let [_, count, width] = all.dims();
            // In memory of its own, so that the write is in place.
            let page = copied(&all.clone().narrow(0, from.number as usize, 1));
            let to = to.number as usize;
            rows.put(all.slice_assign([to..to + 1, 0..count, 0..width], page));
        }
    }

    /// The rows of each compressor, in the order of the layers.
    pub(super) fn rows(&self) -> &[PoolRows] {
        &self.rows
    }
}

/// More pages after those that there are.
fn grown(rows: Tensor<3>, more: usize) -> Tensor<3> {
    let [all, count, width] = rows.dims();
    let like = (&rows.device(), rows.dtype());
    if all == 1 {
        // That is nobody's. A copy would take as much memory again.
        return Tensor::zeros([1 + more, count, width], like);
    }
    Tensor::cat(vec![rows, Tensor::zeros([more, count, width], like)], 0)
}

/// The pages of a sequence as steps read them, the first one for those that it does not have:
/// `[1, reach]`.
pub(super) fn table_row(pages: &[Arc<Page>], reach: usize, device: &Device) -> Tensor<2, Int> {
    let numbers = pages.iter().map(|page| page.number());
    let numbers: Vec<i32> = numbers.chain(std::iter::repeat(0)).take(reach).collect();
    Tensor::from_data(TensorData::new(numbers, [1, reach]), device)
}

fn greatest_divisor(a: usize, b: usize) -> usize {
    match b {
        0 => a.max(1),
        _ => greatest_divisor(b, a % b),
    }
}

#[cfg(all(test, feature = "flex"))]
#[path = "pool_tests.rs"]
mod tests;
