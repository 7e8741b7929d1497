//! The operators that collapse streams, alone or with everything else between two sub-layers.
//!
//! That takes two launches. The first spreads the last sub-layer's output, where it is pending, and
//! projects the new streams. The next one uses the projection and takes the norm that follows, if
//! one does.

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

use super::args::{Mix, PendingOutput, Sinkhorn};
use super::backend::HyperConnectionOps;
use super::coefficients::Coefficients;
use super::streams::Streams;
use super::validation::{expect_output, expect_parameters, expect_sinkhorn};
use crate::OpError;
use crate::validation::{FLOATS, expect_not_negative, expect_tensor};

/// The RMS norm of the collapsed streams, see [`rms_norm`](crate::norm::rms_norm).
#[derive(Clone, Debug)]
pub struct Norm {
    /// Weight of each channel: `[d]`, f32 / f16 / bf16.
    pub weight: Tensor<1>,
    /// Added to the mean square.
    pub epsilon: f64,
}

/// The results of [`collapse_norm`].
#[derive(Clone, Debug)]
pub struct Collapsed {
    /// The streams, with nothing pending: `[tokens, n, d]`.
    pub streams: Tensor<3>,
    /// The collapsed streams: `[tokens, d]`, the dtype of the streams.
    pub input: Tensor<2>,
    /// The norm of `input`: `[tokens, d]`, the dtype of the streams.
    pub normed: Tensor<2>,
    /// The coefficients with which the output of the sub-layer is to be spread.
    pub coefficients: Coefficients,
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
    let collapsed = collapse_streams(streams.into(), function, base, scale, sinkhorn, None)?;
    Ok((collapsed.input, collapsed.coefficients))
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
    let (streams, norm) = (streams.into(), None);
    end_streams(streams, function, base, scale, epsilon, norm_epsilon, norm)
}

/// Runs [`expand`](super::expand) on a pending output, then [`collapse`] and
/// [`rms_norm`](crate::norm::rms_norm). Where there are kernels, that takes two launches.
///
/// Everything is rounded where these three operators round it. The projection reads the expanded
/// streams after they are rounded, and the norm is taken of the collapsed input after it is
/// rounded.
///
/// # Shapes and dtypes
///
/// - `streams`: `[tokens, n, d]`, f32 / f16 / bf16; the pending output may have another of these
///   dtypes
/// - `function`: `[(2 + n)·n, n·d]`, any of these
/// - `base`, `scale`: `[(2 + n)·n]`, f32, as for [`collapse`]
/// - `norm`: its weight is `[d]`, any of these
/// - results: see [`Collapsed`]
///
/// # Special values
///
/// NaN, infinities, and squares that add up to more than f32 holds reach their own token only.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `Block.hc_post`, `Block.hc_pre` and the `RMSNorm` that
/// follows.
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
/// use burn::tensor::{Device, Tensor, TensorData, Tolerance};
/// use burn_ds4_ops::hyper_connection::{Norm, Sinkhorn, collapse_norm};
///
/// let device = Device::flex();
/// let streams = Tensor::<3>::from_data([[[1.0, 1.0], [5.0, 5.0]]], &device);
/// // A function of zeros gives every stream the same share.
/// let function = Tensor::<2>::zeros([8, 4], &device);
/// let (base, scale) = (Tensor::zeros([8], &device), Tensor::ones([8], &device));
/// let sinkhorn = Sinkhorn { iterations: 20, epsilon: 1e-6, norm_epsilon: 1e-6 };
/// let norm = Norm { weight: Tensor::ones([2], &device), epsilon: 1e-6 };
/// let collapsed = collapse_norm(streams.into(), function, base, scale, sinkhorn, norm)?;
/// let near = |data: TensorData, expected: f32| {
///     let expected = TensorData::from([[expected, expected]]);
///     data.assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-4));
/// };
/// near(collapsed.input.into_data(), 3.0);
/// near(collapsed.normed.into_data(), 1.0);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn collapse_norm(
    streams: Streams,
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    sinkhorn: Sinkhorn,
    norm: Norm,
) -> Result<Collapsed, OpError> {
    collapse_streams(streams, function, base, scale, sinkhorn, Some(norm))
}

