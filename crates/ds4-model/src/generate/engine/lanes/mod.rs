//! A group of lanes: texts side by side on the device, some lanes of which are vacant, and the one
//! step that decodes all of them.
//!
//! A step runs the trunk over the last token of each text and its drafts, chooses the token after
//! each, keeps the positions up to the first draft that differs, and drafts again. Its shapes do
//! not depend on the outcome, which stays on the device for the next step and reaches the host
//! later.

mod engrams;
mod executor;
mod links;
mod run;
mod settled;
mod state;
mod step;

pub(super) use executor::executor;
pub(super) use settled::Settled;
pub(super) use state::{Lanes, StepKind, Wanted};
