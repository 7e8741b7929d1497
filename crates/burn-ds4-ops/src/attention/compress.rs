//! Compressed rows, as decoding makes them.

use burn::backend::Dispatch;
use burn::tensor::{Device, Int, Tensor};

use super::args::Compression;
use super::backend::AttentionOps;
use super::options::RowRounding;
use super::pages::PagedRows;
use super::rows::Positions;
use super::validation::{expect_rounding, latest};
use crate::OpError;
use crate::device::is_host;
use crate::validation::{
    F32, FLOATS, expect_float, expect_not_negative, expect_positive, expect_tensor, expect_value,
};

/// The inputs of [`compress_rows`] at the new positions of every sequence.
///
/// A compressed row has `width` channels. A raw row has `raw width`: twice as many, or four times
/// as many where blocks overlap.
#[derive(Clone, Debug)]
pub struct CompressionInputs {
    /// Projections of the positions, values then scores: f32 `[batch, count, raw width]`.
    pub projections: Tensor<3>,
    /// Added to the projections, by slot of the block: f32 `[ratio, raw width]`.
    pub bias: Tensor<2>,
    /// Weight of the norm: `[width]`, f32 / f16 / bf16.
    pub norm: Tensor<1>,
    /// Epsilon of the norm.
    pub epsilon: f64,
}

/// How [`compress_rows`] makes a row of a block. The `ratio`, the number of positions of a block,
/// follows from the bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompressionOptions {
    /// Whether a row also pools the positions of the block before its own.
    pub overlap: bool,
    /// How a row is rounded before it is stored.
    pub rounding: RowRounding,
}

/// The tensors that [`compress_rows`] takes and returns updated.
#[derive(Clone, Debug)]
pub struct CompressorState {
    /// Raw rows of the newest positions: f32 `[batch, slots, raw width]`.
    pub raw: Tensor<3>,
    /// Compressed rows: `[batch, rows, width]`, or those of all pages.
    pub rows: Tensor<3>,
}

/// Stores the projections of new positions, and a row for every block of positions that they
/// complete.
///
/// For each sequence, whose new positions are `start`, `start + 1`, ..., by `positions`:
///
/// - The raw row of a position is its projection plus the bias of its slot, `position % ratio`. It
///   is stored in slot `position % slots` of `raw`, which keeps the newest raw rows.
/// - A block is complete once its last position is one of the new ones. The raw rows of its
///   positions are then pooled ([`pool`](super::pool)). With overlap, channels form two series. A
///   row pools the first series of the previous block, if there is one, and the second series of
///   its own block. The channels of a raw row are the values of the first series, those of the
///   second, the scores of the first, and those of the second.
/// - The pooled row is normalised ([`rms_norm`](crate::norm::rms_norm)), rotated by the angles of
///   the first position of its block ([`rotate`](super::rotate)) and rounded as `options` say, all
///   in f32. It is stored in row `position / ratio` of `rows`, in their dtype.
///
/// Which blocks are complete is computed on the device. A sequence with a negative start is vacant:
/// neither of its tensors changes. Rows of blocks that are not complete do not change either.
///
/// `raw` (f32) and `rows` (f32 / f16 / bf16; with [pages](PagedRows), those of all pages) are taken
/// by value. Each is updated in place if there
/// is no other reference to it, and copied otherwise.
///
/// Positions beyond the angles or the rows are an error where the device's memory is the host's.
/// Elsewhere, where checking would mean to read them back, a sequence that starts beyond the angles
/// counts as vacant, and rows that do not fit are dropped.
///
/// # Special values
///
/// A NaN or an infinity reaches raw rows in its own channel, and the rows that pool it.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `Compressor.forward`.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, blocks or rows of nothing, fewer
/// slots than a block reads back (`ratio - 1`, `2 ratio - 1` with overlap, and 1), an odd number of
/// rotated channels or more than there are, a width that is no power of two with
/// [`RowRounding::Index`], an `epsilon` that is negative or NaN and, where the device's memory is
/// the host's, positions beyond the angles or the rows.
///
/// # Example
///
/// Positions 2 and 3 complete the second block of two.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::attention::{CompressionInputs, CompressionOptions, Positions, compress_rows};
///
/// let device = Device::flex();
/// let inputs = CompressionInputs {
///     // Two values and their scores, which are alike: the mean is [3, 3].
///     projections: Tensor::from_data([[[2.0, 0.0, 0.0, 0.0], [4.0, 6.0, 0.0, 0.0]]], &device),
///     bias: Tensor::zeros([2, 4], &device),
///     norm: Tensor::ones([2], &device),
///     epsilon: 0.0,
/// };
/// // The first position of the block, 2, turns by 90 degrees.
/// let angles = Tensor::from_data([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], &device);
/// let positions = Positions { angles, start: Tensor::from_data([2], &device) };
/// let (raw, rows) = (Tensor::zeros([1, 2, 4], &device), Tensor::zeros([1, 2, 2], &device));
/// let state = compress_rows(inputs, positions, CompressionOptions::default(), raw, rows)?;
/// let expected = TensorData::from([[[0.0_f32, 0.0], [-1.0, 1.0]]]);
/// state.rows.into_data().assert_eq(&expected, true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn compress_rows(
    inputs: CompressionInputs,
    positions: Positions,
    options: CompressionOptions,
    raw: Tensor<3>,
    rows: impl Into<PagedRows>,
) -> Result<CompressorState, OpError> {
    let paged = rows.into();
    check_compress(&inputs, &positions, options, &raw, &paged)?;
    let PagedRows { rows, pages } = paged;
    let [batch, count, _] = inputs.projections.dims();
    if batch == 0 || count == 0 {
        return Ok(CompressorState { raw, rows });
    }
    let compression = Compression::new(inputs, positions, options, pages);
    let (raw, rows) =
        Dispatch::compress_rows(compression, raw.into_dispatch(), rows.into_dispatch());
    Ok(CompressorState {
        raw: Tensor::from_dispatch(raw),
        rows: Tensor::from_dispatch(rows),
    })
}

