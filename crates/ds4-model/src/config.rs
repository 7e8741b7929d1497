//! The shape of a model: what `config.json` says, in one checked structure.

mod error;
mod json;
mod shape;
mod validate;

#[cfg(test)]
mod tests;

pub use error::{ConfigError, ConfigErrorKind};
pub use json::GenerationDefaults;
pub(crate) use json::eos_token_ids;
pub use shape::{AttentionKind, DsparkParams, MAX_DRAFTS, ModelConfig, YarnConfig};
