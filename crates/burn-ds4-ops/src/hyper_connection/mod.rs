//! Manifold-constrained hyper-connections (mHC): several residual streams, mixed around every sub-layer.
//!
//! A model keeps `n` streams of width `d` per token. Before a sub-layer they are collapsed into one input, after it the output
//! is spread over the streams, which are mixed with one another by a doubly stochastic matrix. All coefficients are functions
//! of the streams themselves.

mod reference;

use burn::tensor::Tensor;

/// Constants of the coefficients' computation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sinkhorn {
    /// Row and column normalisations of the mixing matrix, the softmax counted as the first.
    pub iterations: usize,
    /// Added to gates, matrix entries and sums (`hc_eps`).
    pub epsilon: f64,
    /// Epsilon of the RMS norm over all streams.
    pub norm_epsilon: f64,
}

/// The coefficients of one sub-layer: what [`coefficients`] returns.
#[derive(Clone, Debug)]
pub struct Coefficients {
    /// Weight of each stream in the sub-layer's input: `[tokens, n]`.
    pub pre: Tensor<2>,
    /// Weight of the sub-layer's output in each stream: `[tokens, n]`.
    pub post: Tensor<2>,
    /// Mixing matrix, rows are sources and columns targets: `[tokens, n, n]`.
    pub comb: Tensor<3>,
}

/// Computes the coefficients from the streams.
///
/// With `v` all streams of a token side by side and `m = function · v / rms(v)`:
/// `pre = sigmoid(m[..n]·scale + base) + eps`, `post = 2·sigmoid(..)`, and `comb` is the row softmax of the rest plus `eps`,
/// normalised over columns and then alternately over rows and columns.
///
/// # Shapes and dtypes
///
/// - `streams`: `[tokens, n, d]`, f32
/// - `function`: `[(2 + n)·n, n·d]`, f32
/// - `base`, `scale`: `[(2 + n)·n]`, f32, `scale` being the three released scales repeated n, n and n·n times
///
/// # Source
///
/// DeepSeek-V4 `inference/kernel.py`, `hc_split_sinkhorn_kernel`.
///
/// # Panics
///
/// If the shapes disagree or `sinkhorn.iterations` is 0.
pub fn coefficients(
    streams: Tensor<3>,
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    sinkhorn: Sinkhorn,
) -> Coefficients {
    let [_, n, d] = streams.dims();
    let outputs = (2 + n) * n;
    assert_eq!(
        function.dims(),
        [outputs, n * d],
        "coefficients: function must be [(2 + n)·n, n·d] for streams of n = {n}, d = {d}"
    );
    assert_eq!(
        base.dims(),
        [outputs],
        "coefficients: base must be [(2 + n)·n]"
    );
    assert_eq!(
        scale.dims(),
        [outputs],
        "coefficients: scale must be [(2 + n)·n]"
    );
    assert!(
        sinkhorn.iterations > 0,
        "coefficients: sinkhorn.iterations must be at least 1"
    );
    reference::coefficients(streams, function, base, scale, sinkhorn)
}

/// Collapses the streams into one input: `Σ_i pre[i] · streams[i]`.
///
/// # Shapes
///
/// - `streams`: `[tokens, n, d]`
/// - `pre`: `[tokens, n]`
/// - output: `[tokens, d]`
pub fn collapse(streams: Tensor<3>, pre: Tensor<2>) -> Tensor<2> {
    reference::collapse(streams, pre)
}

/// Spreads a sub-layer's output: `out[k] = post[k] · y + Σ_j comb[j, k] · streams[j]`.
///
/// # Shapes
///
/// - `output`: `[tokens, d]`
/// - `streams`: `[tokens, n, d]`
/// - result: `[tokens, n, d]`
pub fn expand(output: Tensor<2>, streams: Tensor<3>, coefficients: Coefficients) -> Tensor<3> {
    reference::expand(output, streams, coefficients)
}

/// Collapses the streams at the end of a model: `Σ_i (sigmoid(m[i]·scale + base[i]) + eps) · streams[i]`, `m` as in [`coefficients`].
///
/// # Shapes and dtypes
///
/// - `streams`: `[tokens, n, d]`, f32
/// - `function`: `[n, n·d]`, `base`: `[n]`, `scale`: `[1]`, f32
/// - output: `[tokens, d]`
///
/// # Panics
///
/// If the shapes disagree.
pub fn head(
    streams: Tensor<3>,
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    epsilon: f64,
    norm_epsilon: f64,
) -> Tensor<2> {
    let [_, n, d] = streams.dims();
    assert_eq!(
        function.dims(),
        [n, n * d],
        "head: function must be [n, n·d] for streams of n = {n}, d = {d}"
    );
    assert_eq!(base.dims(), [n], "head: base must be [n]");
    assert_eq!(scale.dims(), [1], "head: scale must be [1]");
    reference::head(streams, function, base, scale, epsilon, norm_epsilon)
}
