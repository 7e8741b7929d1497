//! The engine: decodes any number of texts, with or without drafts, by one step for all of them.

mod config;
mod constraint;
mod decode;
mod drafter;
mod group;
mod lanes;
mod mark;
mod memory;
mod prefix;
mod prompt;
mod recorder;
mod results;
mod schedule;
mod scheduler;
mod setup;
mod state;
mod text;

pub use config::{DEFAULT_PREFILL_CHUNK, EngineConfig, MAX_LANES, Request};
pub use constraint::{Constraint, ConstraintError};
pub use setup::LogitsProcessor;
pub use state::{Engine, GraphUsage, Progress};
pub use text::{FinishReason, Output, TokenLogProbs};
