//! Sampling kernels. A row has one cube, which reads it several times, except for penalties, where
//! it has many. No Burn type enters.

mod filter;
mod lanes;
mod log_probs;
mod penalties;
mod radix_select;
mod row;
mod scan;
mod verify;
mod wide;

pub(crate) use lanes::LaneTablesLaunch;
pub(crate) use log_probs::{LogProbsBlueprint, LogProbsShapeLaunch, log_probs_kernel};
pub(crate) use penalties::{PenaltyBlueprint, PenaltyShapeLaunch, count_kernel, penalties_kernel};
pub(crate) use row::{RowShapeLaunch, SampleBlueprint, sample_kernel};
pub(crate) use verify::verify_kernel;
