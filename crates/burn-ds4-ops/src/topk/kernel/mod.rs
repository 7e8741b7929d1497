//! Selection of the largest entries of rows, a row to a cube or, where rows are few and long, to several.

mod candidates;
mod held;
pub(crate) mod key;
mod long;
mod map;
mod row;
mod sample;
mod search;
mod split;
mod values;
mod whole;
mod window;

pub(crate) use candidates::LongRowBlueprint;
pub(crate) use long::long_row_kernel;
pub(crate) use search::Units;
pub(crate) use split::{MergeBlueprint, StretchBlueprint, merge_kernel, stretch_kernel};
pub(crate) use values::{ValuesBlueprint, values_kernel};
pub(crate) use whole::{WholeRowBlueprint, whole_row_kernel};
pub(crate) use window::TokensLaunch;
