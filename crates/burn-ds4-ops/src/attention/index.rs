//! Scores of the lightning indexer.

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use super::args::{BlockVisibility, IndexInputs, QueryRotation};
use super::backend::AttentionOps;
use super::pages::PagedRows;
use super::rows::Positions;
use super::validation::expect_scale;
use crate::OpError;
use crate::validation::{Accepted, F32, INTEGERS, expect_float, expect_positive, expect_tensor};

/// Limits the blocks of `ratio` positions that are visible to queries: those that are complete at
/// the position of the query.
#[derive(Clone, Debug)]
pub struct VisibleBlocks {
    /// The position of the first query of each sequence: `[batch]`, i32, i64 or u32, no more than
    /// 2^30. Nothing is visible to a sequence with a negative one.
    pub start: Tensor<1, Int>,
    /// Positions of a block.
    pub ratio: usize,
}

/// Scores of the lightning indexer: `scale · Σ_head weights · relu(queries · key)`.
///
/// # Shapes and dtypes
///
/// - `queries`: `[batch, queries, heads, width]`, f32 / f16 / bf16
/// - `keys`: `[batch, rows, width]` or [in pages](PagedRows), the same dtype
/// - `weights`: `[batch, queries, heads]`, f32
/// - `visible`: the rows that get a score, each of which stands for a block. Other rows are not
///   read and get [`MASKED`](super::MASKED). Without heads or channels, all scores are 0
/// - `rotation`: positions by which [`rotate_at`] is to rotate `queries` before they score rows,
///   rounded to their dtype. Where few of 16 bits score few rows on tensor cores, that takes no
///   launch of its own
/// - output: `[batch, queries, rows]`, f32; products and sums are f32 whatever the dtype of the
///   inputs
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit, blocks are of no positions or
/// `scale` is not finite; and as [`rotate_at`] for `rotation`.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `Indexer.forward`.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::attention::index_scores;
///
/// let device = Device::flex();
/// let queries = Tensor::<4>::from_data([[[[1.0, 0.0]]]], &device);
/// let keys = Tensor::<3>::from_data([[[3.0, 1.0], [-2.0, 5.0]]], &device);
/// let weights = Tensor::<3>::from_data([[[2.0]]], &device);
/// let scores = index_scores(queries, keys, weights, 0.5, None, None)?;
/// scores.into_data().assert_eq(&TensorData::from([[[3.0_f32, 0.0]]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
///
/// [`rotate_at`]: super::rotate_at
#[doc(alias = "lightning_indexer")]
pub fn index_scores(
    queries: Tensor<4>,
    keys: impl Into<PagedRows>,
    weights: Tensor<3>,
    scale: f64,
    visible: Option<VisibleBlocks>,
    rotation: Option<Positions>,
) -> Result<Tensor<3>, OpError> {
    expect_float("queries", &queries)?;
    expect_scale(scale)?;
    let like = ("queries", &queries.device());
    let dtype: Accepted = ("that of `queries`", &[queries.dtype()]);
    let [batch, count, heads, width] = queries.dims();
    let keys = keys.into();
    keys.check("keys", dtype, [batch, width], like)?;
    expect_tensor(("weights", &weights), F32, [batch, count, heads], like)?;
    if let Some(VisibleBlocks { start, ratio }) = &visible {
        expect_tensor(("visible.start", start), INTEGERS, [batch], like)?;
        expect_positive([("visible.ratio", *ratio)])?;
    }
    if let Some(rotation) = &rotation {
        rotation.check(batch, count, width, like)?;
    }
    let shape = [batch, count, keys.count()];
    if heads == 0 || width == 0 || shape.contains(&0) {
        return Ok(Tensor::zeros(shape, (&queries.device(), DType::F32)));
    }
    let visibility = match visible {
        None => BlockVisibility::All,
        Some(VisibleBlocks { start, ratio }) => BlockVisibility::From {
            start: start.into_dispatch(),
            ratio,
        },
    };
    Ok(Tensor::from_dispatch(Dispatch::index_scores(IndexInputs {
        queries: queries.into_dispatch(),
        keys: keys.into(),
        weights: weights.into_dispatch(),
        scale,
        visibility,
        rotation: rotation.into(),
    })))
}

impl From<Option<Positions>> for QueryRotation<Dispatch> {
    /// A table of no channels rotates nothing.
    fn from(positions: Option<Positions>) -> Self {
        match positions.filter(|positions| positions.angles.dims()[1] > 0) {
            None => Self::None,
            Some(Positions { angles, start }) => Self::At {
                angles: angles.into_dispatch(),
                start: start.into_dispatch(),
            },
        }
    }
}
