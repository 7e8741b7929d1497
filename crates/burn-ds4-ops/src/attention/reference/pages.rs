//! Rows in pages.

use crate::attention::args::PagedRows;
use crate::dims::Dims;
#[cfg(feature = "flex")]
use crate::optional::OptionalInt;
use crate::reference::prelude::*;

impl<B: Backend> PagedRows<B> {
    /// The rows of sequences, one after the other: `[batch, rows, width]`.
    pub(in crate::attention) fn in_order(self) -> FloatTensor<B> {
        let [_, rows, width] = self.rows.dims();
        let Some(pages) = self.pages.into_option() else {
            return self.rows;
        };
        let [batch, own] = pages.dims();
        let pages = B::int_cast(int_reshape::<B>(pages, [batch * own]), INT);
        let found = B::float_select(self.rows, 0, pages);
        reshape::<B>(found, [batch, own * rows, width])
    }

    /// The first rows of a sequence: `[1, count, width]`.
    #[cfg(feature = "flex")]
    pub(in crate::attention) fn first(&self, sequence: usize, count: usize) -> FloatTensor<B> {
        let rows = match self.pages.as_ref() {
            None => slice::<B>(self.rows.clone(), 0, sequence..sequence + 1),
            Some(pages) => {
                let used = count.div_ceil(self.rows.shape()[1]);
                let own = [sequence..sequence + 1, 0..used].map(Slice::from);
                let pages = OptionalInt::Some(B::int_slice(pages.clone(), &own));
                let rows = self.rows.clone();
                Self { rows, pages }.in_order()
            }
        };
        slice::<B>(rows, 1, 0..count)
    }
}

/// Where rows of sequences are among those of all pages, by their numbers: `[batch, count]`.
pub(super) fn located<B: Backend>(
    pages: IntTensor<B>,
    rows: usize,
    numbers: IntTensor<B>,
) -> IntTensor<B> {
    let rows = rows as i64;
    let page = B::int_div_scalar(numbers.clone(), rows.into());
    let page = B::int_gather(1, B::int_cast(pages, INT), page);
    let own = B::int_remainder_scalar(numbers, rows.into());
    B::int_add(B::int_mul_scalar(page, rows.into()), own)
}
