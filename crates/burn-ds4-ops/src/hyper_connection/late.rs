//! Hyper-connections whose weights of the streams are used one connection later.

use burn::tensor::{FloatDType, Tensor};

use super::args::Sinkhorn;
use super::collapse::{Collapsed, Norm, collapse_streams};
use super::streams::Streams;
use crate::OpError;
use crate::norm::rms_norm;
use crate::validation::{F32, FLOATS, expect_not_negative, expect_tensor};

/// Runs [`collapse_norm`](super::collapse_norm), but that the streams are collapsed by the
/// [weights of the connection before](Streams::pre). The connection's own are among the
/// [coefficients](Collapsed::coefficients), for the next one.
///
/// Shapes, dtypes and special values are those of [`collapse_norm`](super::collapse_norm). The
/// input is summed in f32 and rounded once. It has no kernel of its own yet.
///
/// # Source
///
/// DeepSeek-V4.1 `inference/model.py`, `Block.forward`.
///
/// # Errors
///
/// As [`collapse_norm`](super::collapse_norm).
///
/// # Example
///
/// Nothing has been before these streams: their input is the first of them.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::hyper_connection::{Norm, Sinkhorn, collapse_norm_late};
///
/// let device = Device::flex();
/// let streams = Tensor::<3>::from_data([[[1.0, 1.0], [5.0, 5.0]]], &device);
/// let function = Tensor::<2>::zeros([8, 4], &device);
/// let (base, scale) = (Tensor::zeros([8], &device), Tensor::ones([8], &device));
/// let sinkhorn = Sinkhorn { iterations: 20, epsilon: 1e-6, norm_epsilon: 1e-6 };
/// let norm = Norm { weight: Tensor::ones([2], &device), epsilon: 1e-6 };
/// let collapsed = collapse_norm_late(streams.into(), function, base, scale, sinkhorn, norm)?;
/// collapsed.input.into_data().assert_eq(&TensorData::from([[1.0_f32, 1.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn collapse_norm_late(
    streams: Streams,
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    sinkhorn: Sinkhorn,
    norm: Norm,
) -> Result<Collapsed, OpError> {
    let pre = streams.pre();
    check_norm(&streams, &norm)?;
    let [tokens, n, d] = streams.dims();
    let like = ("streams", &norm.weight.device());
    expect_tensor(("pre", &pre), F32, [tokens, n], like)?;
    let collapsed = collapse_streams(streams, function, base, scale, sinkhorn, None)?;
    if tokens * d == 0 {
        return Ok(collapsed);
    }
    let input = weighted(collapsed.streams.clone(), pre);
    let normed = rms_norm(input.clone(), Some(norm.weight), norm.epsilon)?;
    Ok(Collapsed {
        input,
        normed,
        ..collapsed
    })
}

/// Collapses the streams at the end of a model by the [weights of the last
/// connection](Streams::pre): `[tokens, d]`, in the dtype of the streams, summed in f32.
///
/// # Errors
///
/// As [`Streams::ready`], and for weights that do not fit the streams.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::hyper_connection::{Streams, end_late};
///
/// let device = Device::flex();
/// let streams = Streams::Weighted {
///     streams: Tensor::from_data([[[1.0, 1.0], [5.0, 6.0]]], &device),
///     pre: Tensor::from_data([[1.0, 2.0]], &device),
/// };
/// let output = end_late(streams)?;
/// output.into_data().assert_eq(&TensorData::from([[11.0_f32, 13.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn end_late(streams: Streams) -> Result<Tensor<2>, OpError> {
    let pre = streams.pre();
    let streams = streams.ready()?;
    let [tokens, n, d] = streams.dims();
    let like = ("streams", &streams.device());
    expect_tensor(("pre", &pre), F32, [tokens, n], like)?;
    if tokens * d == 0 {
        return Ok(Tensor::zeros(
            [tokens, d],
            (&streams.device(), streams.dtype()),
        ));
    }
    Ok(weighted(streams, pre))
}

fn check_norm(streams: &Streams, norm: &Norm) -> Result<(), OpError> {
    let [_, _, d] = streams.dims();
    let like = ("streams", &streams.device());
    expect_tensor(("weight", &norm.weight), FLOATS, [d], like)?;
    expect_not_negative("the norm's epsilon", norm.epsilon)
}

/// `Σ_i pre[i] · streams[i]`.
fn weighted(streams: Tensor<3>, pre: Tensor<2>) -> Tensor<2> {
    let dtype = FloatDType::from(streams.dtype());
    let sum = streams.cast(FloatDType::F32) * pre.unsqueeze_dim(2);
    sum.sum_dim(1).squeeze_dim::<2>(1).cast(dtype)
}
