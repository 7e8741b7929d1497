//! The `k` largest entries of long rows, each within a window of its own, for sparse attention.
//!
//! All of these operators choose the same entries: those that come first by (value descending,
//! column ascending). So the lower column wins among equals, and an input has one result, on every
//! device and in every run. The logits are only read.
//!
//! # Windows
//!
//! Of row `r`, the columns `start..end` take part; columns in a result are relative to `start`.
//! Both ends are clamped to the row, and a window that ends before it starts is empty. Where a
//! window has fewer than `k` columns, the slots that are left over hold -1, and `-inf` as a value.
//!
//! # Special values
//!
//! NaN ranks as `-inf`, which ranks below every number; zeros of either sign are equal.
//!
//! # Speed
//!
//! On CubeCL devices, rows are read once, and a small number of long rows is divided among all SMs.
//! Data of which a sample says little, such as thousands of equal entries at the k-th place, take
//! several times as long; the result is the same.
//!
//! # Source
//!
//! The contract is that of vLLM's `top_k_per_row_prefill` and `top_k_per_row_decode`, which
//! DeepSeek-V4's lightning indexer needs with a `k` of 512 and 1024. Order and ties, which are
//! arbitrary there, are fixed here.

mod backend;
#[cfg(feature = "cube")]
pub(crate) mod kernel;
#[cfg(feature = "cube")]
mod launch;
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Bool, IndexingUpdateOp, Int, IntDType, Tensor};

pub(crate) use backend::{CausalWindow, TopkOps};

/// Largest `k` of the operators of this family.
pub const MAX_K: usize = 4096;
/// Most columns that a row may have.
pub const MAX_COLUMNS: usize = 1 << 23;
/// Most tokens that the columns of [`Windows::Blocks`] may stand for.
const MAX_TOKENS: usize = 1 << 30;

/// The columns of each row that take part.
#[derive(Clone, Debug, Default)]
// Tensors are large, and there is one of these per call.
#[allow(clippy::large_enum_variant)]
pub enum Windows {
    /// All columns.
    #[default]
    All,
    /// `starts[row]..ends[row]`.
    Ranges {
        /// First column of each row's window: `[rows]`, any integer.
        starts: Tensor<1, Int>,
        /// The column after the last: `[rows]`, any integer.
        ends: Tensor<1, Int>,
    },
    /// The columns visible to each of the last `next_n` tokens of a sequence: row `b · next_n + j`
    /// has the columns `0..lengths[b] - next_n + j + 1`.
    Lengths {
        /// Length of each sequence, with its last `next_n` tokens: `[rows / next_n]`, any integer.
        lengths: Tensor<1, Int>,
        /// Rows per sequence.
        next_n: usize,
    },
    /// The columns visible to each of `next_n` new tokens of a sequence, where a column stands for
    /// `ratio` tokens: row `b · next_n + j` has the columns `0..(starts[b] + j + 1) / ratio`, those
    /// whose tokens all come at or before its own. A negative start counts as 0.
    Blocks {
        /// Tokens of each sequence before its new ones: `[rows / next_n]`, any integer.
        starts: Tensor<1, Int>,
        /// Tokens that a column stands for.
        ratio: usize,
        /// Rows per sequence.
        next_n: usize,
    },
}

/// The order of a row's results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Column ascending.
    #[default]
    Column,
    /// Value descending; among equals, column ascending.
    Value,
}

/// The columns of the `k` largest entries of each row's window, ascending.
///
/// # Shapes and dtypes
///
/// - `logits`: `[rows, columns]`, f32 / f16 / bf16
/// - `row_starts`, `row_ends`: `[rows]`, any integer; see [windows](self#windows)
/// - output: `[rows, k]`, i32, relative to the row's start. A window of `k` columns or fewer gives
///   all of them, then -1.
///
/// # Panics
///
/// If `k` is not in 1..=[`MAX_K`], there are more than [`MAX_COLUMNS`] columns, or `row_starts` or
/// `row_ends` does not have one element for each row.
pub fn top_k_per_row(
    logits: Tensor<2>,
    row_starts: Tensor<1, Int>,
    row_ends: Tensor<1, Int>,
    k: usize,
) -> Tensor<2, Int> {
    let windows = Windows::Ranges {
        starts: row_starts,
        ends: row_ends,
    };
    top_k_ids(logits, windows, k)
}