/// Runs [`expand`](super::expand) on a pending output, then [`head`] and
/// [`rms_norm`](crate::norm::rms_norm). The result is the input of a model's output matrix. It
/// takes as few launches as [`collapse_norm`] and rounds like it.
///
/// # Shapes and dtypes
///
/// - `streams`: `[tokens, n, d]`, f32 / f16 / bf16; the pending output may have another of these
///   dtypes
/// - `function`: `[n, n·d]`, any of these
/// - `base`: `[n]`, `scale`: `[1]`, f32
/// - `epsilon`, `norm_epsilon`: as for [`head`]
/// - `norm`: its weight is `[d]`, any of these
/// - output: `[tokens, d]`, the dtype of `streams`
///
/// # Special values
///
/// As with [`collapse_norm`].
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
/// use burn_ds4_ops::hyper_connection::{Norm, Streams, head_norm};
///
/// let device = Device::flex();
/// let streams = Streams::from(Tensor::<3>::from_data([[[1.0, 1.0], [5.0, 5.0]]], &device));
/// // A function of zeros gives both streams a weight of a half: [3, 3], or [1, 1] normalised.
/// let function = Tensor::<2>::zeros([2, 4], &device);
/// let (base, scale) = (Tensor::zeros([2], &device), Tensor::ones([1], &device));
/// let norm = Norm { weight: Tensor::from_data([1.0, 2.0], &device), epsilon: 1e-6 };
/// let output = head_norm(streams, function, base, scale, 1e-6, 1e-6, norm)?;
/// let expected = TensorData::from([[1.0_f32, 2.0]]);
/// output.into_data().assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-4));
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn head_norm(
    streams: Streams,
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    epsilon: f64,
    norm_epsilon: f64,
    norm: Norm,
) -> Result<Tensor<2>, OpError> {
    let norm = Some(norm);
    end_streams(streams, function, base, scale, epsilon, norm_epsilon, norm)
}

/// [`collapse_norm`], or [`collapse`] if there is no norm. What has no norm is its own.
pub(super) fn collapse_streams(
    streams: Streams,
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    sinkhorn: Sinkhorn,
    norm: Option<Norm>,
) -> Result<Collapsed, OpError> {
    let [tokens, n, _] = streams.dims();
    let count = (2 + n) * n;
    expect_parameters(streams.tensor(), &function, (&base, count), (&scale, count))?;
    expect_sinkhorn(sinkhorn)?;
    expect_rest(&streams, norm.as_ref())?;
    if tokens == 0 {
        let streams = streams.ready()?;
        let coefficients = Tensor::zeros([0, count], (&streams.device(), DType::F32));
        return Ok(Collapsed {
            input: empty_output(&streams),
            normed: empty_output(&streams),
            coefficients: Coefficients::from_packed(coefficients, n),
            streams,
        });
    }
    let (pending, mix) = split(streams, function, base, scale, norm);
    let (streams, input, normed, coefficients) = Dispatch::hyper_collapse(pending, mix, sinkhorn);
    Ok(Collapsed {
        streams: Tensor::from_dispatch(streams),
        input: Tensor::from_dispatch(input),
        normed: Tensor::from_dispatch(normed),
        coefficients: Coefficients::from_packed(Tensor::from_dispatch(coefficients), n),
    })
}

/// [`head_norm`], or [`head`] if there is no norm.
fn end_streams(
    streams: Streams,
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    epsilon: f64,
    norm_epsilon: f64,
    norm: Option<Norm>,
) -> Result<Tensor<2>, OpError> {
    let [tokens, n, _] = streams.dims();
    expect_parameters(streams.tensor(), &function, (&base, n), (&scale, 1))?;
    expect_not_negative("epsilon", epsilon)?;
    expect_not_negative("norm_epsilon", norm_epsilon)?;
    expect_rest(&streams, norm.as_ref())?;
    if tokens == 0 {
        return Ok(empty_output(streams.tensor()));
    }
    let (pending, mix) = split(streams, function, base, scale, norm);
    let output = Dispatch::hyper_head(pending, mix, epsilon, norm_epsilon);
    Ok(Tensor::from_dispatch(output))
}

/// The collapsed streams of no tokens.
fn empty_output(streams: &Tensor<3>) -> Tensor<2> {
    let [_, _, d] = streams.dims();
    Tensor::zeros([0, d], (&streams.device(), streams.dtype()))
}

/// Checks what is pending, and the norm.
fn expect_rest(streams: &Streams, norm: Option<&Norm>) -> Result<(), OpError> {
    let [_, _, d] = streams.dims();
    if let Streams::Pending {
        output,
        streams,
        coefficients,
    } = streams
    {
        expect_output(output, streams, coefficients)?;
    }
    let Some(Norm { weight, epsilon }) = norm else {
        return Ok(());
    };
    let like = ("streams", &streams.device());
    expect_tensor(("weight", weight), FLOATS, [d], like)?;
    expect_not_negative("the norm's epsilon", *epsilon)
}

/// The arguments as backends see them.
fn split(
    streams: Streams,
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    norm: Option<Norm>,
) -> (PendingOutput<Dispatch>, Mix<Dispatch>) {
    let (streams, pending) = match streams {
        Streams::Ready(streams) | Streams::Weighted { streams, .. } => {
            (streams, PendingOutput::None)
        }
        Streams::Pending {
            output,
            streams,
            coefficients,
        } => {
            let pending = PendingOutput::Some {
                output: output.into_dispatch(),
                coefficients: coefficients.packed().into_dispatch(),
            };
            (streams, pending)
        }
    };
    let (weight, epsilon) = match norm {
        Some(norm) => (Some(norm.weight), norm.epsilon),
        None => (None, 0.0),
    };
    let mix = Mix {
        streams: streams.into_dispatch(),
        function: function.into_dispatch(),
        base: base.into_dispatch(),
        scale: scale.into_dispatch(),
        weight: weight.into(),
        epsilon,
    };
    (pending, mix)
}
