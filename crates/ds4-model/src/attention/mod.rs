//! Attention: a sliding window, and compressed rows of everything before it.

mod candidates;
mod compressor;
mod config;
mod forward;
mod indexer;
mod modules;
mod shared;

pub use candidates::Candidates;
pub use compressor::{Compressor, CompressorConfig};
pub use config::AttentionConfig;
pub use indexer::{Indexer, IndexerConfig};
pub use modules::Attention;
pub use shared::IndexKeys;
