//! Sampling kernels. A row has one cube, which reads it several times, except where there are few
//! rows, and for penalties: there it has many. No Burn type enters.

mod candidates;
mod draw;
mod filter;
mod lanes;
mod log_probs;
mod parts;
mod penalties;
mod radix_select;
mod row;
mod scan;
mod split;
mod verify;
mod wide;

pub(crate) use draw::sample_kernel;
pub(crate) use lanes::{LaneTablesLaunch, LanesLaunch};
pub(crate) use log_probs::{LogProbsBlueprint, LogProbsShapeLaunch, log_probs_kernel};
pub(crate) use parts::{COUNTERS, MASS_WORDS, RowPartsLaunch, SplitShapeLaunch, TOTAL_WORDS};
pub(crate) use penalties::{PenaltyBlueprint, PenaltyShapeLaunch, count_kernel, penalties_kernel};
pub(crate) use row::{RowShapeLaunch, SampleBlueprint};
pub(crate) use split::{DrawStages, SplitBlueprint, draw_kernel, highest_kernel};
pub(crate) use verify::verify_kernel;
