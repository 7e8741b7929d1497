//! Selection of the largest entries of rows. A row has one cube or, where rows are few and long,
//! several.

mod bins;
mod bitmap;
mod candidates;
mod long;
mod radix_select;
mod ranked;
mod registers;
mod row;
mod sample;
mod split;
mod values;
mod whole;
mod window;

pub(crate) use candidates::LongRowBlueprint;
pub(crate) use long::long_row_kernel;
pub(crate) use row::{LogitRowsLaunch, TopkIdsLaunch};
pub(crate) use split::{
    MergeBlueprint, SegmentBlueprint, SegmentCandidatesLaunch, SegmentSizesLaunch, merge_kernel,
    segment_kernel,
};
pub(crate) use values::{TopkValuesLaunch, ValuesBlueprint, values_kernel};
pub(crate) use whole::{WholeRowBlueprint, whole_row_kernel};
pub(crate) use window::{CausalWindowArgsLaunch, WindowArgsLaunch};
