//! Engrams: tables of rows for n-grams of tokens, which change the streams before some layers.
//!
//! The rows of a position follow from token ids alone: ids of like texts are made one
//! ([`EngramIds`]), and the last two, three and so on of them are hashed to rows. A table stays in
//! the memory of the host, or in its file there; what a step needs of it is gathered and copied.

mod hash;
mod ids;
mod layer;
mod lookup;
#[cfg(test)]
mod tests;

pub use crate::weights::{EngramTable, TableSource};
pub use ids::{ENGRAM_IDS_FILE, EngramIds, EngramIdsError};
pub use layer::{Engram, EngramConfig};
pub use lookup::EngramLookup;