impl Compression<Dispatch> {
    pub(super) fn new(
        inputs: CompressionInputs,
        positions: Positions,
        options: CompressionOptions,
        pages: Option<Tensor<2, Int>>,
    ) -> Self {
        let [ratio, _] = inputs.bias.dims();
        Self {
            projections: inputs.projections.into_dispatch(),
            bias: inputs.bias.into_dispatch(),
            norm: inputs.norm.into_dispatch(),
            angles: positions.angles.into_dispatch(),
            start: positions.start.into_dispatch(),
            pages: pages.into(),
            epsilon: inputs.epsilon,
            ratio,
            overlap: options.overlap,
            rounding: options.rounding,
        }
    }
}

pub(super) fn check_compress(
    inputs: &CompressionInputs,
    positions: &Positions,
    options: CompressionOptions,
    raw: &Tensor<3>,
    paged: &PagedRows,
) -> Result<(), OpError> {
    let [batch, count, _] = inputs.projections.dims();
    let [ratio, _] = inputs.bias.dims();
    let rows = &paged.rows;
    let ([_, _, width], available) = (rows.dims(), paged.count());
    let device = rows.device();
    expect_float("rows", rows)?;
    expect_positive([("columns of rows", width), ("rows", available)])?;
    let like = ("rows", &device);
    check_pool(inputs, positions, options.overlap, raw, (width, like))?;
    paged.check("rows", FLOATS, [batch, width], like)?;
    expect_rounding("columns of rows", options.rounding, width)?;
    if batch == 0 || count == 0 {
        return Ok(());
    }
    check_complete(positions, (ratio, count), available)
}

/// Checks that `count` new positions complete no more blocks of `ratio` than there are rows, where
/// the device's memory is the host's.
pub(super) fn check_complete(
    positions: &Positions,
    (ratio, count): (usize, usize),
    available: usize,
) -> Result<(), OpError> {
    if !is_host(&positions.start.device()) {
        return Ok(());
    }
    let complete = |start: usize| (start + count) / ratio;
    let blocks = latest(&positions.start).map_or(0, complete);
    let expected = format_args!("at most {available}, the rows that there are");
    expect_value(blocks <= available, "complete blocks", blocks, expected)
}

/// Checks what rows of so many columns are pooled of.
pub(super) fn check_pool(
    inputs: &CompressionInputs,
    positions: &Positions,
    overlap: bool,
    raw: &Tensor<3>,
    (width, like): (usize, (&'static str, &Device)),
) -> Result<(), OpError> {
    let [batch, count, raw_width] = inputs.projections.dims();
    let [ratio, _] = inputs.bias.dims();
    let [_, slots, _] = raw.dims();
    let series = 1 + usize::from(overlap);
    expect_positive([("rows of bias", ratio), ("columns of norm", width)])?;
    let shape = [batch, count, 2 * series * width];
    expect_tensor(("projections", &inputs.projections), F32, shape, like)?;
    expect_tensor(("bias", &inputs.bias), F32, [ratio, raw_width], like)?;
    expect_tensor(("norm", &inputs.norm), FLOATS, [width], like)?;
    expect_tensor(("raw", raw), F32, [batch, slots, raw_width], like)?;
    let history = (series * ratio - 1).max(1);
    let expected = format_args!("at least {history}, which blocks of {ratio} read back");
    expect_value(slots >= history, "slots of raw", slots, expected)?;
    expect_not_negative("epsilon", inputs.epsilon)?;
    positions.check(batch, count, width, like)
}
