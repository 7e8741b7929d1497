use burn::tensor::{DType, Int, Tensor, kind::Basic};

use super::params::{
    LaneParams, MAX_COLUMNS, MAX_LOGIT_BIAS, MAX_TOP_LOG_PROBS, Penalties, SamplingParams,
};
use crate::OpError;
use crate::validation::{
    expect_device, expect_dtype, expect_float, expect_number, expect_shape, invalid,
};

/// Checks logits, whose last dimension is columns.
pub(super) fn check_logits<const D: usize>(logits: &Tensor<D>) -> Result<(), OpError> {
    expect_float("logits", logits)?;
    let columns = logits.dims()[D - 1];
    if columns > MAX_COLUMNS {
        return Err(invalid(
            "columns",
            format!("at most {MAX_COLUMNS}"),
            columns,
        ));
    }
    Ok(())
}

/// Checks the positions of the lanes, which are the first dimension of the logits.
pub(super) fn check_positions<const D: usize>(
    logits: &Tensor<D>,
    positions: &Tensor<1, Int>,
) -> Result<(), OpError> {
    expect_words("positions", positions)?;
    expect_shape("positions", positions.dims(), [logits.dims()[0]])?;
    expect_device("positions", &positions.device(), "logits", &logits.device())
}

pub(super) fn check_counts(logits: &Tensor<3>, counts: &Tensor<2, Int>) -> Result<(), OpError> {
    let [lanes, _, columns] = logits.dims();
    expect_shape("counts", counts.dims(), [lanes, columns])?;
    expect_device("counts", &counts.device(), "logits", &logits.device())
}

pub(super) fn check_tokens(
    tokens: &Tensor<2, Int>,
    counts: &Tensor<2, Int>,
) -> Result<(), OpError> {
    expect_words("tokens", tokens)?;
    let [lanes, count] = tokens.dims();
    expect_shape("tokens", [lanes, count], [counts.dims()[0], count])?;
    expect_device("tokens", &tokens.device(), "counts", &counts.device())
}

pub(super) fn check_log_probs(
    logits: &Tensor<2>,
    tokens: &Tensor<1, Int>,
    top: usize,
) -> Result<(), OpError> {
    check_logits(logits)?;
    expect_dtype("tokens", "I32", tokens, &[DType::I32])?;
    expect_shape("tokens", tokens.dims(), [logits.dims()[0]])?;
    expect_device("tokens", &tokens.device(), "logits", &logits.device())?;
    if top > MAX_TOP_LOG_PROBS {
        return Err(invalid("top", format!("at most {MAX_TOP_LOG_PROBS}"), top));
    }
    Ok(())
}

pub(super) fn check_lane(lane: usize, lanes: usize) -> Result<(), OpError> {
    if lane < lanes {
        return Ok(());
    }
    Err(invalid("lane", format!("below {lanes}"), lane))
}

/// Checks that all tokens are columns.
pub(super) fn check_ids(
    argument: &'static str,
    tokens: &[u32],
    vocabulary: usize,
) -> Result<(), OpError> {
    match tokens.iter().find(|&&token| token as usize >= vocabulary) {
        Some(&token) => {
            let expected = format!("tokens below {vocabulary}");
            Err(invalid(argument, expected, token as usize))
        }
        None => Ok(()),
    }
}

pub(super) fn check_lane_params(params: &LaneParams, vocabulary: usize) -> Result<(), OpError> {
    check_sampling(&params.sampling)?;
    check_penalties(&params.penalties)?;
    check_logit_bias(&params.logit_bias, vocabulary)
}

fn check_logit_bias(bias: &[(u32, f32)], vocabulary: usize) -> Result<(), OpError> {
    if bias.len() > MAX_LOGIT_BIAS {
        let expected = format!("at most {MAX_LOGIT_BIAS}");
        return Err(invalid("logit_bias entries", expected, bias.len()));
    }
    let mut tokens: Vec<u32> = bias.iter().map(|entry| entry.0).collect();
    check_ids("logit_bias", &tokens, vocabulary)?;
    tokens.sort_unstable();
    if let Some(pair) = tokens.windows(2).find(|pair| pair[0] == pair[1]) {
        let expected = "each token once";
        return Err(invalid("logit_bias", expected, pair[0] as usize));
    }
    bias.iter().try_for_each(|&(_, value)| {
        let expected = "a number or -inf";
        expect_number(value < f32::INFINITY, "logit_bias", value, expected)
    })
}

pub(super) fn check_drafts(logits: &Tensor<3>, drafts: &Tensor<2, Int>) -> Result<(), OpError> {
    let [lanes, rows, _] = logits.dims();
    if rows == 0 {
        return Err(OpError::InvalidValue {
            argument: "rows of a sequence",
            expected: "one more than there are drafts".into(),
            actual: rows,
        });
    }
    expect_words("drafts", drafts)?;
    expect_shape("drafts", drafts.dims(), [lanes, rows - 1])?;
    expect_device("drafts", &drafts.device(), "logits", &logits.device())
}

/// Checks drafts against the tokens that follow them.
pub(super) fn check_accepted(
    tokens: &Tensor<2, Int>,
    drafts: &Tensor<2, Int>,
) -> Result<(), OpError> {
    let [lanes, count] = drafts.dims();
    expect_dtype("tokens", "I32", tokens, &[DType::I32])?;
    expect_shape("tokens", tokens.dims(), [lanes, count + 1])?;
    expect_words("drafts", drafts)?;
    expect_device("drafts", &drafts.device(), "tokens", &tokens.device())
}

fn expect_words<const D: usize, K: Basic>(
    argument: &'static str,
    tensor: &Tensor<D, K>,
) -> Result<(), OpError> {
    let accepted = [DType::I32, DType::I64, DType::U32, DType::U64];
    expect_dtype(argument, "I32, I64, U32 or U64", tensor, &accepted)
}

fn check_penalties(penalties: &Penalties) -> Result<(), OpError> {
    let Penalties {
        repetition,
        presence,
        frequency,
    } = *penalties;
    let fits = repetition.is_finite() && repetition > 0.0;
    let expected = "a finite number above 0";
    expect_number(fits, "repetition_penalty", repetition, expected)?;
    let among = |argument, value| {
        let fits = (-2.0..=2.0).contains(&value);
        expect_number(fits, argument, value, "between -2 and 2")
    };
    among("presence_penalty", presence)?;
    among("frequency_penalty", frequency)
}

fn check_sampling(sampling: &SamplingParams) -> Result<(), OpError> {
    let SamplingParams {
        temperature,
        top_k: _,
        top_p,
        min_p,
    } = *sampling;
    let fits = temperature.is_finite() && temperature >= 0.0;
    let expected = "a finite number, 0 or above";
    expect_number(fits, "temperature", temperature, expected)?;
    let fits = top_p > 0.0 && top_p <= 1.0;
    expect_number(fits, "top_p", top_p, "above 0 and at most 1")?;
    let fits = (0.0..=1.0).contains(&min_p);
    expect_number(fits, "min_p", min_p, "between 0 and 1")
}
