//! Checks of the operators' arguments. Their errors name the argument.

use std::fmt::Display;

use burn::tensor::{DType, Device, FloatDType, Tensor, kind::Basic};

use crate::OpError;

/// The dtypes that an argument may have, and their names.
pub(crate) type Accepted<'a> = (&'static str, &'a [DType]);

pub(crate) const F32: Accepted = ("F32", &[DType::F32]);
pub(crate) const I32: Accepted = ("I32", &[DType::I32]);
pub(crate) const FLOATS: Accepted = ("F32, F16 or BF16", &[DType::F32, DType::F16, DType::BF16]);
pub(crate) const INTEGERS: Accepted = ("I32, I64 or U32", &[DType::I32, DType::I64, DType::U32]);
pub(crate) const WIDE_INTEGERS: Accepted = (
    "I32, I64, U32 or U64",
    &[DType::I32, DType::I64, DType::U32, DType::U64],
);

/// Checks a tensor, which must be on the device of another argument.
pub(crate) fn expect_tensor<const D: usize, K: Basic>(
    (argument, tensor): (&'static str, &Tensor<D, K>),
    (expected, accepted): Accepted,
    shape: [usize; D],
    like: (&'static str, &Device),
) -> Result<(), OpError> {
    expect_dtype(argument, expected, tensor, accepted)?;
    expect_placed((argument, tensor), shape, like)
}

/// Checks a tensor of any dtype.
pub(crate) fn expect_placed<const D: usize, K: Basic>(
    (argument, tensor): (&'static str, &Tensor<D, K>),
    shape: [usize; D],
    (other, device): (&'static str, &Device),
) -> Result<(), OpError> {
    expect_shape(argument, tensor.dims(), shape)?;
    expect_device(argument, &tensor.device(), other, device)
}

/// An error that shows the number, unless it fits.
pub(crate) fn expect_value(
    fits: bool,
    argument: &'static str,
    actual: usize,
    expected: impl Display,
) -> Result<(), OpError> {
    if fits {
        return Ok(());
    }
    Err(invalid(argument, expected.to_string(), actual))
}

/// Checks sizes of which none may be 0.
pub(crate) fn expect_positive<const N: usize>(
    sizes: [(&'static str, usize); N],
) -> Result<(), OpError> {
    let each = |(argument, actual)| expect_value(actual > 0, argument, actual, "at least 1");
    sizes.into_iter().try_for_each(each)
}

/// The error of a number outside its range.
pub(crate) fn invalid(
    argument: &'static str,
    expected: impl Into<String>,
    actual: usize,
) -> OpError {
    OpError::InvalidValue {
        argument,
        expected: expected.into(),
        actual,
    }
}

pub(crate) fn expect_float<const D: usize>(
    argument: &'static str,
    tensor: &Tensor<D>,
) -> Result<(), OpError> {
    let (expected, accepted) = FLOATS;
    expect_dtype(argument, expected, tensor, accepted)
}

pub(crate) fn expect_dtype<const D: usize, K: Basic>(
    argument: &'static str,
    expected: &'static str,
    tensor: &Tensor<D, K>,
    accepted: &[DType],
) -> Result<(), OpError> {
    let actual = tensor.dtype();
    if accepted.contains(&actual) {
        return Ok(());
    }
    Err(OpError::DtypeMismatch {
        argument,
        expected,
        actual,
    })
}

pub(crate) fn expect_shape<const D: usize>(
    argument: &'static str,
    actual: [usize; D],
    expected: [usize; D],
) -> Result<(), OpError> {
    if actual == expected {
        return Ok(());
    }
    Err(OpError::ShapeMismatch {
        argument,
        expected: expected.into(),
        actual: actual.into(),
    })
}

pub(crate) fn expect_device(
    argument: &'static str,
    actual: &Device,
    other: &'static str,
    expected: &Device,
) -> Result<(), OpError> {
    if actual == expected {
        return Ok(());
    }
    Err(OpError::DeviceMismatch {
        argument,
        other,
        expected: format!("{expected:?}"),
        actual: format!("{actual:?}"),
    })
}

pub(crate) fn expect_supported(dtype: FloatDType, device: &Device) -> Result<(), OpError> {
    if device.supports_dtype(dtype) {
        return Ok(());
    }
    Err(OpError::UnsupportedDtype {
        argument: "dtype",
        dtype: dtype.into(),
        device: format!("{device:?}"),
    })
}

pub(crate) fn expect_not_negative(argument: &'static str, actual: f64) -> Result<(), OpError> {
    let expected = "a number that is not negative";
    expect_number(actual >= 0.0, argument, actual, expected)
}

/// An error that shows the number, unless it fits.
pub(crate) fn expect_number(
    fits: bool,
    argument: &'static str,
    actual: impl ToString,
    expected: &'static str,
) -> Result<(), OpError> {
    if fits {
        return Ok(());
    }
    Err(OpError::InvalidFloat {
        argument,
        expected,
        actual: actual.to_string(),
    })
}
