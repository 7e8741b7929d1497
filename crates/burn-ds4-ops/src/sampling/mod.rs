//! Tokens from logits, where the logits are: the highest one, or a seeded draw after temperature,
//! top-k, top-p and min-p.
//!
//! The kernels read nothing back, so that the token of one decode step can be the input of the
//! next. The reference of [`sample`], and so that of [`verify`], chooses on the host: without a
//! kernel, it reads the logits and waits for them.
//!
//! # What is drawn from
//!
//! Each filter keeps some of the tokens that the one before has kept, in this order:
//!
//! 1. A logit that is NaN or `-inf` is no candidate. Where some are `+inf`, these are the only
//!    candidates, and all equally likely.
//! 2. Temperature: the weight of a token is `exp((logit - highest) / temperature)`.
//! 3. Top-k: the `k` highest logits; of equal ones, those with the lower ids.
//! 4. Top-p: the fewest highest weights that sum to that fraction of the remaining total; of equal
//!    ones, those with the lower ids.
//! 5. Min-p: the weights that are at least that fraction of the highest.
//!
//! A token is drawn with a probability proportional to its weight. Without a candidate, it is -1.
//!
//! # How exactly
//!
//! Weights are integers: two to the power of 43 for the most likely token, and rounded down from a
//! value that is accurate to about 1e-7 (as f32 functions are). A token that is less likely than
//! the most likely one by a factor of 9e12 has the weight 0 and is never drawn. Sums of weights are
//! exact, and so is every comparison above. No function is used whose result depends on the device.
//! So the same logits, seed and position give the same token on every device, among any other rows,
//! in every launch. (Logits that differ by no more than 1e-37 may count as equal, on some devices
//! and not on others.)
//!
//! # Random numbers
//!
//! Philox-4x32-10, a generator without state: seed and position give 64 bits, which divide the
//! weights in the order of the ids. A text draws the same tokens in whichever lane it is, and
//! however its positions are divided among calls.
//!
//! # Parameters of lanes
//!
//! A recorded graph holds the arguments of its launches as they were. So [`sample`] and [`verify`]
//! read temperature, filters and seed of each lane from [`BatchParams`], on the device. So does
//! [`apply_penalties`], which comes before them and also reads what the texts have, from
//! [`TokenCounts`]. A step with everything is:
//!
//! 1. [`apply_penalties`], with the drafts of this step
//! 2. [`verify`]
//! 3. [`TokenCounts::count`], with the tokens that are accepted
//! 4. [`log_probs`], with the logits before penalties, for lanes that ask for them

mod backend;
#[cfg(feature = "cube")]
mod kernel;
mod lanes;
#[cfg(feature = "cube")]
mod launch;
mod layout;
mod log_probs;
mod params;
mod penalties;
mod reference;
mod validation;
mod weight;

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use crate::OpError;
use backend::SamplingOps;
use lanes::LaneTables;

pub use lanes::BatchParams;
pub use log_probs::{LogProbs, log_probs};
pub use params::{
    LaneParams, MAX_COLUMNS, MAX_LOGIT_BIAS, MAX_TOP_LOG_PROBS, Penalties, SamplingParams,
};
pub use penalties::{TokenCounts, apply_penalties};

/// The result of [`verify`].
#[derive(Clone, Debug)]
pub struct VerifiedDrafts {
    /// `[lanes, drafts + 1]`, i32: the accepted drafts and one token more, which replaces the
    /// first rejected draft or, where all are accepted, is the bonus token; then -1.
    pub tokens: Tensor<2, Int>,
    /// `[lanes]`, i32: how many drafts are accepted.
    pub accepted: Tensor<1, Int>,
}

/// Chooses a token for each lane by its parameters; see
/// [what is drawn from](self#what-is-drawn-from). Greedy lanes and others may be side by side.
///
/// Penalties and logit bias are not applied: see [`apply_penalties`].
///
/// # Shapes and dtypes
///
/// - `logits`: `[lanes, vocabulary]`, f32 / f16 / bf16, whose columns are the ids
/// - `positions`: `[lanes]`, any integer of 32 bits or more, of which 32 count. A lane must use
///   each position once; a token's position in its text is unique. Greedy lanes have no use for
///   theirs.
/// - output: `[lanes]`, i32; -1 for a row without candidates
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not match, and more than [`MAX_COLUMNS`]
/// columns.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_ds4_ops::sampling::{BatchParams, LaneParams, SamplingParams, sample};
///
/// let device = Device::flex();
/// let logits = Tensor::<2>::from_data([[0.5, 2.0, 1.0], [9.0, 0.0, 0.0]], &device);
/// let drawn = SamplingParams { temperature: 0.8, top_p: 0.9, ..SamplingParams::default() };
/// // The first lane is greedy, the second draws from the most likely tokens.
/// let lanes = [
///     LaneParams::default(),
///     LaneParams { sampling: drawn, seed: 7, ..LaneParams::default() },
/// ];
/// let params = BatchParams::new(&lanes, 3, &device)?;
/// let positions = Tensor::<1, Int>::from_data([0, 0], &device);
/// let ids = sample(logits, &params, positions)?;
/// assert_eq!(ids.into_data().iter::<i64>().collect::<Vec<_>>(), [1, 0]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "top_k_top_p_sampling_from_logits")]
pub fn sample(
    logits: Tensor<2>,
    params: &BatchParams,
    positions: Tensor<1, Int>,
) -> Result<Tensor<1, Int>, OpError> {
    params.check(&logits)?;
    validation::check_positions(&logits, &positions)?;
    Ok(chosen(logits, params, positions))
}

