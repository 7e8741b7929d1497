//! The whole model.

mod build;
mod drafting;
mod engrams;
mod forward;
mod modules;
mod parts;
mod passing;
mod random;
mod sizes;
mod source;
mod trunk;

pub use modules::Model;
pub(crate) use passing::{Passing, passed_columns};
pub(crate) use source::ModelSource;
pub(crate) use trunk::{Ranks, Runs};
