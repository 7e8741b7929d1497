//! Checks of the operators' arguments. Their errors name the argument.

use burn::tensor::{DType, Device, FloatDType, Tensor, kind::Basic};

use crate::OpError;

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
    let accepted = [DType::F32, DType::F16, DType::BF16];
    expect_dtype(argument, "F32, F16 or BF16", tensor, &accepted)
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
