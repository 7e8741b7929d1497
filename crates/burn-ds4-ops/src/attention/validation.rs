//! Checks of the arguments of attention.

use burn::tensor::{DType, Device, Int, Tensor};

use super::options::RowRounding;
use crate::OpError;
use crate::device::is_host;
use crate::validation::{expect_device, expect_dtype, expect_shape, invalid};

/// Checks the number of channels that are rotated in pairs, of `width` channels.
pub(super) fn expect_rotated(rotated: usize, width: usize) -> Result<(), OpError> {
    if rotated.is_multiple_of(2) && rotated <= width {
        return Ok(());
    }
    Err(OpError::InvalidValue {
        argument: "number of rotated channels",
        expected: format!("even and at most {width}"),
        actual: rotated,
    })
}

/// Checks the first positions of sequences, which must be on the device of another argument.
pub(super) fn expect_start(
    (argument, start): (&'static str, &Tensor<1, Int>),
    batch: usize,
    (other, device): (&'static str, &Device),
) -> Result<(), OpError> {
    let accepted = [DType::I32, DType::I64, DType::U32];
    expect_dtype(argument, "I32, I64 or U32", start, &accepted)?;
    expect_shape(argument, start.dims(), [batch])?;
    expect_device(argument, &start.device(), other, device)
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
        return Err(OpError::InvalidValue {
            argument: "positions of angles",
            expected: "at least 1".into(),
            actual: known,
        });
    }
    if !is_host(&start.device()) {
        return Ok(());
    }
    // A negative start counts as 0, so a vacant sequence needs the first `count` positions too.
    let last = latest(start).unwrap_or(0).saturating_add(count - 1);
    if last < known {
        return Ok(());
    }
    Err(OpError::InvalidValue {
        argument: "last position",
        expected: format!("less than {known}, the positions of angles"),
        actual: last,
    })
}

/// The largest start that is not negative.
pub(super) fn latest(start: &Tensor<1, Int>) -> Option<usize> {
    let starts = start.clone().into_data();
    let starts = starts.iter::<i64>();
    starts.filter_map(|start| usize::try_from(start).ok()).max()
}
