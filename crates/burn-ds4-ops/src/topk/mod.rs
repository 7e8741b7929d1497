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

mod args;
mod backend;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Bool, IndexingUpdateOp, Int, IntDType, Tensor};

use crate::OpError;
use crate::validation::{
    expect_float, expect_placed, expect_positive, expect_shape, expect_value, invalid,
};
pub(crate) use args::CausalWindow;
pub(crate) use backend::TopkOps;

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
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, for a `k` outside 1..=[`MAX_K`], and
/// for more than [`MAX_COLUMNS`] columns.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_ds4_ops::topk::top_k_per_row;
///
/// let device = Device::flex();
/// let logits = Tensor::<2>::from_data([[5.0, 1.0, 4.0, 2.0]], &device);
/// // The window of the row begins at column 1.
/// let starts = Tensor::<1, Int>::from_data([1], &device);
/// let ends = Tensor::<1, Int>::from_data([4], &device);
/// let ids = top_k_per_row(logits, starts, ends, 2)?;
/// assert_eq!(ids.into_data().iter::<i64>().collect::<Vec<_>>(), [1, 2]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn top_k_per_row(
    logits: Tensor<2>,
    row_starts: Tensor<1, Int>,
    row_ends: Tensor<1, Int>,
    k: usize,
) -> Result<Tensor<2, Int>, OpError> {
    expect_bounds("row_starts", &row_starts, &logits, 1)?;
    expect_bounds("row_ends", &row_ends, &logits, 1)?;
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
/// # Errors
///
/// As [`top_k_per_row`]; also for a `next_n` that is 0 or does not divide the number of rows.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_ds4_ops::topk::top_k_per_row_decode;
///
/// let device = Device::flex();
/// let logits = Tensor::<2>::from_data([[1.0, 2.0, 9.0], [4.0, 3.0, 9.0]], &device);
/// let lengths = Tensor::<1, Int>::from_data([2, 3], &device);
/// let ids = top_k_per_row_decode(logits, lengths, 1, 1)?;
/// assert_eq!(ids.into_data().iter::<i64>().collect::<Vec<_>>(), [1, 2]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn top_k_per_row_decode<const D: usize>(
    logits: Tensor<2>,
    seq_lens: Tensor<D, Int>,
    next_n: usize,
    k: usize,
) -> Result<Tensor<2, Int>, OpError> {
    let batch = batch_of(&logits, next_n)?;
    let shape = seq_lens.dims();
    match D {
        1 => expect_shape("seq_lens", [shape[0]], [batch])?,
        2 => expect_shape("seq_lens", [shape[0], shape[1]], [batch, next_n])?,
        _ => return Err(invalid("dimensions of seq_lens", "1 or 2", D)),
    }
    let lengths = seq_lens.reshape([shape.iter().product::<usize>()]);
    // The end of a window is the length of a sequence with one token.
    let next_n = if D == 1 { next_n } else { 1 };
    expect_bounds("seq_lens", &lengths, &logits, next_n)?;
    top_k_ids(logits, Windows::Lengths { lengths, next_n }, k)
}

/// [`top_k_per_row`] for any kind of windows.
///
/// # Errors
///
/// As [`top_k_per_row`]; also for a `next_n` that is 0 or does not divide the number of rows, and
/// where the columns stand for no tokens or for more than 2^30.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_ds4_ops::topk::{Windows, top_k_ids};
///
/// let device = Device::flex();
/// let logits = Tensor::<2>::from_data([[3.0, 1.0, 2.0, 9.0], [3.0, 1.0, 2.0, 9.0]], &device);
/// // Two tokens of a text of four: the first does not see the last column.
/// let lengths = Tensor::<1, Int>::from_data([4], &device);
/// let ids = top_k_ids(logits, Windows::Lengths { lengths, next_n: 2 }, 2)?;
/// assert_eq!(ids.into_data().iter::<i64>().collect::<Vec<_>>(), [0, 2, 0, 3]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "topk")]
pub fn top_k_ids(logits: Tensor<2>, windows: Windows, k: usize) -> Result<Tensor<2, Int>, OpError> {
    check(&logits, &windows, k)?;
    Ok(ids_within(logits, windows.into_bounds(), k))
}

