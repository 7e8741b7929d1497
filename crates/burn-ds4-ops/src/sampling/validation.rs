use burn::tensor::{DType, Int, Tensor, kind::Basic};

use super::{Draws, MAX_COLUMNS, Sampling};
use crate::OpError;
use crate::validation::{expect_device, expect_dtype, expect_float, expect_shape};

/// Logits, of which the last dimension are columns, against everything else.
pub(super) fn check<const D: usize>(
    logits: &Tensor<D>,
    sequences: usize,
    sampling: &Sampling,
    draws: &Draws,
) -> Result<(), OpError> {
    check_sampling(sampling)?;
    expect_float("logits", logits)?;
    let columns = logits.dims()[D - 1];
    if columns > MAX_COLUMNS {
        return Err(OpError::InvalidValue {
            argument: "columns",
            expected: format!("at most {MAX_COLUMNS}"),
            actual: columns,
        });
    }
    expect_words("seeds", &draws.seeds)?;
    expect_words("positions", &draws.positions)?;
    expect_shape("seeds", draws.seeds.dims(), [sequences, 2])?;
    expect_shape("positions", draws.positions.dims(), [sequences])?;
    let device = logits.device();
    expect_device("seeds", &draws.seeds.device(), "logits", &device)?;
    expect_device("positions", &draws.positions.device(), "logits", &device)
}

pub(super) fn check_drafts(logits: &Tensor<3>, drafts: &Tensor<2, Int>) -> Result<(), OpError> {
    let [sequences, rows, _] = logits.dims();
    if rows == 0 {
        return Err(OpError::InvalidValue {
            argument: "rows of a sequence",
            expected: "one more than there are drafts".into(),
            actual: rows,
        });
    }
    expect_words("drafts", drafts)?;
    expect_shape("drafts", drafts.dims(), [sequences, rows - 1])?;
    expect_device("drafts", &drafts.device(), "logits", &logits.device())
}

fn expect_words<const D: usize, K: Basic>(
    argument: &'static str,
    tensor: &Tensor<D, K>,
) -> Result<(), OpError> {
    let accepted = [DType::I32, DType::I64, DType::U32, DType::U64];
    expect_dtype(argument, "I32, I64, U32 or U64", tensor, &accepted)
}

fn check_sampling(sampling: &Sampling) -> Result<(), OpError> {
    let check = |fits: bool, argument, actual: f32, expected| match fits {
        true => Ok(()),
        false => Err(OpError::InvalidFloat {
            argument,
            expected,
            actual: actual.to_string(),
        }),
    };
    let Sampling {
        temperature,
        top_k: _,
        top_p,
        min_p,
    } = *sampling;
    check(
        temperature.is_finite() && temperature >= 0.0,
        "temperature",
        temperature,
        "a finite number, 0 or above",
    )?;
    check(
        top_p > 0.0 && top_p <= 1.0,
        "top_p",
        top_p,
        "above 0 and at most 1",
    )?;
    check(
        (0.0..=1.0).contains(&min_p),
        "min_p",
        min_p,
        "between 0 and 1",
    )
}
