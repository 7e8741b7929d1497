//! Tokens from logits, where the logits are: the highest one, or a seeded draw after temperature, top-k, top-p and min-p.
//!
//! Nothing is read back, so that the token of one decode step can be the input of the next.
//!
//! # What is drawn from
//!
//! Each step keeps some of the tokens that the one before has kept, in this order:
//!
//! 1. A logit that is NaN or `-inf` is no candidate. Where some are `+inf`, these are the only candidates, and all as likely.
//! 2. Temperature: the weight of a token is `exp((logit - highest) / temperature)`.
//! 3. Top-k: the `k` highest logits; of equal ones, those of the lower ids.
//! 4. Top-p: as few of the highest weights as sum to that share of all that are left; of equal ones, those of the lower ids.
//! 5. Min-p: the weights that are at least that share of the highest.
//!
//! A token is drawn in proportion to its weight. Without a candidate, it is -1.
//!
//! # How exactly
//!
//! Weights are integers, two to the power of 43 for the most likely token, rounded down from a value that is right to about 1e-7 (as
//! f32 functions are): what is less likely than the most likely token by a factor of 9e12 has the weight 0 and is never drawn. Sums of
//! them are exact, and so is every comparison above. No function of a device's own is involved. So the same logits, seed and position
//! give the same token on every device, among any other rows, in every launch. (Devices that take numbers below 1e-37 for 0 may tell
//! apart fewer logits that are no further from each other than that.)
//!
//! # Random numbers
//!
//! Philox-4x32-10, a generator without a state: seed and position give 64 bits, which divide the weights in the order of the ids. A
//! sequence draws the same tokens wherever in a batch it is, and in whatever portions.

mod backend;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
mod reference;
mod validation;
mod weight;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::OpError;
use backend::SamplingOps;

/// Longest row of logits.
pub const MAX_COLUMNS: usize = 1 << 20;

/// How tokens are chosen. The default is greedy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 always takes the highest one, of equal ones that of the lowest id.
    pub temperature: f32,
    /// Keeps that many of the highest logits; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of the most likely tokens that have that share of the probability; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least that many times as likely as the most likely one; 0 keeps all.
    pub min_p: f32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
        }
    }
}

/// Where in the random numbers of its own each sequence is. Read only where the temperature is not 0.
#[derive(Clone, Debug)]
pub struct Draws {
    /// `[sequences, 2]`, any integer of 32 bits or more: see [`seed_words`].
    pub seeds: Tensor<2, Int>,
    /// `[sequences]`, any integer of 32 bits or more, of which 32 count: those of the first row of each sequence. A token's position in
    /// its text is one that is used once.
    pub positions: Tensor<1, Int>,
}

/// What came of drafts.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// `[sequences, drafts + 1]`, i32: the drafts that stand and one token more, the correction of the first that fell or, where all
    /// stand, the token after the last; then -1.
    pub tokens: Tensor<2, Int>,
    /// `[sequences]`, i32: how many drafts stand.
    pub accepted: Tensor<1, Int>,
}

/// Seeds as [`Draws`] have them, `[seeds, 2]`: low word, high word.
pub fn seed_words(seeds: &[u64], device: &Device) -> Tensor<2, Int> {
    let words = seeds
        .iter()
        .flat_map(|&seed| [seed as i32, (seed >> 32) as i32]);
    let data = TensorData::new(words.collect::<Vec<i32>>(), [seeds.len(), 2]);
    Tensor::from_data(data, (device, DType::I32))
}

/// A token for each row of logits; see [what is drawn from](self#what-is-drawn-from).
///
/// # Shapes and dtypes
///
/// - `logits`: `[sequences, columns]`, f32 / f16 / bf16, whose columns are the ids
/// - output: `[sequences]`, i32; -1 for a row without candidates
///
/// # Errors
///
/// [`OpError`] for parameters out of range, a dtype, shape or device that does not fit, and more than [`MAX_COLUMNS`] columns.
pub fn sample(
    logits: Tensor<2>,
    sampling: &Sampling,
    draws: Draws,
) -> Result<Tensor<1, Int>, OpError> {
    let [sequences, columns] = logits.dims();
    validation::check(&logits, sequences, sampling, &draws)?;
    Ok(chosen(logits, [sequences, columns], sampling, draws))
}

/// Verifies drafts: those stand that are what would have been drawn without them, from the first on.
///
/// The tokens are therefore those that [`sample`] gives one after the other for the same seeds and positions, whatever the drafts are.
/// As a draft that is made without regard to the random numbers stands with the probability that its token has, this is the rule of
/// Leviathan et al. and Chen et al. for drafts that are not drawn themselves, such as the most likely tokens of a multi-token-prediction
/// head; for drafts that are, it keeps the distribution, and fewer of them may stand than with that rule.
///
/// # Shapes and dtypes
///
/// - `logits`: `[sequences, drafts + 1, columns]`, f32 / f16 / bf16: row `i` is what follows the first `i` drafts
/// - `drafts`: `[sequences, drafts]`, any integer of 32 bits or more. One that is no id falls, for instance -1 where a sequence has fewer.
/// - `draws`: of each sequence; row `i` draws at its position plus `i`
///
/// # Errors
///
/// As [`sample`].
pub fn verify(
    logits: Tensor<3>,
    drafts: Tensor<2, Int>,
    sampling: &Sampling,
    draws: Draws,
) -> Result<Verdict, OpError> {
    let [sequences, rows, columns] = logits.dims();
    validation::check(&logits, sequences, sampling, &draws)?;
    validation::check_drafts(&logits, &drafts)?;
    let device = logits.device();
    let tokens = chosen(
        logits.reshape([sequences * rows, columns]),
        [sequences, columns],
        sampling,
        draws,
    );
    if sequences == 0 || rows == 1 {
        return Ok(Verdict {
            tokens: tokens.reshape([sequences, rows]),
            accepted: Tensor::zeros([sequences], (&device, DType::I32)),
        });
    }
    let (tokens, accepted) =
        Dispatch::verify_drafts(tokens.into_dispatch(), drafts.into_dispatch());
    Ok(Verdict {
        tokens: Tensor::from_dispatch(tokens),
        accepted: Tensor::from_dispatch(accepted),
    })
}

/// Of arguments that fit.
fn chosen(
    logits: Tensor<2>,
    [sequences, columns]: [usize; 2],
    sampling: &Sampling,
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
