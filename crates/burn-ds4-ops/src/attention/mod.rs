//! Building blocks of DeepSeek-V4's attention: partial rotary embedding, KV pooling, indexer scores and sink attention.
//!
//! Masks are additive f32 biases: 0 where a key may be seen, [`MASKED`] where it may not.

mod reference;

use burn::tensor::Tensor;

/// Bias of a key that may not be seen. Finite, so that no infinity enters the arithmetic: `exp(MASKED - m)` is 0 for any real
/// maximum `m`.
pub const MASKED: f32 = -1e30;

/// Keys of the compressed part of [`sink_attention`].
#[derive(Clone, Debug)]
pub enum CompressedKeys {
    /// All queries of a sequence see the same rows: rows `[batch, rows, width]`, bias `[batch, queries, rows]`.
    Shared {
        /// The rows, used as keys and as values.
        rows: Tensor<3>,
        /// Visibility of each row to each query.
        bias: Tensor<3>,
    },
    /// Every query has its own rows: rows `[batch · queries, picks, width]`, bias `[batch, queries, picks]`.
    PerQuery {
        /// The rows, used as keys and as values.
        rows: Tensor<3>,
        /// Visibility of each row to its query.
        bias: Tensor<3>,
    },
}

/// Output of [`sink_attention`].
#[derive(Clone, Debug)]
pub struct AttentionOutput {
    /// Weighted values: `[batch, queries, heads, width]`.
    pub output: Tensor<4>,
    /// Attention probabilities, window columns then compressed columns: `[batch, queries, heads, columns]`.
    pub probabilities: Tensor<4>,
}

/// Rotates the trailing channels of `x` by per-position angles, in interleaved pairs `(2i, 2i + 1)`.
///
/// # Shapes and dtypes
///
/// - `x`: `[batch, positions, heads, width]`
/// - `cos`, `sin`: `[batch, positions, rotated]`, the value of pair `i` at channels `2i` and `2i + 1`, with `sin` negated at `2i`
/// - output: like `x`, its first `width - rotated` channels unchanged
///
/// Rotation by the opposite angle is the same call with `-sin`.
///
/// # Panics
///
/// If `rotated` is odd or larger than `width`.
pub fn rotate(x: Tensor<4>, cos: Tensor<3>, sin: Tensor<3>) -> Tensor<4> {
    let [_, _, _, width] = x.dims();
    let [_, _, rotated] = cos.dims();
    assert!(
        rotated.is_multiple_of(2) && rotated <= width,
        "rotate: the number of rotated channels must be even and at most {width}, got {rotated}"
    );
    reference::rotate(x, cos, sin)
}

/// Pools the slots of each block: `Σ_slot softmax_slot(scores) ⊙ values`, separately for every channel.
///
/// # Shapes
///
/// - `values`, `scores`: `[batch, blocks, slots, width]`
/// - output: `[batch, blocks, width]`
pub fn pool(values: Tensor<4>, scores: Tensor<4>) -> Tensor<3> {
    reference::pool(values, scores)
}

/// Scores of the lightning indexer: `Σ_head weights · relu(queries · key)`.
///
/// # Shapes
///
/// - `queries`: `[batch, queries, heads, width]`
/// - `keys`: `[batch, rows, width]`
/// - `weights`: `[batch, queries, heads]`
/// - output: `[batch, queries, rows]`
pub fn index_scores(queries: Tensor<4>, keys: Tensor<3>, weights: Tensor<3>) -> Tensor<3> {
    reference::index_scores(queries, keys, weights)
}

/// Attention of all heads over one shared key/value row per position, with a learned sink.
///
/// One softmax runs over the window columns, the compressed columns and the sink; the sink's share is dropped.
///
/// # Shapes and dtypes
///
/// - `queries`: `[batch, queries, heads, width]`
/// - `window`: `[batch, columns, width]`, keys and values at once
/// - `window_bias`: `[batch, queries, columns]`, f32
/// - `sinks`: `[heads]`, f32, in logit units
///
/// Logits, softmax and its sum are f32 whatever the dtype of the inputs; the output has the dtype of `queries`.
///
/// # Source
///
/// DeepSeek-V4 `inference/kernel.py`, `sparse_attn_kernel`.
pub fn sink_attention(
    queries: Tensor<4>,
    window: Tensor<3>,
    window_bias: Tensor<3>,
    compressed: Option<CompressedKeys>,
    sinks: Tensor<1>,
    scale: f64,
) -> AttentionOutput {
    reference::sink_attention(queries, window, window_bias, compressed, sinks, scale)
}
