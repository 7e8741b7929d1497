//! Building blocks of DeepSeek-V4's attention: partial rotary embedding, KV pooling, indexer scores
//! and sink attention.
//!
//! Masks are additive f32 biases: 0 where a key is visible, [`MASKED`] where it is hidden.
//!
//! # Row invariance
//!
//! With up to [`DECODE_TOKENS`] tokens in all sequences together, the result of a token has the
//! same bits whatever other tokens there are; so has that of [`pool`] for every block. Where there
//! is a kernel, the result does not depend either on rows that are hidden from the token and come
//! after all visible ones, and [`index_scores`] do not depend on other tokens, however many there
//! are. Where the device's memory is the host's, the same is true of [`cached_attention`], and of
//! [`index_scores`] with visible blocks: so a text has the same bits in a cache of any capacity.

mod backend;
mod cached;
mod compress;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
mod reference;
mod step;
mod validation;

use burn::backend::Dispatch;
use burn::tensor::{DType, FloatDType, Int, Tensor};

use crate::OpError;
use crate::matmul::INVARIANT_ROWS;
use crate::validation::{expect_device, expect_dtype, expect_float, expect_shape, invalid};
use backend::{AttentionOps, BlockVisibility};
pub use cached::{
    CachedQueries, CachedRows, CachedWindow, NewRows, Positions, WindowLayout, append_rows,
    cached_attention,
};
pub use compress::{
    CONTENT_BLOCK, CompressionInputs, CompressionOptions, CompressorState, RowRounding,
    compress_rows,
};
pub use step::{LowRankQueries, StepCompression, StepRows, StoredStep, store_step};

/// Bias of a hidden key. It is finite, so that no infinity enters the arithmetic: `exp(MASKED - m)`
/// is 0 for any real maximum `m`.
pub const MASKED: f32 = -1e30;

/// The most tokens, in all sequences of a batch together, for which results are row-invariant.
/// Kernels for decoding take up to as many.
pub const DECODE_TOKENS: usize = INVARIANT_ROWS;

/// A key with a bias below this is hidden.
const HIDDEN_BELOW: f32 = MASKED / 2.0;
/// Less than any sum of a softmax, whose largest term is 1.
const TINY: f32 = 1e-30;

/// Keys of the sliding window of [`sink_attention`].
#[derive(Clone, Debug)]
pub struct WindowKeys {
    /// The rows, used as keys and as values: `[batch, columns, width]`. The last ones are those of
    /// the queries, in their order.
    pub rows: Tensor<3>,
    /// Bias of each row, for all queries that have it in their span: f32 `[batch, columns]`.
    pub bias: Tensor<2>,
    /// Rows that a query attends to: its own, and those right before it.
    pub span: usize,
}

/// Keys of the compressed part of [`sink_attention`].
#[derive(Clone, Debug)]
pub struct CompressedKeys {
    /// The rows, used as keys and as values: `[batch, rows, width]`.
    pub rows: Tensor<3>,
    /// Bias of each row, for each query: f32 `[batch, queries, rows]`.
    pub bias: Tensor<3>,
    /// The rows that each query attends to, if not all: any integer, `[batch, queries, picks]`. A
    /// pick that is out of range is ignored.
    pub picks: Option<Tensor<3, Int>>,
}

impl CompressedKeys {
    /// Rows that a query attends to or picks.
    fn selected(&self) -> usize {
        match &self.picks {
            None => self.rows.dims()[1],
            Some(picks) => picks.dims()[2],
        }
    }
}

