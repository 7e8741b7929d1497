//! Text generation: from a prompt to its continuation, token by token, with or without speculative drafts.
//!
//! [`TextGeneration`] streams text, [`Generation`] token ids; both are iterators. They are made of pieces that are usable alone:
//!
//! * [`TextTokenizer`] and [`DecodeStream`]: text to ids and ids to text, whole or one id at a time;
//! * [`chat`]: the DeepSeek-V4 chat encoding and its inverse;
//! * [`Sampler`] and [`Distribution`]: logits to the processed target distribution, and draws from it;
//! * [`Decoder`]: decodes on the device, greedily or by seeded draws, one recorded step after the other where the device can;
//! * [`Batch`]: does so for many texts at once, which join and leave while the others go on;
//! * [`MtpProposer`]: drafts tokens with the model's multi-token-prediction layer;
//! * [`verify`]: keeps or corrects speculative drafts without changing the target distribution;
//! * [`StopStrings`]: ends a text stream at a stop string that may span several tokens.
//!
//! Every failure is a [`GenerateError`].

mod batch;
pub mod chat;
mod choice;
mod cycle;
mod decoder;
mod distribution;
mod driver;
mod error;
mod proposer;
mod recorder;
mod sampler;
mod stop;
mod target;
mod text;
mod tokenizer;
mod verifier;

pub use batch::{Batch, BatchConfig, BatchToken, GraphUsage, MAX_SEQUENCES, SequenceId};
pub use chat::{
    ChatOptions, ChatPrompt, Completion, Message, ReasoningEffort, Tool, ToolCall,
    parse_completion, render_chat,
};
pub use choice::Choice;
pub use decoder::Decoder;
pub use distribution::Distribution;
pub use driver::{FinishReason, GenerateConfig, Generation, MAX_DRAFTS};
pub use error::GenerateError;
pub use proposer::MtpProposer;
pub use sampler::{Sampler, SamplingConfig, greedy_token};
pub use stop::{StopStep, StopStrings};
pub use text::TextGeneration;
pub use tokenizer::{DecodeStream, TextTokenizer};
pub use verifier::{PositionStats, SpeculativeStats, Verdict, verify, verify_with_proposals};