/// Verifies the drafts of each lane: accepts those that equal what would have been drawn without
/// them, up to the first that does not.
///
/// The tokens are therefore those that [`sample`] gives one after the other for the same parameters
/// and positions, whatever the drafts are. A draft that is made without regard to the random
/// numbers is accepted with the probability of its token. So this is the rule of Leviathan et al.
/// and Chen et al. for drafts that are not drawn themselves, such as the most likely tokens of a
/// multi-token-prediction head. For drafts that are drawn, it keeps the distribution and may accept
/// fewer of them than that rule.
///
/// # Shapes and dtypes
///
/// - `logits`: `[lanes, drafts + 1, vocabulary]`, f32 / f16 / bf16: row `i` is what follows the
///   first `i` drafts
/// - `drafts`: `[lanes, drafts]`, any integer of 32 bits or more. One that is no id is rejected,
///   for instance -1 where a lane has fewer.
/// - `positions`: `[lanes]`, as in [`sample`], those of the first rows; row `i` draws at its lane's
///   position plus `i`
///
/// # Errors
///
/// As [`sample`], and for `logits` without rows.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_ds4_ops::sampling::{BatchParams, LaneParams, verify};
///
/// let device = Device::flex();
/// let logits = Tensor::<3>::from_data([[[0.0, 5.0, 0.0], [7.0, 0.0, 0.0]]], &device);
/// let drafts = Tensor::<2, Int>::from_data([[1]], &device);
/// let params = BatchParams::new(&[LaneParams::default()], 3, &device)?;
/// let positions = Tensor::<1, Int>::from_data([0], &device);
/// let verified = verify(logits, drafts, &params, positions)?;
/// assert_eq!(verified.tokens.into_data().iter::<i64>().collect::<Vec<_>>(), [1, 0]);
/// assert_eq!(verified.accepted.into_data().iter::<i64>().collect::<Vec<_>>(), [1]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "rejection_sampler")]
pub fn verify(
    logits: Tensor<3>,
    drafts: Tensor<2, Int>,
    params: &BatchParams,
    positions: Tensor<1, Int>,
) -> Result<VerifiedDrafts, OpError> {
    params.check(&logits)?;
    validation::check_positions(&logits, &positions)?;
    validation::check_drafts(&logits, &drafts)?;
    Ok(verdict(chosen(logits, params, positions), drafts))
}

/// Accepts the drafts that equal the tokens that were chosen in their place, up to the first that
/// does not: the last part of [`verify`], for tokens that were chosen by other means.
///
/// # Shapes and dtypes
///
/// - `tokens`: `[lanes, drafts + 1]`, i32: what follows each row
/// - `drafts`: `[lanes, drafts]`, any integer of 32 bits or more
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not match.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_ds4_ops::sampling::accept_drafts;
///
/// let device = Device::flex();
/// let tokens = Tensor::<2, Int>::from_data([[4, 7, 2]], &device);
/// let drafts = Tensor::<2, Int>::from_data([[4, 9]], &device);
/// let verified = accept_drafts(tokens, drafts)?;
/// assert_eq!(verified.accepted.into_data().iter::<i64>().collect::<Vec<_>>(), [1]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn accept_drafts(
    tokens: Tensor<2, Int>,
    drafts: Tensor<2, Int>,
) -> Result<VerifiedDrafts, OpError> {
    validation::check_accepted(&tokens, &drafts)?;
    let [lanes, rows] = tokens.dims();
    Ok(verdict(tokens.reshape([lanes * rows]), drafts))
}

/// Compares valid drafts with the tokens of all rows.
fn verdict(tokens: Tensor<1, Int>, drafts: Tensor<2, Int>) -> VerifiedDrafts {
    let [lanes, count] = drafts.dims();
    if lanes == 0 || count == 0 {
        return VerifiedDrafts {
            accepted: Tensor::zeros([lanes], (&tokens.device(), DType::I32)),
            tokens: tokens.reshape([lanes, count + 1]),
        };
    }
    let (tokens, accepted) =
        Dispatch::verify_drafts(tokens.into_dispatch(), drafts.into_dispatch());
    VerifiedDrafts {
        tokens: Tensor::from_dispatch(tokens),
        accepted: Tensor::from_dispatch(accepted),
    }
}

/// Chooses a token for each row, given valid arguments.
fn chosen<const D: usize>(
    logits: Tensor<D>,
    params: &BatchParams,
    positions: Tensor<1, Int>,
) -> Tensor<1, Int> {
    let shape = logits.dims();
    let (rows, columns) = (shape[..D - 1].iter().product(), shape[D - 1]);
    if rows == 0 || columns == 0 {
        return Tensor::full([rows], -1, (&logits.device(), DType::I32));
    }
    let logits: Tensor<2> = logits.reshape([rows, columns]);
    let LaneTables { floats, words } = params.tables();
    Tensor::from_dispatch(Dispatch::sample(
        logits.into_dispatch(),
        floats.into_dispatch(),
        words.into_dispatch(),
        positions.into_dispatch(),
    ))
}
