//! A cube to a row, which it reads a few times. No Burn type enters.

mod filter;
mod row;
mod scan;
mod search;
mod verify;
mod wide;

pub(crate) use row::{FilterLaunch, SampleBlueprint, sample_kernel};
pub(crate) use verify::verify_kernel;
