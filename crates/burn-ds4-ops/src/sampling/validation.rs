use burn::tensor::{Int, Tensor};

use super::params::{
    LaneParams, MAX_COLUMNS, MAX_LOGIT_BIAS, MAX_TOP_LOG_PROBS, Penalties, SamplingParams,
};
use crate::OpError;
use crate::validation::{
    I32, WIDE_INTEGERS, expect_float, expect_number, expect_placed, expect_tensor, expect_value,
};

/// Checks logits, whose last dimension is columns.
pub(super) fn check_logits<const D: usize>(logits: &Tensor<D>) -> Result<(), OpError> {
    expect_float("logits", logits)?;
    let columns = logits.dims()[D - 1];
    let expected = format_args!("at most {MAX_COLUMNS}");
    expect_value(columns <= MAX_COLUMNS, "columns", columns, expected)
}

/// Checks the positions of the lanes, which are the first dimension of the logits.
pub(super) fn check_positions<const D: usize>(
    logits: &Tensor<D>,
    positions: &Tensor<1, Int>,
) -> Result<(), OpError> {
    let (shape, like) = ([logits.dims()[0]], ("logits", &logits.device()));
    expect_tensor(("positions", positions), WIDE_INTEGERS, shape, like)
}

pub(super) fn check_counts(logits: &Tensor<3>, counts: &Tensor<2, Int>) -> Result<(), OpError> {
    let [lanes, _, columns] = logits.dims();
    let like = ("logits", &logits.device());
    expect_placed(("counts", counts), [lanes, columns], like)
}

pub(super) fn check_tokens(
    tokens: &Tensor<2, Int>,
    counts: &Tensor<2, Int>,
) -> Result<(), OpError> {
    let shape = [counts.dims()[0], tokens.dims()[1]];
    let like = ("counts", &counts.device());
    expect_tensor(("tokens", tokens), WIDE_INTEGERS, shape, like)
}

pub(super) fn check_log_probs(
    logits: &Tensor<2>,
    tokens: &Tensor<1, Int>,
    top: usize,
) -> Result<(), OpError> {
    check_logits(logits)?;
    let (shape, like) = ([logits.dims()[0]], ("logits", &logits.device()));
    expect_tensor(("tokens", tokens), I32, shape, like)?;
    let expected = format_args!("at most {MAX_TOP_LOG_PROBS}");
    expect_value(top <= MAX_TOP_LOG_PROBS, "top", top, expected)
}

pub(super) fn check_lane(lane: usize, lanes: usize) -> Result<(), OpError> {
    expect_value(lane < lanes, "lane", lane, format_args!("below {lanes}"))
}

/// Checks that all tokens are columns.
pub(super) fn check_ids(
    argument: &'static str,
    tokens: &[u32],
    vocabulary: usize,
) -> Result<(), OpError> {
    tokens.iter().try_for_each(|&token| {
        let (token, expected) = (token as usize, format_args!("tokens below {vocabulary}"));
        expect_value(token < vocabulary, argument, token, expected)
    })
}

pub(super) fn check_lane_params(params: &LaneParams, vocabulary: usize) -> Result<(), OpError> {
    check_sampling(&params.sampling)?;
    check_penalties(&params.penalties)?;
    check_logit_bias(&params.logit_bias, vocabulary)
}

fn check_logit_bias(bias: &[(u32, f32)], vocabulary: usize) -> Result<(), OpError> {
    let (entries, expected) = (bias.len(), format_args!("at most {MAX_LOGIT_BIAS}"));
    expect_value(
        entries <= MAX_LOGIT_BIAS,
        "logit_bias entries",
        entries,
        expected,
    )?;
    let mut tokens: Vec<u32> = bias.iter().map(|entry| entry.0).collect();
    check_ids("logit_bias", &tokens, vocabulary)?;
    tokens.sort_unstable();
    for pair in tokens.windows(2) {
        expect_value(
            pair[0] < pair[1],
            "logit_bias",
            pair[0] as usize,
            "each token once",
        )?;
    }
    bias.iter().try_for_each(|&(_, value)| {
        let expected = "a number or -inf";
        expect_number(value < f32::INFINITY, "logit_bias", value, expected)
    })
}

pub(super) fn check_drafts(logits: &Tensor<3>, drafts: &Tensor<2, Int>) -> Result<(), OpError> {
    let [lanes, rows, _] = logits.dims();
    let expected = "one more than there are drafts";
    expect_value(rows > 0, "rows of a sequence", rows, expected)?;
    let like = ("logits", &logits.device());
    expect_tensor(("drafts", drafts), WIDE_INTEGERS, [lanes, rows - 1], like)
}

/// Checks drafts against the tokens that follow them.
pub(super) fn check_accepted(
    tokens: &Tensor<2, Int>,
    drafts: &Tensor<2, Int>,
) -> Result<(), OpError> {
    let [lanes, count] = drafts.dims();
    let like = ("tokens", &tokens.device());
    expect_tensor(("tokens", tokens), I32, [lanes, count + 1], like)?;
    expect_tensor(("drafts", drafts), WIDE_INTEGERS, [lanes, count], like)
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
