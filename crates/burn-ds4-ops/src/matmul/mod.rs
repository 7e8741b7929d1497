//! Matrix products without a loss of precision.
//!
//! On GPUs whose tensor cores offer it, Burn multiplies f32 matrices in TF32 (ten bits of
//! mantissa). That is an error of 1e-3 where routers and indexers decide by differences of 1e-4, so
//! the model multiplies through this operator instead.

mod backend;
#[cfg(feature = "cube")]
#[allow(
    clippy::identity_op,
    clippy::manual_div_ceil,
    reason = "kernels do not have this method, and compute constants"
)]
mod kernel;
#[cfg(feature = "cube")]
pub(crate) mod launch;
mod reference;
mod small_m;
mod weight_group;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

pub(crate) use backend::{MatmulOps, SmallMOps};
pub use small_m::{
    INVARIANT_ROWS, MAX_INVARIANT_ROWS, SmallMOptions, small_m_matmul, small_m_matmul_group,
};

/// `lhs · rhs`, for every index of the leading dimensions. Operands in f32 are multiplied and
/// summed in f32 on every device.
///
/// # Shapes and dtypes
///
/// - `lhs`: `[.., m, k]`, f32 / f16 / bf16
/// - `rhs`: `[.., k, n]`, the same dtype and leading dimensions; a transposed view is fine
/// - output: `[.., m, n]`, the same dtype, sums in f32
///
/// # Panics
///
/// If the shapes do not fit or the dtypes differ.
pub fn matmul<const D: usize>(lhs: Tensor<D>, rhs: Tensor<D>) -> Tensor<D> {
    let (left, right) = (lhs.dims(), rhs.dims());
    assert!(D >= 2, "matmul: operands must have at least two dimensions");
    assert!(
        left[..D - 2] == right[..D - 2] && left[D - 1] == right[D - 2],
        "matmul: lhs {left:?} and rhs {right:?} must have equal leading dimensions and a common \
         inner dimension"
    );
    assert_eq!(
        lhs.dtype(),
        rhs.dtype(),
        "matmul: lhs and rhs must have the same dtype"
    );
    let mut shape = left;
    shape[D - 1] = right[D - 1];
    if shape.contains(&0) || left[D - 1] == 0 {
        // CubeCL devices panic on some operations without elements.
        return Tensor::zeros(shape, (&lhs.device(), lhs.dtype()));
    }
    Tensor::from_dispatch(Dispatch::precise_matmul(
        lhs.into_dispatch(),
        rhs.into_dispatch(),
    ))
}
