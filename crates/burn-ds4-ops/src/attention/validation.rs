//! Checks of the arguments of attention.

use burn::tensor::{DType, Device, Int, Tensor, kind::Basic};

use super::options::RowRounding;
use crate::OpError;
use crate::device::is_host;
use crate::validation::{expect_device, expect_dtype, expect_shape, invalid};

/// The dtypes that an argument may have, and their names.
pub(super) type Accepted<'a> = (&'static str, &'a [DType]);

pub(super) const F32: Accepted = ("F32", &[DType::F32]);
pub(super) const FLOATS: Accepted = ("F32, F16 or BF16", &[DType::F32, DType::F16, DType::BF16]);
pub(super) const INTEGERS: Accepted = ("I32, I64 or U32", &[DType::I32, DType::I64, DType::U32]);

/// Checks a tensor, which must be on the device of another argument.
pub(super) fn expect_tensor<const D: usize, K: Basic>(
    (argument, tensor): (&'static str, &Tensor<D, K>),
    (expected, accepted): Accepted,
    shape: [usize; D],
    (other, device): (&'static str, &Device),
) -> Result<(), OpError> {
    expect_dtype(argument, expected, tensor, accepted)?;
    expect_shape(argument, tensor.dims(), shape)?;
    expect_device(argument, &tensor.device(), other, device)
}

/// Checks the number of channels that are rotated in pairs, of `width` channels.
pub(super) fn expect_rotated(rotated: usize, width: usize) -> Result<(), OpError> {
    if rotated.is_multiple_of(2) && rotated <= width {
        return Ok(());
    }
    let expected = format!("even and at most {width}");
    Err(invalid("number of rotated channels", expected, rotated))
}

/// Checks the channels of rows that are rounded before they are stored.
pub(super) fn expect_rounding(
    argument: &'static str,
    rounding: RowRounding,
    width: usize,
) -> Result<(), OpError> {
    if rounding != RowRounding::Index || width.is_power_of_two() {
        return Ok(());
    }
    let expected = "a power of two where rows are rounded as an index";
    Err(invalid(argument, expected, width))
}

/// Checks the factor of logits or scores.
pub(super) fn expect_scale(scale: f64) -> Result<(), OpError> {
    if scale.is_finite() {
        return Ok(());
    }
    Err(OpError::InvalidFloat {
        argument: "scale",
        expected: "a finite number",
        actual: scale.to_string(),
    })
}

/// Checks that a table has the angles of `count` positions from every start. Starts are read only
/// where that costs nothing.
pub(super) fn expect_known(
    start: &Tensor<1, Int>,
    count: usize,
    known: usize,
) -> Result<(), OpError> {
    if known == 0 {
        return Err(invalid("positions of angles", "at least 1", known));
    }
    if !is_host(&start.device()) {
        return Ok(());
    }
    // A negative start counts as 0, so a vacant sequence needs the first `count` positions too.
    let last = latest(start).unwrap_or(0).saturating_add(count - 1);
    if last < known {
        return Ok(());
    }
    let expected = format!("less than {known}, the positions of angles");
    Err(invalid("last position", expected, last))
}

/// The largest start that is not negative.
pub(super) fn latest(start: &Tensor<1, Int>) -> Option<usize> {
    let starts = start.clone().into_data();
    let starts = starts.iter::<i64>();
    starts.filter_map(|start| usize::try_from(start).ok()).max()
}
