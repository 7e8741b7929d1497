//! Tokens from logits, where the logits are: the highest one, or a seeded draw after temperature,
//! top-k, top-p and min-p.
//!
//! Nothing is read back, so that the token of one decode step can be the input of the next.
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
//! in every launch. (Devices that flush numbers below 1e-37 to 0 may treat logits as equal that
//! differ by no more than that.)
//!
//! # Random numbers
//!
//! Philox-4x32-10, a generator without state: seed and position give 64 bits, which divide the
//! weights in the order of the ids. A sequence draws the same tokens wherever in a batch it is, and
//! however its positions are divided among calls.
//!
//! # Lanes with parameters of their own
//!
//! [`sample`] and [`verify`] have one set of parameters, which a recorded graph holds as it was.
//! [`sample_lanes`] and [`verify_lanes`] read those of each lane from [`BatchParams`], on the
//! device. So does [`apply_penalties`], which comes before them and also reads what the texts have,
//! from [`TokenCounts`]. A step with everything is:
//!
//! 1. [`apply_penalties`], with the drafts of this step
//! 2. [`verify_lanes`]
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
mod penalties;
mod reference;
mod validation;
mod weight;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::OpError;
use backend::SamplingOps;

pub use lanes::{BatchParams, LaneParams, MAX_LOGIT_BIAS, Penalties, sample_lanes, verify_lanes};
pub use log_probs::{LogProbs, MAX_TOP_LOG_PROBS, log_probs};
pub use penalties::{TokenCounts, apply_penalties};

/// Most columns of a row of logits.
pub const MAX_COLUMNS: usize = 1 << 20;

/// How tokens are chosen. The default is greedy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 always takes the highest one, of equal ones that with the lowest id.
    pub temperature: f32,
    /// Keeps this many of the highest logits; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of the most likely tokens that have this much of the probability; 1
    /// keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this many times as likely as the most likely one; 0 keeps all.
    pub min_p: f32,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
        }
    }
}

/// The random numbers that sequences use. Read only where the temperature is not 0.
#[derive(Clone, Debug)]
pub struct Draws {
    /// `[sequences, 2]`, any integer of 32 bits or more: see [`seed_words`].
    pub seeds: Tensor<2, Int>,
    /// `[sequences]`, any integer of 32 bits or more, of which 32 count: those of the first row of
    /// each sequence. Each position must be used once; a token's position in its text is unique.
    pub positions: Tensor<1, Int>,
}

/// The result of [`verify`].
#[derive(Clone, Debug)]
pub struct VerifiedDrafts {
    /// `[sequences, drafts + 1]`, i32: the accepted drafts and one token more, which replaces the
    /// first rejected draft or, where all are accepted, is the bonus token; then -1.
    pub tokens: Tensor<2, Int>,
    /// `[sequences]`, i32: how many drafts are accepted.
    pub accepted: Tensor<1, Int>,
}

/// Seeds in the form that [`Draws`] takes, `[seeds, 2]`: low word, high word.
pub fn seed_words(seeds: &[u64], device: &Device) -> Tensor<2, Int> {
    let words = seeds
        .iter()
        .flat_map(|&seed| [seed as i32, (seed >> 32) as i32]);
    let data = TensorData::new(words.collect::<Vec<i32>>(), [seeds.len(), 2]);
    Tensor::from_data(data, (device, DType::I32))
}

/// Chooses a token for each row of logits; see [what is drawn from](self#what-is-drawn-from).
///
/// # Shapes and dtypes
///
/// - `logits`: `[sequences, columns]`, f32 / f16 / bf16, whose columns are the ids
/// - output: `[sequences]`, i32; -1 for a row without candidates
///
/// # Errors
///
/// [`OpError`] for parameters out of range, a dtype, shape or device that does not match, and more
/// than [`MAX_COLUMNS`] columns.
pub fn sample(
    logits: Tensor<2>,
    sampling: &SamplingParams,
    draws: Draws,
) -> Result<Tensor<1, Int>, OpError> {
    let [sequences, columns] = logits.dims();
    validation::check(&logits, sequences, sampling, &draws)?;
    Ok(chosen(logits, [sequences, columns], sampling, draws))
}

/// Verifies drafts: accepts those that equal what would have been drawn without them, up to the
/// first that does not.
///
/// The tokens are therefore those that [`sample`] gives one after the other for the same seeds and
/// positions, whatever the drafts are. A draft that is made without regard to the random numbers is
/// accepted with the probability of its token. So this is the rule of Leviathan et al. and Chen et
/// al. for drafts that are not drawn themselves, such as the most likely tokens of a
/// multi-token-prediction head. For drafts that are drawn, it keeps the distribution and may accept
/// fewer of them than that rule.
///
/// # Shapes and dtypes
///
/// - `logits`: `[sequences, drafts + 1, columns]`, f32 / f16 / bf16: row `i` is what follows the
///   first `i` drafts
/// - `drafts`: `[sequences, drafts]`, any integer of 32 bits or more. One that is no id is
///   rejected, for instance -1 where a sequence has fewer.
/// - `draws`: for each sequence; row `i` draws at its position plus `i`
///
/// # Errors
///
/// As [`sample`].
pub fn verify(
    logits: Tensor<3>,
    drafts: Tensor<2, Int>,
    sampling: &SamplingParams,
    draws: Draws,
) -> Result<VerifiedDrafts, OpError> {
    let [sequences, rows, columns] = logits.dims();
    validation::check(&logits, sequences, sampling, &draws)?;
    validation::check_drafts(&logits, &drafts)?;
    let tokens = chosen(
        logits.reshape([sequences * rows, columns]),
        [sequences, columns],
        sampling,
        draws,
    );
    Ok(verdict(tokens, drafts))
}

/// Accepts the drafts that equal the tokens that were chosen in their place, up to the first that
/// does not: the last part of [`verify`], for tokens that were chosen by other means.
///
/// # Shapes and dtypes
///
/// - `tokens`: `[sequences, drafts + 1]`, i32: what follows each row
/// - `drafts`: `[sequences, drafts]`, any integer of 32 bits or more
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not match.
pub fn accept_drafts(
    tokens: Tensor<2, Int>,
    drafts: Tensor<2, Int>,
) -> Result<VerifiedDrafts, OpError> {
    validation::check_accepted(&tokens, &drafts)?;
    let [sequences, rows] = tokens.dims();
    Ok(verdict(tokens.reshape([sequences * rows]), drafts))
}

/// Compares valid drafts with the tokens of all rows.
fn verdict(tokens: Tensor<1, Int>, drafts: Tensor<2, Int>) -> VerifiedDrafts {
    let [sequences, count] = drafts.dims();
    if sequences == 0 || count == 0 {
        return VerifiedDrafts {
            accepted: Tensor::zeros([sequences], (&tokens.device(), DType::I32)),
            tokens: tokens.reshape([sequences, count + 1]),
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
fn chosen(
    logits: Tensor<2>,
    [sequences, columns]: [usize; 2],
    sampling: &SamplingParams,
    draws: Draws,
) -> Tensor<1, Int> {
    let [rows, _] = logits.dims();
    if sequences == 0 || columns == 0 {
        return Tensor::full([rows], -1, (&logits.device(), DType::I32));
    }
    Tensor::from_dispatch(Dispatch::sample(
        logits.into_dispatch(),
        draws.seeds.into_dispatch(),
        draws.positions.into_dispatch(),
        *sampling,
    ))
}
