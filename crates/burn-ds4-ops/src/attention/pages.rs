//! Rows of sequences in pages that they share.

use burn::backend::Dispatch;
use burn::tensor::{Device, Int, Tensor};

use super::args;
use crate::OpError;
use crate::device::is_host;
use crate::validation::{Accepted, INTEGERS, expect_positive, expect_tensor, expect_value};

/// Compressed rows of sequences, one after the other or in pages.
///
/// Pages let sequences of any lengths share one tensor: what a sequence needs more is another page,
/// and no row moves. A page is of one sequence, or of none whose rows are read; what more than one
/// writes to is undefined.
#[derive(Clone, Debug)]
pub struct PagedRows {
    /// The rows: `[batch, rows, width]`. With pages `[all pages, rows of a page, width]`.
    pub rows: Tensor<3>,
    /// The pages of each sequence, in their order: i32, i64 or u32, `[batch, pages]`. Row `r` of a
    /// sequence is then row `r % n` of its page number `r / n`, where `n` is the rows of a page. A
    /// page that there is not is an error where the device's memory is the host's. Elsewhere it
    /// counts as the last one.
    pub pages: Option<Tensor<2, Int>>,
}

impl From<Tensor<3>> for PagedRows {
    fn from(rows: Tensor<3>) -> Self {
        Self { rows, pages: None }
    }
}

impl PagedRows {
    /// Rows of a sequence.
    pub(super) fn count(&self) -> usize {
        let [_, rows, _] = self.rows.dims();
        let pages = self.pages.as_ref().map_or(1, |pages| pages.dims()[1]);
        rows * pages
    }

    /// Checks the rows of `batch` sequences.
    pub(super) fn check(
        &self,
        argument: &'static str,
        dtype: Accepted,
        [batch, width]: [usize; 2],
        like: (&'static str, &Device),
    ) -> Result<(), OpError> {
        let [all, rows, _] = self.rows.dims();
        let Some(pages) = &self.pages else {
            return expect_tensor((argument, &self.rows), dtype, [batch, rows, width], like);
        };
        expect_tensor((argument, &self.rows), dtype, [all, rows, width], like)?;
        let [_, own] = pages.dims();
        expect_tensor(("pages", pages), INTEGERS, [batch, own], like)?;
        expect_positive([
            ("pages", all),
            ("rows of a page", rows),
            ("pages of a sequence", own),
        ])?;
        if batch == 0 || !is_host(&pages.device()) {
            return Ok(());
        }
        let numbers = pages.clone().into_data();
        let numbers = numbers.iter::<i64>();
        let pages = numbers.map(|page| usize::try_from(page).unwrap_or(usize::MAX));
        let last = pages.max().unwrap_or(0);
        let expected = format_args!("less than {all}, the pages that there are");
        expect_value(last < all, "last page", last, expected)
    }
}

impl From<PagedRows> for args::PagedRows<Dispatch> {
    fn from(PagedRows { rows, pages }: PagedRows) -> Self {
        Self {
            rows: rows.into_dispatch(),
            pages: pages.into(),
        }
    }
}
