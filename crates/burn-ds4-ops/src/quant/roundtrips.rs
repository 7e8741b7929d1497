//! Round trips of activations, and the transform that comes before one.

use burn::backend::Dispatch;
use burn::tensor::{FloatDType, Tensor};

use super::args::Activations;
use super::backend::QuantOps;
use crate::OpError;
use crate::roundtrip::SmallFloat;
use crate::roundtrip::reference::{hadamard as transform, roundtrip_scaled};
use crate::validation::{expect_float, invalid};

impl Activations {
    /// `x` as products take it: itself, or rounded. Operators do that by themselves.
    ///
    /// # Errors
    ///
    /// As [`fp8_roundtrip`], where `x` is rounded.
    pub fn input<const D: usize>(self, x: Tensor<D>) -> Result<Tensor<D>, OpError> {
        match self.block() {
            None => Ok(x),
            Some(block) => fp8_roundtrip(x, block),
        }
    }
}

/// Rounds to FP8 and back: what a value becomes in an FP8 cache, or as the input of an FP8 matrix
/// product.
///
/// For each `block` elements of the last dimension (the last block may be partial), `s =
/// 2^ceil(log2(max(amax, 1e-4) / 448))` and `x` becomes `e4m3(x / s) * s`, rounded to the nearest
/// E4M3 value, ties to the even code, subnormals included. The reference uses blocks of 64 for
/// cache rows and 128 for the inputs of matrix products.
///
/// `x` is `F32`, `F16` or `BF16`; the rounding is done in `f32`, the result has the dtype and shape
/// of `x`. Magnitudes above `448 * 2^119` may round to infinity, as in any `f32` arithmetic.
///
/// # Errors
///
/// [`OpError::DtypeMismatch`] for another dtype, [`OpError::InvalidValue`] for a `block` of zero.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::quant::fp8_roundtrip;
///
/// let x = Tensor::<2>::from_data([[1.0, 1.06, 0.5]], &Device::flex());
/// let rounded = fp8_roundtrip(x, 64)?;
/// rounded.into_data().assert_eq(&TensorData::from([[1.0_f32, 1.0, 0.5]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn fp8_roundtrip<const D: usize>(x: Tensor<D>, block: usize) -> Result<Tensor<D>, OpError> {
    roundtrip_blocks(x, block, SmallFloat::Fp8)
}

/// Rounds to FP4 and back: what an indexer channel becomes in an FP4 cache.
///
/// For each `block` elements of the last dimension (32 in the reference; the last block may be
/// partial), `s = 2^ceil(log2(max(amax, 6 * 2^-126) / 6))` and `x` becomes `e2m1(x / s) * s`,
/// rounded to the nearest E2M1 value, ties to the even code.
///
/// Dtypes and errors as [`fp8_roundtrip`].
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::quant::fp4_roundtrip;
///
/// // The scale is 1: 6 is the largest value, and 2.5 is a tie between 2 and 3.
/// let x = Tensor::<2>::from_data([[6.0, 2.5, 0.7, -5.5]], &Device::flex());
/// let rounded = fp4_roundtrip(x, 32)?;
/// rounded.into_data().assert_eq(&TensorData::from([[6.0_f32, 2.0, 0.5, -6.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn fp4_roundtrip<const D: usize>(x: Tensor<D>, block: usize) -> Result<Tensor<D>, OpError> {
    roundtrip_blocks(x, block, SmallFloat::Fp4)
}

/// Rounds to FP4 and back with a scale that is no power of two: what a channel becomes in the
/// compressed rows of DeepSeek-V4.1.
///
/// For each `block` elements of the last dimension (16 in the reference; the last block may be
/// partial), `s = e4m3(max(amax, 6 * 2^-9) / 6)`, rounded to the nearest E4M3 value and 448 at
/// most, and `x` becomes `e2m1(clamp(x / s, -6, 6)) * s`. Both are rounded ties to even.
///
/// Dtypes and errors as [`fp8_roundtrip`]. It divides: a device whose division is not exact may
/// round a value elsewhere that is close to a tie.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::quant::fp4_scaled_roundtrip;
///
/// // A sixth of the largest, 1.5, is an E4M3 value: 4 is 2.67 of these, and becomes 3.
/// let x = Tensor::<2>::from_data([[9.0, 4.0, 0.2, -1.0]], &Device::flex());
/// let rounded = fp4_scaled_roundtrip(x, 16)?;
/// rounded.into_data().assert_eq(&TensorData::from([[9.0_f32, 4.5, 0.0, -0.75]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn fp4_scaled_roundtrip<const D: usize>(
    x: Tensor<D>,
    block: usize,
) -> Result<Tensor<D>, OpError> {
    let dtype = FloatDType::from(x.dtype());
    by_rows(x, block, |x| {
        let rounded = roundtrip_scaled::<Dispatch>(x.cast(FloatDType::F32).into_dispatch(), block);
        Tensor::<2>::from_dispatch(rounded).cast(dtype)
    })
}

/// Walsh-Hadamard transform of the last dimension, in Sylvester order, times `n^-0.5`: orthonormal,
/// and its own inverse.
///
/// `x` is `F32`, `F16` or `BF16`; the sums are made in `f32`, in a fixed order, and the result has
/// the dtype and shape of `x`. A NaN or an infinity spreads over its row.
///
/// # Errors
///
/// [`OpError::DtypeMismatch`] for another dtype, [`OpError::InvalidValue`] where the last dimension
/// is no power of two.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::quant::hadamard;
///
/// let x = Tensor::<2>::from_data([[0.0, 2.0, 0.0, 0.0]], &Device::flex());
/// let y = hadamard(x)?;
/// y.into_data().assert_eq(&TensorData::from([[1.0_f32, -1.0, 1.0, -1.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn hadamard<const D: usize>(x: Tensor<D>) -> Result<Tensor<D>, OpError> {
    expect_float("x", &x)?;
    let (shape, dtype) = (x.dims(), x.dtype());
    let columns = shape[D - 1];
    if !columns.is_power_of_two() {
        return Err(invalid("last dimension of x", "a power of two", columns));
    }
    let rows = shape[..D - 1].iter().product();
    if rows == 0 {
        return Ok(x);
    }
    let x: Tensor<2> = x.cast(FloatDType::F32).reshape([rows, columns]);
    let transformed = transform::<Dispatch>(x.into_dispatch());
    Ok(Tensor::<2>::from_dispatch(transformed)
        .reshape(shape)
        .cast(FloatDType::from(dtype)))
}

fn roundtrip_blocks<const D: usize>(
    x: Tensor<D>,
    block: usize,
    to: SmallFloat,
) -> Result<Tensor<D>, OpError> {
    by_rows(x, block, |x| {
        let rounded = Dispatch::roundtrip(x.into_dispatch(), block, to);
        Tensor::<2>::from_dispatch(rounded)
    })
}

/// Rounds rows of at least one element in blocks of at least one.
fn by_rows<const D: usize>(
    x: Tensor<D>,
    block: usize,
    round: impl FnOnce(Tensor<2>) -> Tensor<2>,
) -> Result<Tensor<D>, OpError> {
    expect_float("x", &x)?;
    if block == 0 {
        return Err(invalid("block", "at least 1", block));
    }
    let shape = x.dims();
    if shape.contains(&0) {
        return Ok(x);
    }
    let columns = shape[D - 1];
    let rows = shape[..D - 1].iter().product();
    let x: Tensor<2> = x.reshape([rows, columns]);
    Ok(round(x).reshape(shape))
}
