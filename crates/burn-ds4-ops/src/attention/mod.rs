//! Building blocks of DeepSeek-V4's attention: partial rotary embedding, KV pooling, indexer scores
//! and sink attention.
//!
//! Masks are additive f32 biases: 0 where a key is visible, [`MASKED`] where it is hidden.
//!
//! # Row invariance
//!
//! With up to [`DECODE_TOKENS`] tokens in all sequences together, the result of a token has the
//! same bits whatever other tokens there are; so has that of [`pool`] for every block. Where there
//! is a kernel, the result does not depend either on rows that are hidden from the token and come
//! after all visible ones, and [`index_scores`] do not depend on other tokens, however many there
//! are. Where the device's memory is the host's, the same is true of [`cached_attention`], and of
//! [`index_scores`] with visible blocks: so a text has the same bits in a cache of any capacity.

mod args;
mod backend;
mod blocks;
mod cached;
mod compress;
mod index;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
mod options;
mod pages;
mod reference;
mod rows;
mod sink;
mod step;
mod validation;

pub use blocks::{PooledBlocks, pool_blocks, store_blocks};
pub use cached::{CachedQueries, CachedRows, CachedWindow, NewRows, append_rows, cached_attention};
pub use compress::{CompressionInputs, CompressionOptions, CompressorState, compress_rows};
pub use index::{VisibleBlocks, index_scores};
pub use options::{
    CONTENT_BLOCK, DECODE_TOKENS, MASKED, RowRounding, SHARED_BLOCK, WHOLE_BLOCK, WindowLayout,
};
pub use pages::PagedRows;
pub use rows::{Positions, pool, rotate, rotate_at};
pub use sink::{CompressedKeys, WindowKeys, sink_attention, sink_probabilities};
pub use step::{LowRankQueries, StepCompression, StepRows, StoredStep, store_step};
