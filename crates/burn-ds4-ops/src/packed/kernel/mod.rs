mod activation;
mod blueprint;
mod columns;
mod decode;
mod few;
mod few_mixture;
mod few_pair;
mod few_rows;
mod few_share;
mod few_sum;
mod groups;
mod halves;
mod many;
mod many_step;
mod pairs;
mod plain;
mod sort;
mod stream;
mod weights;

pub(crate) use blueprint::FewBlueprint;
pub(crate) use columns::{Columns, pair, part_of};
pub(crate) use decode::Format;
pub(crate) use few::few_kernel;
pub(crate) use few_mixture::few_mixture_kernel;
pub(crate) use few_pair::few_pair_kernel;
pub(crate) use few_sum::few_sum_kernel;
pub(crate) use groups::Pairing;
pub(crate) use many::{ManyBlueprint, many_kernel};
pub(crate) use plain::{CUBE_ROWS, PlainBlueprint, Role, plain_kernel};
pub(crate) use sort::{MAX_SORTED, SortBlueprint, sort_kernel, sum_slots_kernel};
pub(crate) use weights::StackLaunch;

/// Chunks of 16 bytes to a lane of which a plane of a few rows' kernel multiplies so many at a time.
const STEP: u32 = 4;
