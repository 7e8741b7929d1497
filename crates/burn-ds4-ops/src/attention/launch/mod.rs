//! Launches of attention.

mod cached;
mod cached_wgmma;
mod compress;
mod index;
mod rows;
mod sink;
mod sink_tiles;
mod splits;
mod step;
mod tensors;

pub(super) use cached::{append_rows, cached_attention, can_append, can_attend_cached};
pub(super) use cached_wgmma::{attend_prompt, can_attend_prompt};
pub(super) use compress::{can_compress, compress_rows};
pub(super) use index::{can_score, index_scores, rotates};
pub(super) use rows::{can_rotate, can_rotate_at, pool, rotate, rotate_at};
pub(super) use sink::{can_attend, sink_attention};
pub(super) use sink_tiles::{can_attend_many, sink_attention_of_many};
pub(super) use step::{can_store, store_step};