/// The `k` largest entries of each row's window, and their columns as [`top_k_ids`].
///
/// # Shapes and dtypes
///
/// - `logits`: `[rows, columns]`, f32 / f16 / bf16
/// - output: values `[rows, k]` as in `logits` (NaN as NaN), columns `[rows, k]`, i32, both in
///   `order`
///
/// # Errors
///
/// As [`top_k_ids`].
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_ds4_ops::topk::{Order, Windows, top_k};
///
/// let logits = Tensor::<2>::from_data([[1.0, 3.0, 2.0]], &Device::flex());
/// let (values, ids) = top_k(logits, Windows::All, 2, Order::Value)?;
/// assert_eq!(values.into_data().iter::<f32>().collect::<Vec<_>>(), [3.0, 2.0]);
/// assert_eq!(ids.into_data().iter::<i64>().collect::<Vec<_>>(), [1, 2]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn top_k(
    logits: Tensor<2>,
    windows: Windows,
    k: usize,
    order: Order,
) -> Result<(Tensor<2>, Tensor<2, Int>), OpError> {
    check(&logits, &windows, k)?;
    let (starts, ends, causal) = windows.into_bounds();
    let ids = ids_within(logits.clone(), (starts.clone(), ends, causal), k);
    let (values, ids) = Dispatch::top_k_values(
        logits.into_dispatch(),
        starts.into(),
        ids.into_dispatch(),
        order == Order::Value,
    );
    Ok((Tensor::from_dispatch(values), Tensor::from_dispatch(ids)))
}

/// Marks the `k` largest entries of each row.
///
/// # Shapes and dtypes
///
/// - `logits`: `[rows, columns]`, f32 / f16 / bf16
/// - output: `[rows, columns]`, exactly `min(k, columns)` entries set per row, whatever the row
///   holds
///
/// # Errors
///
/// As [`top_k_ids`].
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_ds4_ops::topk::top_k_mask;
///
/// let logits = Tensor::<2>::from_data([[1.0, 3.0, 2.0]], &Device::flex());
/// let mask = top_k_mask(logits, 2)?;
/// assert_eq!(mask.into_data().iter::<bool>().collect::<Vec<_>>(), [false, true, true]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn top_k_mask(logits: Tensor<2>, k: usize) -> Result<Tensor<2, Bool>, OpError> {
    let [rows, columns] = logits.dims();
    let ids = top_k_ids(logits, Windows::All, k)?;
    let device = ids.device();
    // CubeCL devices panic on some operations without elements.
    if rows == 0 || columns == 0 {
        return Ok(Tensor::<2, Int>::zeros([rows, columns], &device).equal_elem(1));
    }
    // Slots that are left over hold -1 and mark an extra first column.
    let ones = Tensor::<2, Int>::ones([rows, k], (&device, ids.dtype()));
    Ok(
        Tensor::<2, Int>::zeros([rows, columns + 1], (&device, ids.dtype()))
            .scatter(1, ids + 1, ones, IndexingUpdateOp::Add)
            .slice([0..rows, 1..columns + 1])
            .greater_elem(0),
    )
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
            Self::Ranges { starts, ends } => {
                let cast = match starts.dtype() == ends.dtype() {
                    true => as_wide,
                    false => as_i32,
                };
                (Some(cast(starts)), Some(cast(ends)), CausalWindow::ONE)
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

fn check(logits: &Tensor<2>, windows: &Windows, k: usize) -> Result<(), OpError> {
    expect_float("logits", logits)?;
    let [_, columns] = logits.dims();
    let fits = (1..=MAX_K).contains(&k);
    expect_value(fits, "k", k, format_args!("1 to {MAX_K}"))?;
    let expected = format_args!("at most {MAX_COLUMNS}");
    expect_value(
        columns <= MAX_COLUMNS,
        "columns of logits",
        columns,
        expected,
    )?;
    match windows {
        Windows::All => Ok(()),
        Windows::Ranges { starts, ends } => {
            expect_bounds("starts", starts, logits, 1)?;
            expect_bounds("ends", ends, logits, 1)
        }
        Windows::Lengths { lengths, next_n } => expect_bounds("lengths", lengths, logits, *next_n),
        Windows::Blocks {
            starts,
            ratio,
            next_n,
        } => {
            expect_bounds("starts", starts, logits, *next_n)?;
            let expected = format_args!("at most {MAX_TOKENS}");
            expect_value(*next_n <= MAX_TOKENS, "next_n", *next_n, expected)?;
            let most = MAX_TOKENS / columns.max(1);
            let fits = (1..=most).contains(ratio);
            let expected = format_args!("1 to {most}, with {columns} columns");
            expect_value(fits, "ratio", *ratio, expected)
        }
    }
}

/// Sequences of `next_n` rows each.
fn batch_of(logits: &Tensor<2>, next_n: usize) -> Result<usize, OpError> {
    let [rows, _] = logits.dims();
    expect_positive([("next_n", next_n)])?;
    let expected = format_args!("a multiple of {next_n}, which is next_n");
    expect_value(
        rows.is_multiple_of(next_n),
        "rows of logits",
        rows,
        expected,
    )?;
    Ok(rows / next_n)
}

/// Checks one end of the windows of sequences of `next_n` rows each.
fn expect_bounds(
    argument: &'static str,
    bounds: &Tensor<1, Int>,
    logits: &Tensor<2>,
    next_n: usize,
) -> Result<(), OpError> {
    let (shape, like) = ([batch_of(logits, next_n)?], ("logits", &logits.device()));
    expect_placed((argument, bounds), shape, like)
}
