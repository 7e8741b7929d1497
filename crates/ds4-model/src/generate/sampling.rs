//! How a token is chosen from logits.

use burn_ds4_ops::sampling::{LaneParams, MAX_LOGIT_BIAS, Penalties, SamplingParams};

use super::error::GenerateError;

/// How tokens are chosen. The default is greedy decoding.
///
/// Everything is applied on the device, in this order: logit bias, penalties, temperature, top-k,
/// top-p, min-p; see [`burn_ds4_ops::sampling`].
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
    /// Divides positive and multiplies negative logits of tokens that have already occurred, in
    /// prompt or output; 1 leaves them alone.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that the output has, -2 to 2.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token as often as the output has it, -2 to 2.
    pub frequency_penalty: f32,
    /// Tokens, each once, and what is added to their logits, `-inf` for a token that must not be
    /// chosen. At most [`MAX_LOGIT_BIAS`].
    pub logit_bias: Vec<(u32, f32)>,
    /// Selects the random numbers: those of Philox-4x32-10 for the seed and the token's position in
    /// the text. So the same seed gives the same text where the logits are the same to the bit,
    /// whatever the drafts and the other texts are; [`Engine`](super::Engine#which-tokens) says
    /// when they are. Where they are the same up to rounding only, a draw turns if it falls right
    /// between two tokens, or a token is right at the limit of a filter.
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
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplingConfig {
    /// Checks every parameter against its range, and the tokens of the bias against the vocabulary.
    ///
    /// # Errors
    ///
    /// [`GenerateError::SamplingParameter`] with the first parameter that is out of range,
    /// [`GenerateError::LogitBias`] for an entry of the bias.
    pub fn validate(&self, vocab_size: usize) -> Result<(), GenerateError> {
        let not_negative = |value: f32| value.is_finite() && value >= 0.0;
        let fraction = 0.0..=1.0;
        let penalty = -2.0..=2.0;
        let checks = [
            (
                "temperature",
                self.temperature,
                not_negative(self.temperature),
                "a finite number, 0 or above",
            ),
            (
                "top_p",
                self.top_p,
                self.top_p > 0.0 && self.top_p <= 1.0,
                "above 0 and at most 1",
            ),
            (
                "min_p",
                self.min_p,
                fraction.contains(&self.min_p),
                "between 0 and 1",
            ),
            (
                "repetition_penalty",
                self.repetition_penalty,
                not_negative(self.repetition_penalty) && self.repetition_penalty > 0.0,
                "a finite number above 0",
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                penalty.contains(&self.presence_penalty),
                "between -2 and 2",
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                penalty.contains(&self.frequency_penalty),
                "between -2 and 2",
            ),
        ];
        if let Some((name, value, _, expected)) = checks.into_iter().find(|(.., ok, _)| !ok) {
            return Err(GenerateError::SamplingParameter {
                name,
                value,
                expected,
            });
        }
        self.check_bias(vocab_size)
    }

    fn check_bias(&self, vocab_size: usize) -> Result<(), GenerateError> {
        let bias = &self.logit_bias;
        if bias.len() > MAX_LOGIT_BIAS {
            return Err(GenerateError::LogitBias {
                index: MAX_LOGIT_BIAS,
                reason: format!("there are {}, at most {MAX_LOGIT_BIAS} fit", bias.len()),
            });
        }
        for (index, (token, value)) in bias.iter().enumerate() {
            let reason = if *token as usize >= vocab_size {
                format!("token {token} is outside the vocabulary of {vocab_size}")
            } else if value.is_nan() || *value == f32::INFINITY {
                format!("{value} is neither a number nor -inf")
            } else if bias[..index].iter().any(|(known, _)| known == token) {
                format!("token {token} has an entry already")
            } else {
                continue;
            };
            return Err(GenerateError::LogitBias { index, reason });
        }
        Ok(())
    }

    /// Temperature and filters.
    pub fn filters(&self) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
        }
    }

    fn penalties(&self) -> Penalties {
        Penalties {
            repetition: self.repetition_penalty,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
        }
    }

    /// Whether logits change before temperature and filters.
    pub(super) fn changes_logits(&self) -> bool {
        self.penalties() != Penalties::default() || !self.logit_bias.is_empty()
    }

    /// The same as parameters of a lane.
    pub(super) fn lane_params(&self) -> LaneParams {
        LaneParams {
            sampling: self.filters(),
            penalties: self.penalties(),
            logit_bias: self.logit_bias.clone(),
            seed: self.seed,
        }
    }
}

/// The most probable token: the highest logit, of equal ones the lowest id. NaN is never chosen.
///
/// # Errors
///
/// [`GenerateError::NoCandidate`] where no logit is above negative infinity.
///
/// # Example
///
/// ```
/// use ds4_model::generate::greedy_token;
///
/// assert_eq!(greedy_token(&[0.5, 2.0, f32::NAN, 2.0])?, 1);
/// assert!(greedy_token(&[f32::NAN, f32::NEG_INFINITY]).is_err());
/// # Ok::<(), ds4_model::generate::GenerateError>(())
/// ```
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
