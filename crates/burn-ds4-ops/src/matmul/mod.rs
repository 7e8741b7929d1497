//! Matrix products without a loss of precision.
//!
//! On GPUs whose tensor cores offer it, Burn multiplies f32 matrices in TF32 (ten bits of
//! mantissa). That is an error of 1e-3 where routers and indexers decide by differences of 1e-4, so
//! the model multiplies through this operator instead.

mod backend;
#[cfg(feature = "cube")]
mod launch;
mod reference;
mod small_m;
mod tensor_list;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::OpError;
use crate::validation::{expect_device, expect_dtype, expect_float, expect_shape, invalid};

pub use crate::gemm::INVARIANT_ROWS;
pub(crate) use backend::MatmulOps;
#[cfg(feature = "fusion")]
pub(crate) use backend::fusion;
pub use small_m::{MAX_INVARIANT_ROWS, SmallMOptions, small_m_matmul, small_m_matmul_group};
pub(crate) use small_m::{
    check, into_rows, list_products, multiply_one, of_shape, output_dtype, tensor_list,
};
#[cfg(feature = "fusion")]
pub(crate) use tensor_list::TensorListMetadata;
pub(crate) use tensor_list::{MAX_LIST, TensorList};

/// `lhs · rhs`, for every index of the leading dimensions. Operands in f32 are multiplied and
/// summed in f32 on every device.
///
/// # Shapes and dtypes
///
/// - `lhs`: `[.., m, k]`, f32 / f16 / bf16
/// - `rhs`: `[.., k, n]`, the same dtype and leading dimensions; a transposed view is fine
/// - output: `[.., m, n]`, the same dtype, sums in f32
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, and for operands of less than two
/// dimensions.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::matmul::matmul;
///
/// let device = Device::flex();
/// let lhs = Tensor::<2>::from_data([[1.0, 2.0]], &device);
/// let rhs = Tensor::<2>::from_data([[3.0, 0.0], [4.0, 1.0]], &device);
/// let product = matmul(lhs, rhs)?;
/// product.into_data().assert_eq(&TensorData::from([[11.0_f32, 2.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn matmul<const D: usize>(lhs: Tensor<D>, rhs: Tensor<D>) -> Result<Tensor<D>, OpError> {
    if D < 2 {
        return Err(invalid("dimensions of lhs", "at least 2", D));
    }
    expect_float("lhs", &lhs)?;
    expect_dtype("rhs", "that of `lhs`", &rhs, &[lhs.dtype()])?;
    let mut expected = lhs.dims();
    let (inner, columns) = (expected[D - 1], rhs.dims()[D - 1]);
    (expected[D - 2], expected[D - 1]) = (inner, columns);
    expect_shape("rhs", rhs.dims(), expected)?;
    expect_device("rhs", &rhs.device(), "lhs", &lhs.device())?;
    let mut shape = lhs.dims();
    shape[D - 1] = columns;
    if shape.contains(&0) || inner == 0 {
        // CubeCL devices panic on some operations without elements.
        return Ok(Tensor::zeros(shape, (&lhs.device(), lhs.dtype())));
    }
    Ok(Tensor::from_dispatch(Dispatch::precise_matmul(
        lhs.into_dispatch(),
        rhs.into_dispatch(),
    )))
}
