//! How tokens are chosen, and what the numbers of these operators are limited to.

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

/// Most entries of a lane's logit bias: as many as OpenAI's interface takes.
pub const MAX_LOGIT_BIAS: usize = 300;

/// How logits change with the tokens before, as vLLM defines it. The default changes nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Divides positive logits and multiplies the others, of tokens in prompt or output; above 0.
    pub repetition: f32,
    /// Subtracted from the logits of tokens in the output; -2 to 2.
    pub presence: f32,
    /// Subtracted from the logit of a token as often as the output has the token; -2 to 2.
    pub frequency: f32,
}

impl Default for Penalties {
    fn default() -> Self {
        Self {
            repetition: 1.0,
            presence: 0.0,
            frequency: 0.0,
        }
    }
}

/// How the tokens of one lane are chosen. The default is greedy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LaneParams {
    /// Temperature and filters.
    pub sampling: SamplingParams,
    /// Changes to the logits of tokens that have occurred.
    pub penalties: Penalties,
    /// Tokens, each once, and what is added to their logits, before the penalties: numbers, or
    /// `-inf` for a token that must not be chosen. At most [`MAX_LOGIT_BIAS`].
    pub logit_bias: Vec<(u32, f32)>,
    /// Selects the random numbers.
    pub seed: u64,
}

/// Most of the most likely tokens that [`log_probs`](super::log_probs()) lists: as many as OpenAI's
/// interface does.
pub const MAX_TOP_LOG_PROBS: usize = 20;
