//! Checks of the arguments of attention.

use burn::tensor::{DType, Device, Int, Tensor};

use super::{CompressedKeys, RowRounding, WindowKeys};
use crate::OpError;
use crate::device::is_host;
use crate::validation::{expect_device, expect_dtype, expect_float, expect_shape, invalid};

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

/// Checks all keys, and returns the compressed ones, if there are any.
pub(super) fn check_keys(
    queries: &Tensor<4>,
    window: &WindowKeys,
    compressed: Option<CompressedKeys>,
    sinks: &Tensor<1>,
    scale: f64,
) -> Result<Option<CompressedKeys>, OpError> {
    expect_float("queries", queries)?;
    let (dtype, device) = (queries.dtype(), &queries.device());
    let [batch, count, heads, width] = queries.dims();
    let like_queries = "that of `queries`";
    let on_device = |argument, actual| expect_device(argument, &actual, "queries", device);

    let [_, columns, _] = window.rows.dims();
    expect_dtype("window.rows", like_queries, &window.rows, &[dtype])?;
    expect_shape("window.rows", window.rows.dims(), [batch, columns, width])?;
    on_device("window.rows", window.rows.device())?;
    expect_dtype("window.bias", "F32", &window.bias, &[DType::F32])?;
    expect_shape("window.bias", window.bias.dims(), [batch, columns])?;
    on_device("window.bias", window.bias.device())?;
    let longest = (columns + 1).saturating_sub(count);
    if !(1..=longest).contains(&window.span) {
        return Err(OpError::InvalidValue {
            argument: "window.span",
            expected: format!("1 to {longest}, with {columns} rows and {count} queries"),
            actual: window.span,
        });
    }

    expect_dtype("sinks", "F32", sinks, &[DType::F32])?;
    expect_shape("sinks", sinks.dims(), [heads])?;
    on_device("sinks", sinks.device())?;
    expect_scale(scale)?;

    let Some(keys) = compressed else {
        return Ok(None);
    };
    let [_, rows, _] = keys.rows.dims();
    expect_dtype("compressed.rows", like_queries, &keys.rows, &[dtype])?;
    expect_shape("compressed.rows", keys.rows.dims(), [batch, rows, width])?;
    on_device("compressed.rows", keys.rows.device())?;
    expect_dtype("compressed.bias", "F32", &keys.bias, &[DType::F32])?;
    expect_shape("compressed.bias", keys.bias.dims(), [batch, count, rows])?;
    on_device("compressed.bias", keys.bias.device())?;
    if let Some(picks) = &keys.picks {
        let [_, _, number] = picks.dims();
        expect_shape("compressed.picks", picks.dims(), [batch, count, number])?;
        on_device("compressed.picks", picks.device())?;
    }
    // CubeCL devices panic on some operations on empty tensors.
    Ok((rows > 0 && keys.selected() > 0).then_some(keys))
}
