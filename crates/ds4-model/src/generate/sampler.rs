//! From logits to a token: the processed target distribution and seeded draws from it.

use std::cmp::Ordering;

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::distribution::Distribution;
use super::error::GenerateError;

/// Tokens that the search for the top-p set sorts first; it grows fourfold until the set is found.
const TOP_P_FIRST_CHUNK: usize = 64;

/// How tokens are chosen. The default is greedy decoding.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingConfig {
    /// Divides the logits; 0 always takes the most probable token.
    pub temperature: f32,
    /// Keeps the `top_k` most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most probable tokens whose mass reaches `top_p`; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least `min_p` times as probable as the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that have already occurred; 1 leaves them alone.
    pub repetition_penalty: f32,
    /// Selects the random numbers: the same seed gives the same text, where the logits are the same.
    ///
    /// Which they are depends on where a token is chosen (see [`GenerateConfig`](super::GenerateConfig)): on the device, those of
    /// Philox-4x32-10 for the seed and the token's position in the text; on the host, ChaCha12 with the seed as its key. So a seed
    /// gives one text without drafts and a repetition penalty, and another with them.
    pub seed: u64,
}

impl Default for SamplingConfig {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }
}

impl SamplingConfig {
    /// Whether the token of the highest logit is chosen, whatever came before.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 && self.is_memoryless()
    }

    /// Whether what is chosen depends on the logits alone, and not on the tokens before.
    pub(super) fn is_memoryless(&self) -> bool {
        self.repetition_penalty == 1.0
    }

    /// Checks every parameter against its range.
    ///
    /// # Errors
    /// [`GenerateError::SamplingParameter`] with the first parameter that is out of range.
    pub fn validate(&self) -> Result<(), GenerateError> {
        let check = |ok: bool, name, value, expected| match ok {
            true => Ok(()),
            false => Err(GenerateError::SamplingParameter {
                name,
                value,
                expected,
            }),
        };
        let temperature = self.temperature;
        let finite = temperature.is_finite() && temperature >= 0.0;
        check(
            finite,
            "temperature",
            temperature,
            "a finite number, 0 or above",
        )?;
        let top_p = self.top_p;
        check(
            top_p > 0.0 && top_p <= 1.0,
            "top_p",
            top_p,
            "above 0 and at most 1",
        )?;
        let min_p = self.min_p;
        check(
            (0.0..=1.0).contains(&min_p),
            "min_p",
            min_p,
            "between 0 and 1",
        )?;
        let penalty = self.repetition_penalty;
        let finite = penalty.is_finite() && penalty > 0.0;
        check(
            finite,
            "repetition_penalty",
            penalty,
            "a finite number above 0",
        )
    }
}

/// The most probable token: the highest logit, of equal ones the lowest id. NaN is never chosen.
///
/// # Errors
/// [`GenerateError::NoCandidate`] where no logit is above negative infinity.
pub fn greedy_token(logits: &[f32]) -> Result<u32, GenerateError> {
    let mut best = (None, f32::NEG_INFINITY);
    for (id, &logit) in logits.iter().enumerate() {
        if logit > best.1 {
            best = (Some(id as u32), logit);
        }
    }
    best.0
        .ok_or(GenerateError::NoCandidate { len: logits.len() })
}

/// A token with its logit, later its weight.
#[derive(Clone, Copy)]
struct Candidate {
    id: u32,
    score: f64,
}

/// Higher score first, of equal scores the lower id first. Scores are never NaN.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.score
        .partial_cmp(&a.score)
        .unwrap_or(Ordering::Equal)
        .then(a.id.cmp(&b.id))
}

/// Turns logits into distributions and draws tokens from them.
///
/// The random numbers come from ChaCha12 with the seed as key, so that a seed gives the same stream on every machine
/// and in every release.
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplingConfig,
    rng: ChaCha12Rng,
}

impl Sampler {
    /// A sampler at the start of its seed's stream.
    ///
    /// # Errors
    /// Those of [`SamplingConfig::validate`].
    pub fn new(config: SamplingConfig) -> Result<Self, GenerateError> {
        config.validate()?;
        // Spelt out because `seed_from_u64` leaves the expansion of the seed to the generator's crate.
        let mut key = [0; 32];
        key[..8].copy_from_slice(&config.seed.to_le_bytes());
        Ok(Self {
            rng: ChaCha12Rng::from_seed(key),
            config,
        })
    }

    /// The parameters of this sampler.
    pub fn config(&self) -> &SamplingConfig {
        &self.config
    }