/// [`top_k_per_row`] for the last tokens of sequences, to each of which the columns up to its own
/// are visible.
///
/// # Shapes and dtypes
///
/// - `logits`: `[batch · next_n, columns]`, f32 / f16 / bf16
/// - `seq_lens`: any integer, either `[batch]`, the lengths of the sequences
///   ([`Windows::Lengths`]), or `[batch, next_n]`, the end of each row's window
/// - output: `[batch · next_n, k]`, i32, as [`top_k_per_row`]
///
/// # Panics
///
/// As [`top_k_per_row`]; also if `next_n` is 0 or `seq_lens` has another shape.
pub fn top_k_per_row_decode<const D: usize>(
    logits: Tensor<2>,
    seq_lens: Tensor<D, Int>,
    next_n: usize,
    k: usize,
) -> Tensor<2, Int> {
    let rows = logits.dims()[0];
    let shape = seq_lens.dims();
    let fits = next_n > 0
        && match shape[..] {
            [batch] => batch.checked_mul(next_n) == Some(rows),
            [batch, tokens] => tokens == next_n && batch.checked_mul(next_n) == Some(rows),
            _ => false,
        };
    assert!(
        fits,
        "top_k_per_row_decode: seq_lens has shape {shape:?}, expected [batch] or \
         [batch, next_n] with batch · next_n = {rows} (the number of rows) and next_n = {next_n}"
    );
    let lengths = seq_lens.flatten(0, D - 1);
    // The end of a window is the length of a sequence with one token.
    let next_n = if D == 1 { next_n } else { 1 };
    top_k_ids(logits, Windows::Lengths { lengths, next_n }, k)
}

/// [`top_k_per_row`] for any kind of windows.
///
/// # Panics
///
/// As [`top_k_per_row`]; also if `next_n` is 0 or does not match the numbers of rows and of lengths
/// or starts, or if the columns stand for no tokens or for more than 2^30.
pub fn top_k_ids(logits: Tensor<2>, windows: Windows, k: usize) -> Tensor<2, Int> {
    check(&logits, &windows, k);
    ids_within(logits, windows.into_bounds(), k)
}

/// The `k` largest entries of each row's window, and their columns as [`top_k_ids`].
///
/// # Shapes and dtypes
///
/// - `logits`: `[rows, columns]`, f32 / f16 / bf16
/// - output: values `[rows, k]` as in `logits` (NaN as NaN), columns `[rows, k]`, i32, both in
///   `order`
///
/// # Panics
///
/// As [`top_k_ids`].
pub fn top_k(
    logits: Tensor<2>,
    windows: Windows,
    k: usize,
    order: Order,
) -> (Tensor<2>, Tensor<2, Int>) {
    check(&logits, &windows, k);
    let (starts, ends, causal) = windows.into_bounds();
    let ids = ids_within(logits.clone(), (starts.clone(), ends, causal), k);
    let (values, ids) = Dispatch::top_k_values(
        logits.into_dispatch(),
        starts.into(),
        ids.into_dispatch(),
        order == Order::Value,
    );
    (Tensor::from_dispatch(values), Tensor::from_dispatch(ids))
}

/// Marks the `k` largest entries of each row.
///
/// # Shapes and dtypes
///
/// - `logits`: `[rows, columns]`, f32 / f16 / bf16
/// - output: `[rows, columns]`, exactly `min(k, columns)` entries set per row, whatever the row
///   holds
///
/// # Panics
///
/// As [`top_k_ids`].
pub fn top_k_mask(logits: Tensor<2>, k: usize) -> Tensor<2, Bool> {
    let [rows, columns] = logits.dims();
    let ids = top_k_ids(logits, Windows::All, k);
    let device = ids.device();
    // CubeCL devices panic on some operations without elements.
    if rows == 0 || columns == 0 {
        return Tensor::<2, Int>::zeros([rows, columns], &device).equal_elem(1);
    }
    // Slots that are left over hold -1 and mark an extra first column.
    let ones = Tensor::<2, Int>::ones([rows, k], (&device, ids.dtype()));
    Tensor::<2, Int>::zeros([rows, columns + 1], (&device, ids.dtype()))
        .scatter(1, ids + 1, ones, IndexingUpdateOp::Add)
        .slice([0..rows, 1..columns + 1])
        .greater_elem(0)
}

