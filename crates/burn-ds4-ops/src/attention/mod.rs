//! Building blocks of DeepSeek-V4's attention: partial rotary embedding, KV pooling, indexer scores and sink attention.
//!
//! Masks are additive f32 biases: 0 where a key may be seen, [`MASKED`] where it may not.
//!
//! # Few tokens
//!
//! Up to [`FEW_TOKENS`] tokens of all sequences together, the result of a token has the same bits whatever other tokens there are;
//! so has that of [`pool`] for every block. Where there is a kernel, it does not depend either on the rows that are hidden from the
//! token behind those that it sees, and [`index_scores`] do not depend on other tokens, however many there are.

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
use backend::{AttentionOps, BlockSight};
pub use cached::{
    CachedQueries, CachedRows, CachedWindow, NewRows, Positions, append_rows, cached_attention,
};
pub use compress::{
    CONTENT_BLOCK, CompressionInputs, CompressionOptions, CompressorState, RowRounding,
    compress_rows,
};
pub use step::{LowRankQueries, StepCompression, StepRows, StoredStep, store_step};

/// Bias of a key that may not be seen. Finite, so that no infinity enters the arithmetic: `exp(MASKED - m)` is 0 for any real
/// maximum `m`.
pub const MASKED: f32 = -1e30;

/// Tokens, all sequences of a batch together, up to which results do not depend on their number.
pub const FEW_TOKENS: usize = INVARIANT_ROWS;

/// What is biased by less is hidden.
const HIDDEN: f32 = MASKED / 2.0;
/// Below any sum of a softmax: its largest term is 1.
const TINY: f32 = 1e-30;

/// Keys of the sliding window of [`sink_attention`].
#[derive(Clone, Debug)]
pub struct WindowKeys {
    /// The rows, used as keys and as values: `[batch, columns, width]`. The last of them are those of the queries, in their order.
    pub rows: Tensor<3>,
    /// Visibility of each row to every query that has it in its span: f32 `[batch, columns]`.
    pub bias: Tensor<2>,
    /// Rows that a query sees: its own, and those right before it.
    pub span: usize,
}

/// Keys of the compressed part of [`sink_attention`].
#[derive(Clone, Debug)]
pub struct CompressedKeys {
    /// The rows, used as keys and as values: `[batch, rows, width]`.
    pub rows: Tensor<3>,
    /// Visibility of each row to each query: f32 `[batch, queries, rows]`.
    pub bias: Tensor<3>,
    /// The rows that each query sees, if not all: any integer, `[batch, queries, picks]`. One that is out of range is none.
    pub picks: Option<Tensor<3, Int>>,
}

impl CompressedKeys {
    /// Rows that a query sees or picks.
    fn seen(&self) -> usize {
        match &self.picks {
            None => self.rows.dims()[1],
            Some(picks) => picks.dims()[2],
        }
    }
}

/// Rotates the trailing channels of `x` by per-position angles, in interleaved pairs `(2i, 2i + 1)`.
///
/// # Shapes and dtypes
///
/// - `x`: `[batch, positions, heads, width]`, f32 / f16 / bf16
/// - `cos`, `sin`: `[batch, positions, rotated]`, f32, the value of pair `i` at channels `2i` and `2i + 1`, with `sin` negated at `2i`
/// - output: like `x`, its first `width - rotated` channels unchanged
///
/// Rotation by the opposite angle is the same call with `-sin`.
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit, or `rotated` is odd or larger than `width`.
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

/// [`rotate`] by the angles of positions that follow on each other, which are looked up in a table where `x` is.
///
/// # Shapes and dtypes
///
/// - `x`: `[batch, count, heads, width]`, f32 / f16 / bf16
/// - `angles`: `[positions, rotated]`, f32: for each position the cosines of its `rotated / 2` pairs, then their sines
/// - `start`: the position of the first row of each sequence, `[batch]`, i32, i64 or u32; row `i` is at position `start + i`
/// - `inverse`: whether pairs turn by the opposite angle
/// - output: like `x`, its first `width - rotated` channels unchanged
///
/// A start that is negative counts as 0; such a sequence is one that is not there. A position beyond the table is an error where the
/// device's memory is the host's; elsewhere, where telling would take reading it back, it has the angles of the table's last one.
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit, `rotated` is odd or larger than `width`, the table has no positions and,
/// where the device's memory is the host's, for a position beyond it.
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
    validation::expect_start(&start, batch, ("x", &device))?;
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

