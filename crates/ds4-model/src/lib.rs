//! DeepSeek-V4 for the Burn deep-learning framework.

pub mod checkpoint;
pub mod config;
pub mod generate;
