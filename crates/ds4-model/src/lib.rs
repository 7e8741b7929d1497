//! DeepSeek-V4 for the Burn deep-learning framework.

pub mod config;
pub mod generate;
