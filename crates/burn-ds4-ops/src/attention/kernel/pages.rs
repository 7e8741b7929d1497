//! Rows in pages that sequences share.

use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use crate::comptime_option::ComptimeOption;

/// The pages of sequences.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PageTable {
    /// `[batch, pages]`.
    pub pages: Box<[i32]>,
    /// Pages of a sequence, and all that there are.
    pub of_sequence: u32,
    pub all: u32,
    /// Rows of a page, as a number and as a divisor.
    pub rows: u32,
    pub rows_divisor: FastDivmod<u32>,
}

#[cube]
impl PageTable {
    /// The number of a sequence's row, which it has, among those of all pages.
    pub fn row(&self, sequence: u32, row: u32) -> u32 {
        let (page, own) = self.rows_divisor.div_mod(row);
        let page = self.pages[sequence as usize * self.of_sequence as usize + page as usize];
        min(u32::cast_from(page), self.all - 1) * self.rows + own
    }
}

/// The offset of a sequence's row, which it has, by the strides of sequences and of rows.
#[cube]
pub(super) fn row_start(
    pages: &ComptimeOption<PageTable>,
    sequence: u32,
    row: u32,
    sequence_stride: usize,
    row_stride: usize,
) -> usize {
    let paged: ComptimeOption<usize> = pages
        .as_ref()
        .map(|pages| pages.row(sequence, row) as usize * row_stride);
    paged.unwrap_or_else(|| sequence as usize * sequence_stride + row as usize * row_stride)
}
