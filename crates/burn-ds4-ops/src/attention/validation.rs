//! Checks of the arguments of attention.

use burn::tensor::{Int, Tensor};

use super::options::RowRounding;
use crate::OpError;
use crate::device::is_host;
use crate::validation::{expect_number, expect_positive, expect_value};

/// Checks the number of channels that are rotated in pairs, of `width` channels.
pub(super) fn expect_rotated(rotated: usize, width: usize) -> Result<(), OpError> {
    let fits = rotated.is_multiple_of(2) && rotated <= width;
    let expected = format_args!("even and at most {width}");
    expect_value(fits, "number of rotated channels", rotated, expected)
}

/// Checks the channels of rows that are rounded before they are stored.
pub(super) fn expect_rounding(
    argument: &'static str,
    rounding: RowRounding,
    width: usize,
) -> Result<(), OpError> {
    let fits = rounding != RowRounding::Index || width.is_power_of_two();
    let expected = "a power of two where rows are rounded as an index";
    expect_value(fits, argument, width, expected)
}

/// Checks the factor of logits or scores.
pub(super) fn expect_scale(scale: f64) -> Result<(), OpError> {
    expect_number(scale.is_finite(), "scale", scale, "a finite number")
}

/// Checks that a table has the angles of `count` positions from every start. Starts are read only
/// where that costs nothing.
pub(super) fn expect_known(
    start: &Tensor<1, Int>,
    count: usize,
    known: usize,
) -> Result<(), OpError> {
    expect_positive([("positions of angles", known)])?;
    if !is_host(&start.device()) {
        return Ok(());
    }
    // A negative start counts as 0, so a vacant sequence needs the first `count` positions too.
    let last = latest(start).unwrap_or(0).saturating_add(count - 1);
    let expected = format_args!("less than {known}, the positions of angles");
    expect_value(last < known, "last position", last, expected)
}

/// The largest start that is not negative.
pub(super) fn latest(start: &Tensor<1, Int>) -> Option<usize> {
    let starts = start.clone().into_data();
    let starts = starts.iter::<i64>();
    starts.filter_map(|start| usize::try_from(start).ok()).max()
}