    /// The target distribution of the next token, one logit per token id.
    ///
    /// Applied in this order: repetition penalty over the tokens of `history` (each once), temperature, top-k, top-p,
    /// min-p. Ties: the lower id is kept. A NaN or negatively infinite logit is never chosen; where logits are
    /// positively infinite, those tokens are the only candidates and equally probable. `history` is read only where
    /// the repetition penalty is not 1.
    ///
    /// # Errors
    /// [`GenerateError::NoCandidate`] where no logit is above negative infinity, [`GenerateError::HistoryToken`] for a
    /// history id without a logit.
    pub fn distribution(
        &self,
        logits: &[f32],
        history: &[u32],
    ) -> Result<Distribution, GenerateError> {
        if self.config.is_greedy() {
            return greedy_token(logits).map(Distribution::one_hot);
        }
        // f64 from here on: no product, quotient or difference of f32 values overflows.
        let mut scores: Vec<f64> = logits.iter().copied().map(f64::from).collect();
        if self.config.repetition_penalty != 1.0 {
            self.penalise(logits, &mut scores, history)?;
        }
        let none = GenerateError::NoCandidate { len: logits.len() };
        let mut candidates = candidates(&scores);
        if self.config.temperature == 0.0 {
            let best = candidates.iter().copied().min_by(by_rank).ok_or(none)?;
            return Ok(Distribution::one_hot(best.id));
        }
        self.filter(&mut candidates);
        candidates.sort_unstable_by_key(|candidate| candidate.id);
        Distribution::normalised(candidates.into_iter().map(|c| (c.id, c.score)).collect())
            .ok_or(none)
    }

    /// Draws a token.
    pub fn sample(&mut self, distribution: &Distribution) -> u32 {
        let u = self.uniform();
        distribution.quantile(u)
    }

    /// A uniform number in `[0, 1)`.
    pub(super) fn uniform(&mut self) -> f64 {
        // The 53 bits that an f64 holds.
        (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn penalise(
        &self,
        logits: &[f32],
        scores: &mut [f64],
        history: &[u32],
    ) -> Result<(), GenerateError> {
        let penalty = f64::from(self.config.repetition_penalty);
        for (index, &token) in history.iter().enumerate() {
            let Some(&logit) = logits.get(token as usize) else {
                return Err(GenerateError::HistoryToken {
                    index,
                    token,
                    vocab_size: logits.len(),
                });
            };
            let logit = f64::from(logit);
            // Always from the unpenalised logit: a token that occurs twice is penalised once.
            scores[token as usize] = if logit < 0.0 {
                logit * penalty
            } else {
                logit / penalty
            };
        }
        Ok(())
    }

    /// Temperature, top-k, top-p and min-p: logits in, weights relative to the most probable token out.
    fn filter(&self, candidates: &mut Vec<Candidate>) {
        let top_k = self.config.top_k;
        if 0 < top_k && top_k < candidates.len() {
            candidates.select_nth_unstable_by(top_k - 1, by_rank);
            candidates.truncate(top_k);
        }
        let highest = candidates
            .iter()
            .map(|candidate| candidate.score)
            .fold(f64::NEG_INFINITY, f64::max);
        let temperature = f64::from(self.config.temperature);
        for candidate in candidates.iter_mut() {
            candidate.score = ((candidate.score - highest) / temperature).exp();
        }
        if self.config.top_p < 1.0 {
            keep_top_p(candidates, f64::from(self.config.top_p));
        }
        let min_p = f64::from(self.config.min_p);
        candidates.retain(|candidate| candidate.score >= min_p && candidate.score > 0.0);
    }
}

/// The tokens that can be chosen at all. Where infinities compete, they share the mass equally.
fn candidates(scores: &[f64]) -> Vec<Candidate> {
    let numbered = || {
        scores.iter().enumerate().map(|(id, &score)| Candidate {
            id: id as u32,
            score,
        })
    };
    if scores.contains(&f64::INFINITY) {
        return numbered()
            .filter(|c| c.score == f64::INFINITY)
            .map(|c| Candidate { score: 0.0, ..c })
            .collect();
    }
    numbered().filter(|c| c.score > f64::NEG_INFINITY).collect()
}

/// Keeps the highest weights until their sum reaches `top_p` of all weights. A vocabulary is far larger than the set that
/// is usually kept, so only as many tokens as needed are brought into order.
fn keep_top_p(candidates: &mut Vec<Candidate>, top_p: f64) {
    let target = top_p
        * candidates
            .iter()
            .map(|candidate| candidate.score)
            .sum::<f64>();
    let (mut sorted, mut chunk, mut mass) = (0, TOP_P_FIRST_CHUNK, 0.0);
    while sorted < candidates.len() {
        let rest = &mut candidates[sorted..];
        let take = chunk.min(rest.len());
        if take < rest.len() {
            rest.select_nth_unstable_by(take - 1, by_rank);
        }
        rest[..take].sort_unstable_by(by_rank);
        for (index, candidate) in rest[..take].iter().enumerate() {
            mass += candidate.score;
            if mass >= target {
                candidates.truncate(sorted + index + 1);
                return;
            }
        }
        sorted += take;
        chunk *= 4;
    }
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
