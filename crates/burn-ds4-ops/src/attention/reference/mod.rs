//! Attention in plain tensor operations.
//!
//! Everything that has a kernel is generic over the backend, as it is the default body of the
//! operators' backend trait. Up to [`DECODE_TOKENS`](super::DECODE_TOKENS) tokens are computed one
//! at a time, since a matrix product or a sum of more of them may be partitioned, and rounded,
//! differently.

#[cfg(feature = "flex")]
mod by_query;
mod cached;
mod compress;
mod index;
mod pages;
mod positions;
mod sink;

#[cfg(feature = "flex")]
pub(super) use by_query::{cached_attention_by_query, index_scores_by_query};
pub(super) use cached::{append_rows, cached_attention};
pub(super) use compress::{BlockRows, compress_rows, pool_blocks};
pub(super) use index::index_scores;