/// Rotates the trailing channels of `x` by per-position angles, in interleaved pairs `(2i, 2i +
/// 1)`.
///
/// # Shapes and dtypes
///
/// - `x`: `[batch, positions, heads, width]`, f32 / f16 / bf16
/// - `cos`, `sin`: `[batch, positions, rotated]`, f32, the value of pair `i` at channels `2i` and
///   `2i + 1`, with `sin` negated at `2i`
/// - output: like `x`, its first `width - rotated` channels unchanged
///
/// Rotation by the opposite angle is the same call with `-sin`.
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit, or `rotated` is odd or larger than
/// `width`.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::attention::rotate;
///
/// let device = Device::flex();
/// let x = Tensor::<4>::from_data([[[[1.0, 2.0, 3.0, 4.0]]]], &device);
/// // The last pair by 90 degrees.
/// let cos = Tensor::<3>::from_data([[[0.0, 0.0]]], &device);
/// let sin = Tensor::<3>::from_data([[[-1.0, 1.0]]], &device);
/// let y = rotate(x, cos, sin)?;
/// y.into_data().assert_eq(&TensorData::from([[[[1.0_f32, 2.0, -4.0, 3.0]]]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "rope")]
pub fn rotate(x: Tensor<4>, cos: Tensor<3>, sin: Tensor<3>) -> Result<Tensor<4>, OpError> {
    expect_float("x", &x)?;
    let [batch, positions, _, width] = x.dims();
    let [_, _, rotated] = cos.dims();
    validation::expect_rotated(rotated, width)?;
    for (argument, angles) in [("cos", &cos), ("sin", &sin)] {
        expect_dtype(argument, "F32", angles, &[DType::F32])?;
        expect_shape(argument, angles.dims(), [batch, positions, rotated])?;
        expect_device(argument, &angles.device(), "x", &x.device())?;
    }
    if rotated == 0 || x.dims().contains(&0) {
        return Ok(x);
    }
    Ok(Tensor::from_dispatch(Dispatch::rotate(
        x.into_dispatch(),
        cos.into_dispatch(),
        sin.into_dispatch(),
    )))
}

/// [`rotate`] by the angles of consecutive positions, which it looks up in a table on the device of
/// `x`.
///
/// # Shapes and dtypes
///
/// - `x`: `[batch, count, heads, width]`, f32 / f16 / bf16
/// - `angles`: `[positions, rotated]`, f32: for each position the cosines of its `rotated / 2`
///   pairs, then their sines
/// - `start`: the position of the first row of each sequence, `[batch]`, i32, i64 or u32; row `i`
///   is at position `start + i`
/// - `inverse`: whether pairs are rotated by the opposite angle
/// - output: like `x`, its first `width - rotated` channels unchanged
///
/// A negative start counts as 0; such a sequence is vacant. A position beyond the table is an error
/// where the device's memory is the host's; elsewhere, where checking would mean to read it back,
/// it has the angles of the table's last position.
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit, `rotated` is odd or larger than
/// `width`, the table has no positions and, where the device's memory is the host's, for a position
/// beyond it.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor, TensorData};
/// use burn_ds4_ops::attention::rotate_at;
///
/// let device = Device::flex();
/// // One pair. Nothing at position 0, a quarter turn at position 1: cosine, sine.
/// let angles = Tensor::<2>::from_data([[1.0, 0.0], [0.0, 1.0]], &device);
/// let x = Tensor::<4>::from_data([[[[9.0, 2.0, 3.0]]]], &device);
/// let start = Tensor::<1, Int>::from_data([1], &device);
/// let rotated = rotate_at(x, angles, start, false)?;
/// rotated.into_data().assert_eq(&TensorData::from([[[[9.0_f32, -3.0, 2.0]]]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn rotate_at(
    x: Tensor<4>,
    angles: Tensor<2>,
    start: Tensor<1, Int>,
    inverse: bool,
) -> Result<Tensor<4>, OpError> {
    expect_float("x", &x)?;
    let [batch, count, _, width] = x.dims();
    let [known, rotated] = angles.dims();
    let device = x.device();
    validation::expect_rotated(rotated, width)?;
    expect_dtype("angles", "F32", &angles, &[DType::F32])?;
    expect_device("angles", &angles.device(), "x", &device)?;
    validation::expect_start(("start", &start), batch, ("x", &device))?;
    if rotated == 0 || x.dims().contains(&0) {
        return Ok(x);
    }
    validation::expect_known(&start, count, known)?;
    Ok(Tensor::from_dispatch(Dispatch::rotate_at(
        x.into_dispatch(),
        angles.into_dispatch(),
        start.into_dispatch(),
        inverse,
    )))
}

