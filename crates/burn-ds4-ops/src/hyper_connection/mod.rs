//! Manifold-constrained hyper-connections (mHC): several residual streams, mixed around every
//! sub-layer.
//!
//! A model keeps `n` streams of width `d` for each token. Before a sub-layer they are collapsed
//! into one input. After it, the output is spread over the streams, which are mixed with one
//! another by a doubly stochastic matrix. All coefficients are functions of the streams themselves.
//!
//! [`collapse`], [`expand`] and [`head`] are one of these steps each. A model that runs them one
//! after the other is faster with [`collapse_norm`] and [`head_norm`]. These leave the end of a
//! sub-layer to the beginning of the next: [`Streams`] holds what is pending.
//!
//! Streams are read and written in their own dtype. All arithmetic is in f32, and each result is
//! rounded once. On devices that run the kernels, a token's result has the same bits with up to
//! [`INVARIANT_ROWS`](crate::matmul::INVARIANT_ROWS) tokens as alone.

mod backend;
mod coefficients;
mod fused;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
mod reference;
mod streams;

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

use crate::OpError;
use crate::validation::{
    expect_device, expect_dtype, expect_float, expect_not_negative, expect_shape, invalid,
};
use backend::HyperConnectionOps;

pub use coefficients::Coefficients;
pub use fused::{Collapsed, Norm, collapse_norm, head_norm};
pub use streams::Streams;

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

/// Computes the coefficients from the streams, and collapses the streams into the input of the
/// sub-layer.
///
/// Let `v` be all streams of a token side by side and `m = function · v / rms(v)`. Then
/// `pre = sigmoid(m[..n]·scale + base) + eps` and `post = 2·sigmoid(..)`. `comb` is the row softmax
/// of the rest plus `eps`, normalised over columns and then alternately over rows and columns. The
/// input is `Σ_i pre[i] · streams[i]`.
///
/// # Shapes and dtypes
///
/// - `streams`: `[tokens, n, d]`, f32 / f16 / bf16
/// - `function`: `[(2 + n)·n, n·d]`, any of these
/// - `base`, `scale`: `[(2 + n)·n]`, f32, where `scale` is the three released scales repeated n, n
///   and n·n times
/// - input: `[tokens, d]`, the dtype of `streams`
///
/// # Special values
///
/// NaN, infinities, and squares that add up to more than f32 holds reach their own token only.
///
/// # Source
///
/// DeepSeek-V4 `inference/kernel.py`, `hc_split_sinkhorn_kernel`.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, for streams without channels, for no
/// iterations, and for an epsilon that is negative or NaN.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_ds4_ops::hyper_connection::{Sinkhorn, collapse, expand};
///
/// let device = Device::flex();
/// let streams = Tensor::<3>::from_data([[[1.0, 2.0], [3.0, 6.0]]], &device);
/// // A function of zeros gives every stream the same share.
/// let function = Tensor::<2>::zeros([8, 4], &device);
/// let (base, scale) = (Tensor::<1>::zeros([8], &device), Tensor::<1>::ones([8], &device));
/// let sinkhorn = Sinkhorn { iterations: 20, epsilon: 1e-6, norm_epsilon: 1e-6 };
/// let (input, coefficients) = collapse(streams.clone(), function, base, scale, sinkhorn)?;
/// let near = |tensor: Tensor<1>, expected: &[f32]| {
///     let values = tensor.into_data().iter::<f32>().collect::<Vec<_>>();
///     values.iter().zip(expected).all(|(value, expected)| (value - expected).abs() < 1e-4)
/// };
/// assert!(near(input.clone().flatten(0, 1), &[2.0, 4.0]));
/// // What the sub-layer makes of its input goes to every stream.
/// let result = expand(input, streams, &coefficients)?;
/// assert!(near(result.flatten(0, 2), &[4.0, 8.0, 4.0, 8.0]));
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "hc_pre")]
pub fn collapse(
    streams: Tensor<3>,
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    sinkhorn: Sinkhorn,
) -> Result<(Tensor<2>, Coefficients), OpError> {
    let [_, n, _] = streams.dims();
    let count = (2 + n) * n;
    expect_parameters(&streams, &function, (&base, count), (&scale, count))?;
    expect_sinkhorn(sinkhorn)?;
    if streams.dims()[0] == 0 {
        let none = Tensor::zeros([0, count], (&streams.device(), DType::F32));
        return Ok((empty_output(&streams), Coefficients::from_packed(none, n)));
    }
    let projected = project(&streams, function);
    let (input, coefficients) = Dispatch::hyper_collapse(
        streams.into_dispatch(),
        projected.into_dispatch(),
        base.into_dispatch(),
        scale.into_dispatch(),
        sinkhorn,
    );
    let coefficients = Coefficients::from_packed(Tensor::from_dispatch(coefficients), n);
    Ok((Tensor::from_dispatch(input), coefficients))
}

