//! The shape of a model: what `config.json` says, in one checked structure.

mod error;
mod json;
mod shape;
mod shared;
mod validate;

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::v41_flash;

pub use error::{ConfigError, ConfigErrorKind};
pub use json::GenerationDefaults;
pub(crate) use json::eos_token_ids;
pub use shape::{
    AttentionKind, CacheFormat, CandidateParams, DsparkParams, EngramParams, MAX_DRAFTS,
    ModelConfig, SharedRows, YarnConfig,
};
