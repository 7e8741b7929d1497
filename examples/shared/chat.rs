//! How conversations are rendered.

use clap::ValueEnum;
use ds4_model::generate::{ChatEncoding, ReasoningEffort};

/// The release whose chat prompts a checkpoint was trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Encoding {
    /// DeepSeek-V4 as it was released first.
    V4,
    /// V4-Flash-0731 and later ones.
    #[value(name = "0731")]
    V4Flash0731,
}

impl From<Encoding> for ChatEncoding {
    fn from(encoding: Encoding) -> Self {
        match encoding {
            Encoding::V4 => Self::V4,
            Encoding::V4Flash0731 => Self::V4Flash0731,
        }
    }
}

/// How much a model is asked to think.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Effort {
    /// As much as it does without an instruction.
    Low,
    /// As `low` for the first release, thoroughly for later ones.
    High,
    /// As much as there is an instruction for.
    Max,
}

impl From<Effort> for ReasoningEffort {
    fn from(effort: Effort) -> Self {
        match effort {
            Effort::Low => Self::Low,
            Effort::High => Self::High,
            Effort::Max => Self::Max,
        }
    }
}
