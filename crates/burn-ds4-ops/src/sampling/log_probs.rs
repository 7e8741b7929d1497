//! Log-probabilities of chosen tokens and of the most likely ones.

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use super::backend::SamplingOps;
use super::validation;
use crate::OpError;
use crate::topk::{Order, Windows, top_k};

/// The result of [`log_probs`].
#[derive(Clone, Debug)]
pub struct LogProbs {
    /// `[rows]`, f32: those of the chosen tokens.
    pub chosen: Tensor<1>,
    /// `[rows, top]`, i32: the most likely tokens, the most likely first; of equal ones, that with
    /// the lower id. -1 where there are fewer columns.
    pub top_ids: Tensor<2, Int>,
    /// `[rows, top]`, f32: those of `top_ids`.
    pub top: Tensor<2>,
}

/// The logarithm of the probability of a chosen token, and the most likely tokens with theirs, for
/// each row.
///
/// The probabilities are those of the logits as they are, that is at temperature 1 and without
/// filters. With the logits before penalties and bias, they are those that OpenAI and vLLM report.
///
/// The sum of a row has one order, so that a row gives the same bits among any other rows.
///
/// # Shapes and dtypes
///
/// - `logits`: `[rows, columns]`, f32 / f16 / bf16
/// - `tokens`: `[rows]`, i32, as the operators of this family return them
/// - `top`: at most [`MAX_TOP_LOG_PROBS`](super::MAX_TOP_LOG_PROBS); 0 lists none
///
/// # NaN and infinity
///
/// As in [what is drawn from](super#what-is-drawn-from): a logit that is NaN or `-inf` has the
/// probability 0, and where some are `+inf`, these share everything. The log-probability of a
/// token of probability 0 and of one that is no column is `-inf`.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not match, for too large a `top`, and more
/// than [`MAX_COLUMNS`](super::MAX_COLUMNS) columns.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_ds4_ops::sampling::log_probs;
///
/// let device = Device::flex();
/// let logits = Tensor::<2>::from_data([[1.0, 1.0]], &device);
/// let tokens = Tensor::<1, Int>::from_data([1], &device);
/// let listed = log_probs(logits, tokens, 1)?;
/// let chosen = listed.chosen.into_data().iter::<f32>().next().unwrap();
/// assert!((chosen - 0.5_f32.ln()).abs() < 1e-6);
/// assert_eq!(listed.top_ids.into_data().iter::<i64>().collect::<Vec<_>>(), [0]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn log_probs(
    logits: Tensor<2>,
    tokens: Tensor<1, Int>,
    top: usize,
) -> Result<LogProbs, OpError> {
    validation::check_log_probs(&logits, &tokens, top)?;
    let ([rows, columns], device) = (logits.dims(), logits.device());
    if rows == 0 || columns == 0 {
        let none = f32::NEG_INFINITY;
        return Ok(LogProbs {
            chosen: Tensor::full([rows], none, (&device, DType::F32)),
            top_ids: Tensor::full([rows, top], -1, (&device, DType::I32)),
            top: Tensor::full([rows, top], none, (&device, DType::F32)),
        });
    }
    let tokens = tokens.reshape([rows, 1]);
    if top == 0 {
        return Ok(LogProbs {
            chosen: of(logits, tokens).reshape([rows]),
            top_ids: Tensor::zeros([rows, 0], (&device, DType::I32)),
            top: Tensor::zeros([rows, 0], (&device, DType::F32)),
        });
    }
    let (_, top_ids) = top_k(logits.clone(), Windows::All, top, Order::Value)?;
    let all = of(logits, Tensor::cat(vec![tokens, top_ids.clone()], 1));
    Ok(LogProbs {
        chosen: all.clone().slice([0..rows, 0..1]).reshape([rows]),
        top_ids,
        top: all.slice([0..rows, 1..top + 1]),
    })
}

/// The log-probabilities of some tokens of each row.
fn of(logits: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<2> {
    let probs = Dispatch::log_probs(logits.into_dispatch(), ids.into_dispatch());
    Tensor::from_dispatch(probs)
}