/// Pools the slots of each block: `Σ_slot softmax_slot(scores) ⊙ values`, separately for every
/// channel.
///
/// # Shapes and dtypes
///
/// - `values`, `scores`: `[batch, blocks, slots, width]`, f32 / f16 / bf16, both the same; the
///   arithmetic is f32
/// - output: `[batch, blocks, width]`, the same dtype; zeros where there are no slots
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::attention::pool;
///
/// let device = Device::flex();
/// // One block of two slots, whose scores are alike, and two channels.
/// let values = Tensor::<4>::from_data([[[[1.0, 10.0], [3.0, 30.0]]]], &device);
/// let pooled = pool(values.clone(), values.zeros_like())?;
/// pooled.into_data().assert_eq(&TensorData::from([[[2.0_f32, 20.0]]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn pool(values: Tensor<4>, scores: Tensor<4>) -> Result<Tensor<3>, OpError> {
    expect_float("values", &values)?;
    expect_dtype("scores", "that of `values`", &scores, &[values.dtype()])?;
    expect_shape("scores", scores.dims(), values.dims())?;
    expect_device("scores", &scores.device(), "values", &values.device())?;
    let [batch, blocks, slots, width] = values.dims();
    let shape = [batch, blocks, width];
    if slots == 0 || shape.contains(&0) {
        return Ok(Tensor::zeros(shape, (&values.device(), values.dtype())));
    }
    Ok(Tensor::from_dispatch(Dispatch::pool(
        values.into_dispatch(),
        scores.into_dispatch(),
    )))
}

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
/// - `keys`: `[batch, rows, width]`, the same dtype
/// - `weights`: `[batch, queries, heads]`, f32
/// - `visible`: the rows that get a score, each of which stands for a block. Other rows are not
///   read and get [`MASKED`]. Without heads or channels, all scores are 0
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
#[doc(alias = "lightning_indexer")]
pub fn index_scores(
    queries: Tensor<4>,
    keys: Tensor<3>,
    weights: Tensor<3>,
    scale: f64,
    visible: Option<VisibleBlocks>,
    rotation: Option<Positions>,
) -> Result<Tensor<3>, OpError> {
    expect_float("queries", &queries)?;
    validation::expect_scale(scale)?;
    expect_dtype("keys", "that of `queries`", &keys, &[queries.dtype()])?;
    expect_dtype("weights", "F32", &weights, &[DType::F32])?;
    let [batch, count, heads, width] = queries.dims();
    let [_, rows, _] = keys.dims();
    expect_shape("keys", keys.dims(), [batch, rows, width])?;
    expect_shape("weights", weights.dims(), [batch, count, heads])?;
    expect_device("keys", &keys.device(), "queries", &queries.device())?;
    expect_device("weights", &weights.device(), "queries", &queries.device())?;
    if let Some(VisibleBlocks { start, ratio }) = &visible {
        let like = ("queries", &queries.device());
        validation::expect_start(("visible.start", start), batch, like)?;
        if *ratio == 0 {
            return Err(invalid("visible.ratio", "at least 1", 0));
        }
    }
    if let Some(rotation) = &rotation {
        rotation.check(batch, count, width, ("queries", &queries.device()))?;
    }
    let shape = [batch, count, rows];
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
    Ok(Tensor::from_dispatch(Dispatch::index_scores(
        queries.into_dispatch(),
        keys.into_dispatch(),
        weights.into_dispatch(),
        scale,
        visibility,
        rotation.into(),
    )))
}

