//! Text generation: from a prompt to its continuation, token by token, with or without speculative
//! drafts.
//!
//! [`TextGeneration`] streams text, [`Generation`] token ids; both are iterators over one text of
//! an [`Engine`], which decodes many at once. Around it:
//!
//! * [`TextTokenizer`] and [`DecodeStream`]: text to ids and ids to text, whole or one id at a
//!   time;
//! * [`SamplingConfig`]: how a token is chosen, on the device;
//! * [`Constraint`]: which tokens a text may have, such as those of a grammar;
//! * [`StopStrings`]: ends a text stream at a stop string that may span several tokens.
//!
//! Every failure is a [`GenerateError`].

mod engine;
mod error;
mod generation;
mod request_id;
mod sampling;
mod stats;
mod stop;
mod text;
mod tokenizer;

pub use crate::config::MAX_DRAFTS;
pub use engine::{
    Constraint, ConstraintError, DEFAULT_PREFILL_CHUNK, Engine, EngineConfig, FinishReason,
    GraphUsage, LogitsProcessor, MAX_LANES, Output, Progress, Request, TokenLogProbs,
};
pub use error::GenerateError;
pub use generation::{GenerateConfig, Generation};
pub use request_id::RequestId;
pub use sampling::{SamplingConfig, greedy_token};
pub use stats::{PositionStats, SpeculativeStats};
pub use stop::{StopStep, StopStrings};
pub use text::TextGeneration;
pub use tokenizer::{DecodeStream, SpecialTokens, TextTokenizer};