/// Spreads a sub-layer's output: `result[k] = post[k] · output + Σ_j comb[j, k] · streams[j]`.
///
/// # Shapes and dtypes
///
/// - `output`: `[tokens, d]`, f32 / f16 / bf16
/// - `streams`: `[tokens, n, d]`, any of these
/// - result: like `streams`
///
/// # Special values
///
/// NaN and infinities reach the same channel of their own token only.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::hyper_connection::{Coefficients, expand};
///
/// let device = Device::flex();
/// // Two streams of one channel, which change places.
/// let streams = Tensor::<3>::from_data([[[1.0], [10.0]]], &device);
/// let comb = Tensor::<3>::from_data([[[0.0, 1.0], [1.0, 0.0]]], &device);
/// let (pre, post) = (Tensor::ones([1, 2], &device), Tensor::from_data([[1.0, 2.0]], &device));
/// let coefficients = Coefficients::new(pre, post, comb)?;
/// let result = expand(Tensor::from_data([[5.0]], &device), streams, &coefficients)?;
/// result.into_data().assert_eq(&TensorData::from([[[15.0_f32], [11.0]]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "hc_post")]
pub fn expand(
    output: Tensor<2>,
    streams: Tensor<3>,
    coefficients: &Coefficients,
) -> Result<Tensor<3>, OpError> {
    expect_output(&output, &streams, coefficients)?;
    if streams.dims().contains(&0) {
        return Ok(streams);
    }
    Ok(Tensor::from_dispatch(Dispatch::hyper_expand(
        output.into_dispatch(),
        streams.into_dispatch(),
        coefficients.packed().into_dispatch(),
    )))
}

/// Collapses the streams at the end of a model: `Σ_i (sigmoid(m[i]·scale + base[i]) + eps) ·
/// streams[i]`, with `m` as in [`collapse`].
///
/// # Shapes and dtypes
///
/// - `streams`: `[tokens, n, d]`, f32 / f16 / bf16
/// - `function`: `[n, n·d]`, any of these
/// - `base`: `[n]`, `scale`: `[1]`, f32
/// - output: `[tokens, d]`, the dtype of `streams`
///
/// # Special values
///
/// As with [`collapse`].
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, for streams without channels, and
/// for an epsilon that is negative or NaN.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData, Tolerance};
/// use burn_ds4_ops::hyper_connection::head;
///
/// let device = Device::flex();
/// let streams = Tensor::<3>::from_data([[[2.0, 4.0], [9.0, 9.0]]], &device);
/// let function = Tensor::<2>::zeros([2, 4], &device);
/// // Without a function, the weights are sigmoid(0) and sigmoid(-100).
/// let base = Tensor::<1>::from_data([0.0, -100.0], &device);
/// let output = head(streams, function, base, Tensor::ones([1], &device), 1e-6, 1e-6)?;
/// let expected = TensorData::from([[1.0_f32, 2.0]]);
/// output.into_data().assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-4));
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn head(
    streams: Tensor<3>,
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    epsilon: f64,
    norm_epsilon: f64,
) -> Result<Tensor<2>, OpError> {
    let [tokens, n, _] = streams.dims();
    expect_parameters(&streams, &function, (&base, n), (&scale, 1))?;
    expect_not_negative("epsilon", epsilon)?;
    expect_not_negative("norm_epsilon", norm_epsilon)?;
    if tokens == 0 {
        return Ok(empty_output(&streams));
    }
    let projected = project(&streams, function);
    Ok(Tensor::from_dispatch(Dispatch::hyper_head(
        streams.into_dispatch(),
        projected.into_dispatch(),
        base.into_dispatch(),
        scale.into_dispatch(),
        epsilon,
        norm_epsilon,
    )))
}

/// `function · v` of every token in f32, where `v` is all its streams side by side.
fn project(streams: &Tensor<3>, function: Tensor<2>) -> Tensor<2> {
    let (streams, function) = (streams.clone().into_dispatch(), function.into_dispatch());
    Tensor::from_dispatch(Dispatch::hyper_project(streams, function))
}

/// The collapsed streams of no tokens.
fn empty_output(streams: &Tensor<3>) -> Tensor<2> {
    let [_, _, d] = streams.dims();
    Tensor::zeros([0, d], (&streams.device(), streams.dtype()))
}

fn expect_output(
    output: &Tensor<2>,
    streams: &Tensor<3>,
    coefficients: &Coefficients,
) -> Result<(), OpError> {
    let [tokens, n, d] = streams.dims();
    expect_float("output", output)?;
    expect_float("streams", streams)?;
    expect_shape("output", output.dims(), [tokens, d])?;
    coefficients.expect_fit(tokens, n)?;
    let device = streams.device();
    expect_device("output", &output.device(), "streams", &device)?;
    let of_coefficients = coefficients.packed().device();
    expect_device("coefficients", &of_coefficients, "streams", &device)
}

fn expect_sinkhorn(sinkhorn: Sinkhorn) -> Result<(), OpError> {
    expect_not_negative("epsilon", sinkhorn.epsilon)?;
    expect_not_negative("norm_epsilon", sinkhorn.norm_epsilon)?;
    if sinkhorn.iterations == 0 {
        return Err(invalid("iterations", "at least 1", 0));
    }
    Ok(())
}

fn expect_parameters(
    streams: &Tensor<3>,
    function: &Tensor<2>,
    (base, bases): (&Tensor<1>, usize),
    (scale, scales): (&Tensor<1>, usize),
) -> Result<(), OpError> {
    let [_, n, d] = streams.dims();
    expect_float("streams", streams)?;
    expect_float("function", function)?;
    expect_dtype("base", "F32", base, &[DType::F32])?;
    expect_dtype("scale", "F32", scale, &[DType::F32])?;
    if n * d == 0 {
        return Err(invalid("channels of streams", "at least 1", 0));
    }
    expect_shape("function", function.dims(), [bases, n * d])?;
    expect_shape("base", base.dims(), [bases])?;
    expect_shape("scale", scale.dims(), [scales])?;
    let device = streams.device();
    expect_device("function", &function.device(), "streams", &device)?;
    expect_device("base", &base.device(), "streams", &device)?;
    expect_device("scale", &scale.device(), "streams", &device)
}
