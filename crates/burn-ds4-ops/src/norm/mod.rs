//! Norms of rows. The bits of a row's result do not depend on the other rows, on every device that
//! runs the kernel: a model that normalises several positions at once gets the same results as one
//! by one.

mod backend;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::OpError;
use crate::validation::{FLOATS, expect_float, expect_not_negative, expect_tensor};
pub(crate) use backend::{NormOps, norm_rows};
#[cfg(feature = "cube")]
pub(crate) use kernel::{NormSizes, RmsNormBlueprint, normalize_rows};
#[cfg(feature = "cube")]
pub(crate) use launch::Norm;

/// `x / sqrt(mean(x²) + epsilon)` over the last dimension, times `weight` if there is one.
///
/// Computed in f32, and rounded once to the dtype of `x`, after the weight.
///
/// # Shapes and dtypes
///
/// - `x`: `[.., d]`, f32 / f16 / bf16
/// - `weight`: `[d]`, any of these
/// - output: like `x`
///
/// # Special values
///
/// NaN, infinities, and squares whose sum overflows f32 affect their own row only. In a row with an
/// infinity, the finite elements become 0 and the infinite ones NaN. A row of zeros stays zero,
/// unless `epsilon` is 0 in f32: then it becomes NaN.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `RMSNorm`; without a weight, the norm of the queries in
/// `MLA.forward`.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not match, and for an `epsilon` that is
/// negative or NaN.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::norm::rms_norm;
///
/// let device = Device::flex();
/// let x = Tensor::<2>::from_data([[2.0, -2.0, 2.0, 2.0]], &device);
/// let weight = Tensor::<1>::from_data([1.0, 1.0, 1.0, 3.0], &device);
/// let normed = rms_norm(x, Some(weight), 0.0)?;
/// normed.into_data().assert_eq(&TensorData::from([[1.0_f32, -1.0, 1.0, 3.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "RMSNorm")]
pub fn rms_norm<const D: usize>(
    x: Tensor<D>,
    weight: Option<Tensor<1>>,
    epsilon: f64,
) -> Result<Tensor<D>, OpError> {
    let shape = x.dims();
    let columns = shape[D - 1];
    expect_float("x", &x)?;
    if let Some(weight) = &weight {
        expect_tensor(("weight", weight), FLOATS, [columns], ("x", &x.device()))?;
    }
    expect_not_negative("epsilon", epsilon)?;
    let elements: usize = shape.iter().product();
    if elements == 0 {
        return Ok(x);
    }
    let rows: Tensor<2> = x.reshape([elements / columns, columns]);
    let normalized = Dispatch::rms_norm(rows.into_dispatch(), weight.into(), epsilon);
    Ok(Tensor::<2>::from_dispatch(normalized).reshape(shape))
}
