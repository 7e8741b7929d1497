//! The two parts of [`compress_rows`](super::compress_rows): what is pooled may become more than
//! one row.

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

use super::args::Compression;
use super::compress::{CompressionInputs, CompressionOptions, check_complete, check_pool};
use super::options::RowRounding;
use super::pages::PagedRows;
use super::reference::{self, BlockRows};
use super::rows::Positions;
use super::validation::expect_rounding;
use crate::OpError;
use crate::validation::{FLOATS, expect_float, expect_positive, expect_tensor};

/// The result of [`pool_blocks`].
#[derive(Clone, Debug)]
pub struct PooledBlocks {
    /// The raw rows, updated.
    pub raw: Tensor<3>,
    /// A row of each block that the new positions may complete, from that of the first one on: f32
    /// `[batch, ceil(count / ratio), width]`. Rows of blocks that are not complete mean nothing.
    pub rows: Tensor<3>,
}

/// Stores the projections of new positions, and pools and normalises the blocks that they may
/// complete. [`store_blocks`] stores the rows of those that are complete.
///
/// Both together are [`compress_rows`](super::compress_rows), which says what they do. In between,
/// a row is neither rotated nor rounded: DeepSeek-V4.1 also makes the keys of its indexer of it.
/// They are plain tensor operations on every device.
///
/// # Errors
///
/// As [`compress_rows`](super::compress_rows), for what is passed here.
pub fn pool_blocks(
    inputs: CompressionInputs,
    positions: Positions,
    raw: Tensor<3>,
) -> Result<PooledBlocks, OpError> {
    let [batch, count, raw_width] = inputs.projections.dims();
    let [ratio, _] = inputs.bias.dims();
    let width = raw_width / 2;
    check_pool(
        &inputs,
        &positions,
        false,
        &raw,
        (width, ("raw", &raw.device())),
    )?;
    if batch == 0 || count == 0 {
        let shape = [batch, count.div_ceil(ratio), width];
        let rows = Tensor::zeros(shape, (&raw.device(), DType::F32));
        return Ok(PooledBlocks { raw, rows });
    }
    let inputs = Compression::new(inputs, positions, CompressionOptions::default(), None);
    let (raw, rows) = reference::pool_blocks::<Dispatch>(inputs, raw.into_dispatch());
    Ok(PooledBlocks {
        raw: Tensor::from_dispatch(raw),
        rows: Tensor::from_dispatch(rows),
    })
}

/// Rotates rows of blocks by the first position of each, rounds them as `rounding` says, and stores
/// those of blocks that `count` new positions complete, as [`compress_rows`](super::compress_rows)
/// does.
///
/// # Shapes and dtypes
///
/// - `new`: `[batch, ceil(count / ratio), width]`, f32 / f16 / bf16, for the block of the first new
///   position and those that follow
/// - `ratio`: positions of a block
/// - `rows`: `[batch, rows, width]` or [in pages](PagedRows), any of these dtypes; taken by value
///   and returned, updated
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, and where the device's memory is the
/// host's, positions beyond the angles or the rows.
///
/// # Example
///
/// Position 3 completes the second block of two.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::attention::{Positions, RowRounding, store_blocks};
///
/// let device = Device::flex();
/// let angles = Tensor::from_data([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], &device);
/// let positions = Positions { angles, start: Tensor::from_data([3], &device) };
/// let new = Tensor::from_data([[[1.0, 1.0]]], &device);
/// let rows = Tensor::<3>::zeros([1, 2, 2], &device);
/// let rows = store_blocks(new, positions, (2, 1), RowRounding::None, rows)?;
/// // The first position of the block, 2, turns by 90 degrees.
/// let expected = TensorData::from([[[0.0_f32, 0.0], [-1.0, 1.0]]]);
/// rows.into_data().assert_eq(&expected, true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn store_blocks(
    new: Tensor<3>,
    positions: Positions,
    (ratio, count): (usize, usize),
    rounding: RowRounding,
    rows: impl Into<PagedRows>,
) -> Result<Tensor<3>, OpError> {
    let paged = rows.into();
    let [batch, _, width] = new.dims();
    let like = ("new", &new.device());
    let available = paged.count();
    expect_float("new", &new)?;
    expect_positive([
        ("ratio", ratio),
        ("columns of new", width),
        ("rows", available),
    ])?;
    let shape = [batch, count.div_ceil(ratio), width];
    expect_tensor(("new", &new), FLOATS, shape, like)?;
    paged.check("rows", FLOATS, [batch, width], like)?;
    expect_rounding("columns of new", rounding, width)?;
    positions.check(batch, count, width, like)?;
    let PagedRows { rows, pages } = paged;
    if batch == 0 || count == 0 {
        return Ok(rows);
    }
    check_complete(&positions, (ratio, count), available)?;
    let blocks = BlockRows::<Dispatch> {
        angles: positions.angles.into_dispatch(),
        start: positions.start.into_dispatch(),
        pages: pages.into(),
        count,
        ratio,
        rounding,
    };
    let rows = blocks.store(rows.into_dispatch(), new.into_dispatch());
    Ok(Tensor::from_dispatch(rows))
}