fn ids_within(logits: Tensor<2>, (starts, ends, causal): WindowBounds, k: usize) -> Tensor<2, Int> {
    let (logits, starts, ends) = (logits.into_dispatch(), starts.into(), ends.into());
    Tensor::from_dispatch(Dispatch::top_k_ids(logits, starts, ends, causal, k))
}

/// Starts, ends, and how the ends are computed where they are given for each sequence.
type WindowBounds = (Option<Tensor<1, Int>>, Option<Tensor<1, Int>>, CausalWindow);

impl Windows {
    fn into_bounds(self) -> WindowBounds {
        match self {
            Self::All => (None, None, CausalWindow::ONE),
            Self::Ranges { starts, ends } if starts.dtype() == ends.dtype() => (
                Some(as_wide(starts)),
                Some(as_wide(ends)),
                CausalWindow::ONE,
            ),
            Self::Ranges { starts, ends } => {
                (Some(as_i32(starts)), Some(as_i32(ends)), CausalWindow::ONE)
            }
            Self::Lengths { lengths, next_n } => {
                let causal = CausalWindow {
                    next_n,
                    counted: next_n,
                    ratio: 1,
                };
                (None, Some(as_wide(lengths)), causal)
            }
            Self::Blocks {
                starts,
                ratio,
                next_n,
            } => {
                let causal = CausalWindow {
                    next_n,
                    counted: 0,
                    ratio,
                };
                (None, Some(as_wide(starts)), causal)
            }
        }
    }
}

/// Casts to a dtype that can hold the number of columns, to which bounds are clamped.
fn as_wide(bounds: Tensor<1, Int>) -> Tensor<1, Int> {
    if bounds.dtype().size() < 4 {
        bounds.cast(IntDType::I32)
    } else {
        bounds
    }
}

/// Casts to i32 after clamping to the longest row.
fn as_i32(bounds: Tensor<1, Int>) -> Tensor<1, Int> {
    as_wide(bounds)
        .clamp(0, MAX_COLUMNS as i64)
        .cast(IntDType::I32)
}

fn check(logits: &Tensor<2>, windows: &Windows, k: usize) {
    let [rows, columns] = logits.dims();
    assert!(
        (1..=MAX_K).contains(&k),
        "top_k: k must be in 1..={MAX_K}, got {k}"
    );
    assert!(
        columns <= MAX_COLUMNS,
        "top_k: logits has {columns} columns, more than {MAX_COLUMNS}"
    );
    match windows {
        Windows::All => {}
        Windows::Ranges { starts, ends } => {
            for (name, bounds) in [("row_starts", starts), ("row_ends", ends)] {
                let [entries] = bounds.dims();
                assert_eq!(
                    entries, rows,
                    "top_k: {name} has {entries} entries for {rows} rows"
                );
            }
        }
        Windows::Lengths { lengths, next_n } => {
            let [entries] = lengths.dims();
            assert!(
                *next_n > 0 && entries.checked_mul(*next_n) == Some(rows),
                "top_k: {entries} lengths with next_n = {next_n} for {rows} rows"
            );
        }
        Windows::Blocks {
            starts,
            ratio,
            next_n,
        } => {
            let [entries] = starts.dims();
            assert!(
                *next_n > 0 && entries.checked_mul(*next_n) == Some(rows),
                "top_k: {entries} starts with next_n = {next_n} for {rows} rows"
            );
            assert!(
                *next_n <= MAX_TOKENS,
                "top_k: next_n must be at most {MAX_TOKENS}, got {next_n}"
            );
            let most = MAX_TOKENS / columns.max(1);
            assert!(
                (1..=most).contains(ratio),
                "top_k: ratio must be in 1..={most} for {columns} columns, got {ratio}"
            );
        }
    }
}