/// Pools the slots of each block: `Σ_slot softmax_slot(scores) ⊙ values`, separately for every channel.
///
/// # Shapes and dtypes
///
/// - `values`, `scores`: `[batch, blocks, slots, width]`, f32 / f16 / bf16, both the same; the arithmetic is f32
/// - output: `[batch, blocks, width]`, the same dtype; zeros where there are no slots
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit.
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

/// Blocks of `ratio` positions as queries at positions from `start` on see them: those that are complete there.
#[derive(Clone, Debug)]
pub struct VisibleBlocks {
    /// The position of the first query of each sequence: `[batch]`, i32, i64 or u32. A sequence with a negative one sees nothing.
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
/// - `visible`: the rows, each of which is a block, that have a score; the others, which are not looked at, get [`MASKED`], where there are heads
///   and channels: without, all scores are 0
/// - output: `[batch, queries, rows]`, f32; products and sums are f32 whatever the dtype of the inputs
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit, blocks are of no positions or `scale` is not finite.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `Indexer.forward`.
pub fn index_scores(
    queries: Tensor<4>,
    keys: Tensor<3>,
    weights: Tensor<3>,
    scale: f64,
    visible: Option<VisibleBlocks>,
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
        validation::expect_start(start, batch, ("queries", &queries.device()))?;
        if *ratio == 0 {
            return Err(invalid("visible.ratio", "at least 1", 0));
        }
    }
    let shape = [batch, count, rows];
    if heads == 0 || width == 0 || shape.contains(&0) {
        return Ok(Tensor::zeros(shape, (&queries.device(), DType::F32)));
    }
    let sight = match visible {
        None => BlockSight::All,
        Some(VisibleBlocks { start, ratio }) => BlockSight::From {
            start: start.into_dispatch(),
            ratio,
        },
    };
    Ok(Tensor::from_dispatch(Dispatch::index_scores(
        queries.into_dispatch(),
        keys.into_dispatch(),
        weights.into_dispatch(),
        scale,
        sight,
    )))
}

/// Attention of all heads over one shared key/value row per position, with a learned sink.
///
/// One softmax runs over the rows of the window, the compressed rows and the sink; the sink's share is dropped.
///
/// # Shapes and dtypes
///
/// - `queries`: `[batch, queries, heads, width]`, f32 / f16 / bf16
/// - `window`: query `i` of a sequence sees `span` rows, the last but `queries - 1 - i` of the sequence's among them
/// - `compressed`: as [`CompressedKeys`] says; rows of both parts have the dtype of `queries`
/// - `sinks`: `[heads]`, f32, in logit units
/// - output: like `queries`
///
/// Logits, softmax and its sum are f32 whatever the dtype of the inputs.
///
/// # Special values
///
/// A sink of `-inf` takes no share; what one that is NaN or `inf` does is a device's own. A query that sees nothing gives zeros. A NaN or
/// an infinity in a query reaches its own head only; one in a row, what sees the row. What is hidden must be finite.
///
/// # Kernels
///
/// On CubeCL devices there is a kernel for [few](self#few-tokens) queries, of up to 1024 channels. For more queries it is matrix
/// products, in which f16 and bf16 logits and shares are rounded to these.
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit, the span is none or longer than the rows before the first query allow,
/// or `scale` is not finite.
///
/// # Source
///
/// DeepSeek-V4 `inference/kernel.py`, `sparse_attn_kernel`.
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

/// The shares by which [`sink_attention`] weighs rows, to look at: computed in f32, in plain tensor operations on every device.
///
/// Takes the same arguments. Columns of the output are all rows of the window, then the compressed rows or picks:
/// f32 `[batch, queries, heads, columns]`.
///
/// # Errors
///
/// As [`sink_attention`].
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
    let columns = columns + compressed.as_ref().map_or(0, CompressedKeys::seen);
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
