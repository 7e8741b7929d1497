//! State that a model keeps of earlier positions, outside the modules.
//!
//! A [`Cache`] holds, for every layer, the key/value rows of the sliding window, the compressed
//! rows, the indexer's rows and the raw projections from which the next compressed row will be
//! pooled. One forward call is a [`Step`]: [`Cache::begin`] computes the indices and masks that all
//! layers share, [`Cache::commit`] makes the new positions count.
//!
//! Rows that several layers share are in the cache of the layer that makes them, which hands them
//! on to the others with the step.
//!
//! Every row's slot is a function of its position alone, so rolling back only forgets positions.
//! The positions are in a tensor: within one capacity, neither the shapes nor the host's branches
//! of a step depend on them. That tensor and the rows are written in place, so that each replay of
//! a recorded step continues where the last one ended.

mod bytes;
mod error;
mod handed;
mod layer;
mod layout;
mod mark;
mod pages;
mod part;
mod pool;
mod positions;
mod ring;
mod sequences;
mod state;
mod step;
#[cfg(all(test, feature = "flex"))]
mod window_tests;

pub use error::CacheError;
pub(crate) use handed::{PickedRows, SharedCaches};
pub(crate) use layer::CompressedCache;
pub use layer::LayerCache;
pub use layout::{CacheConfig, CacheLayout, Rollback};
pub(crate) use mark::CacheMark;
pub use pool::PagePool;
pub use state::Cache;
pub use step::Step;
pub(crate) use step::{CompressedStep, OpenStep, PrefillStep, mask};
