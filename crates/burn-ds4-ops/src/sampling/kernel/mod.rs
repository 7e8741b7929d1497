//! Sampling kernels. A row has one cube, which reads it several times, except where there are few
//! rows, and for penalties: there it has many. No Burn type enters.

mod candidates;
mod filter;
mod lanes;
mod log_probs;
mod penalties;
mod radix_select;
mod row;
mod scan;
mod split;
mod verify;
mod wide;

pub(crate) use lanes::{LaneTablesLaunch, LanesLaunch};
pub(crate) use log_probs::{LogProbsBlueprint, LogProbsShapeLaunch, log_probs_kernel};
pub(crate) use penalties::{PenaltyBlueprint, PenaltyShapeLaunch, count_kernel, penalties_kernel};
pub(crate) use row::{RowShapeLaunch, SampleBlueprint, sample_kernel};
pub(crate) use split::{
    COUNTERS, DrawStages, MASS_WORDS, RowPartsLaunch, SplitBlueprint, SplitShapeLaunch,
    TOTAL_WORDS, draw_kernel, highest_kernel,
};
pub(crate) use verify::verify_kernel;