/// Attention of all heads over one shared key/value row per position, with a learned sink.
///
/// One softmax runs over the rows of the window, the compressed rows and the sink. The sink takes
/// weight from the rows, but has no value.
///
/// # Shapes and dtypes
///
/// - `queries`: `[batch, queries, heads, width]`, f32 / f16 / bf16
/// - `window`: query `i` of a sequence attends to `span` rows, which end `queries - 1 - i` rows
///   before the last
/// - `compressed`: as [`CompressedKeys`] says; rows of both parts have the dtype of `queries`
/// - `sinks`: `[heads]`, f32, in logit units
/// - output: like `queries`
///
/// Logits, softmax and its sum are f32 whatever the dtype of the inputs.
///
/// # Special values
///
/// A sink of `-inf` takes no weight; the effect of one that is NaN or `inf` depends on the device.
/// A query to which nothing is visible gives zeros. A NaN or an infinity in a query reaches its own
/// head only; one in a row reaches the queries that attend to the row. Hidden rows must be finite.
///
/// # Kernels
///
/// On CubeCL devices there is a kernel for up to [`DECODE_TOKENS`] queries in all sequences
/// together, of up to 1024 channels. For more queries of f16 or bf16 there is one for tensor cores,
/// of 64 to 512 channels in steps of 64, in which weights are rounded to the dtype of the inputs.
/// Others take matrix products, in which logits are, too.
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit, the span is none or longer than the
/// rows before the first query allow, or `scale` is not finite.
///
/// # Source
///
/// DeepSeek-V4 `inference/kernel.py`, `sparse_attn_kernel`.
///
/// # Example
///
/// Two rows and the sink have the same logit, so that each has a third of the weight.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData, Tolerance};
/// use burn_ds4_ops::attention::{WindowKeys, sink_attention};
///
/// let device = Device::flex();
/// let queries = Tensor::<4>::zeros([1, 1, 1, 2], &device);
/// let window = WindowKeys {
///     rows: Tensor::from_data([[[3.0, 0.0], [0.0, 6.0]]], &device),
///     bias: Tensor::zeros([1, 2], &device),
///     span: 2,
/// };
/// let sinks = Tensor::<1>::zeros([1], &device);
/// let output = sink_attention(queries, window, None, sinks, 1.0)?;
/// let expected = TensorData::from([[[[1.0_f32, 2.0]]]]);
/// output.into_data().assert_approx_eq::<f32>(&expected, Tolerance::default());
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "sparse_attn")]
pub fn sink_attention(
    queries: Tensor<4>,
    window: WindowKeys,
    compressed: Option<CompressedKeys>,
    sinks: Tensor<1>,
    scale: f64,
) -> Result<Tensor<4>, OpError> {
    let compressed = validation::check_keys(&queries, &window, compressed, &sinks, scale)?;
    if queries.dims().contains(&0) {
        return Ok(queries);
    }
    Ok(Tensor::from_dispatch(Dispatch::sink_attention(
        queries.into_dispatch(),
        window.rows.into_dispatch(),
        window.bias.into_dispatch(),
        compressed.into(),
        sinks.into_dispatch(),
        window.span,
        scale,
    )))
}

/// The weights that [`sink_attention`] gives to rows, for inspection: computed in f32, in plain
/// tensor operations on every device.
///
/// Takes the same arguments. Columns of the output are all rows of the window, then the compressed
/// rows or picks: f32 `[batch, queries, heads, columns]`.
///
/// # Errors
///
/// As [`sink_attention`].
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData, Tolerance};
/// use burn_ds4_ops::attention::{WindowKeys, sink_probabilities};
///
/// let device = Device::flex();
/// let window = WindowKeys {
///     rows: Tensor::from_data([[[2.0_f32.ln(), 0.0], [0.0, 0.0]]], &device),
///     bias: Tensor::zeros([1, 2], &device),
///     span: 2,
/// };
/// let queries = Tensor::<4>::from_data([[[[1.0, 0.0]]]], &device);
/// let weights = sink_probabilities(queries, window, None, Tensor::zeros([1], &device), 1.0)?;
/// // Exponentials of 2 and 1 for the rows, and 1 for the sink.
/// let expected = TensorData::from([[[[0.5_f32, 0.25]]]]);
/// weights.into_data().assert_approx_eq::<f32>(&expected, Tolerance::default());
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn sink_probabilities(
    queries: Tensor<4>,
    window: WindowKeys,
    compressed: Option<CompressedKeys>,
    sinks: Tensor<1>,
    scale: f64,
) -> Result<Tensor<4>, OpError> {
    let compressed = validation::check_keys(&queries, &window, compressed, &sinks, scale)?;
    let [batch, count, heads, width] = queries.dims();
    let [_, columns, _] = window.rows.dims();
    let columns = columns + compressed.as_ref().map_or(0, CompressedKeys::selected);
    let shape = [batch, count, heads, columns];
    if width == 0 || shape.contains(&0) {
        return Ok(Tensor::zeros(shape, (&queries.device(), DType::F32)));
    }
    let compressed = compressed.map(|keys| CompressedKeys {
        rows: keys.rows.cast(FloatDType::F32),
        ..keys
    });
    Ok(Tensor::from_dispatch(Dispatch::sink_probabilities(
        (queries.cast(FloatDType::F32) * scale).into_dispatch(),
        window.rows.cast(FloatDType::F32).into_dispatch(),
        window.bias.into_dispatch(),
        compressed.into(),
        sinks.into_dispatch(),
        window.span,
        columns,
    )))
}
