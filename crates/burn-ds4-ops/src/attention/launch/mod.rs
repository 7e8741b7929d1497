//! Launches of attention.

mod append;
mod cached;
mod compress;
mod index;
mod many;
mod pages;
mod rows;
mod sink;
mod splits;
mod step;
mod tensors;
mod tiles;

pub(super) use append::{append_rows, can_append};
pub(super) use cached::{cached_attention, can_attend_cached};
pub(super) use compress::{can_compress, compress_rows};
pub(super) use index::{can_score, index_scores, rotates};
pub(super) use many::{attend_many, can_attend_many};
pub(super) use rows::{Angles, can_rotate, can_rotate_at, pool, rotate};
pub(super) use sink::{can_attend, sink_attention};
pub(super) use step::{can_store, store_step};
