use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::backend::HyperConnectionOps;
use super::coefficients::Coefficients;
use super::validation::expect_output;
use crate::OpError;

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
