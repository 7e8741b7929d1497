//! Text generation on the host: from text to token ids, from logits to a token, from token ids back to text.
//!
//! Nothing here touches a tensor; a model enters only as a slice of logits. The pieces, each usable alone:
//!
//! * [`TextTokenizer`] and [`DecodeStream`]: text to ids and ids to text, whole or one id at a time;
//! * [`chat`]: the DeepSeek-V4 chat encoding and its inverse;
//! * [`Sampler`] and [`Distribution`]: logits to the processed target distribution, and draws from it;
//! * [`verify`]: keeps or corrects speculative drafts without changing the target distribution;
//! * [`StopStrings`]: ends a text stream at a stop string that may span several tokens.
//!
//! Every failure is a [`GenerateError`].

pub mod chat;
mod distribution;
mod error;
mod sampler;
mod stop;
mod tokenizer;
mod verifier;

pub use chat::{
    ChatOptions, ChatPrompt, Completion, Message, ReasoningEffort, Tool, ToolCall,
    parse_completion, render_chat,
};
pub use distribution::Distribution;
pub use error::GenerateError;
pub use sampler::{Sampler, SamplingConfig, greedy_token};
pub use stop::{StopStep, StopStrings};
pub use tokenizer::{DecodeStream, TextTokenizer};
pub use verifier::{PositionStats, SpeculativeStats, Verdict, verify, verify_with_proposals};
