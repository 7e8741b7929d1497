//! Rows in pages, on the side of the host.

use burn::backend::ops::IntTensorOps;

use crate::attention::args::PagedRows;
use crate::attention::kernel::PageTableLaunch;
use crate::launching::prelude::*;
use crate::optional::OptionalInt;
use crate::reference::prelude::INT;

/// The pages of sequences, and the sizes of them.
#[derive(Clone)]
pub(super) struct Pages {
    /// `[batch, pages]`.
    table: CubeTensor,
    /// All pages, and the rows of one.
    sizes: [usize; 2],
}

impl Pages {
    /// The pages of rows `[all pages, rows of a page, width]`.
    pub(super) fn new(pages: &OptionalInt<CubeBackend>, rows: &CubeTensor) -> Option<Self> {
        let table = CubeBackend::int_cast(pages.as_ref()?.clone(), INT);
        let [all, of_page, _] = rows.dims();
        Some(Self {
            table: into_contiguous(table),
            sizes: [all, of_page],
        })
    }

    pub(super) fn arg(&self) -> PageTableLaunch {
        let [all, rows] = self.sizes.map(|size| size as u32);
        let table = self.table.clone().into_buffer_arg();
        PageTableLaunch::new(table, self.table.shape()[1] as u32, all, rows, rows)
    }
}

impl PagedRows<CubeBackend> {
    /// Whether 32 bits count the rows of all sequences or pages.
    pub(super) fn fits(&self) -> bool {
        let [all, rows, _] = self.rows.dims();
        fits_i32(all.checked_mul(rows)) && fits_i32(Some(self.count()))
    }

    /// The rows, laid out so that pages follow each other.
    pub(super) fn laid_out(self) -> CubeTensor {
        match self.pages {
            OptionalInt::None => self.rows,
            OptionalInt::Some(_) => into_contiguous(self.rows),
        }
    }
}
