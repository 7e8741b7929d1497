mod activation;
mod blueprint;
mod decode;
mod f16_input;
mod groups;
mod input_layout;
mod large_m;
mod large_m_k_block;
mod plain;
mod small_m;
mod small_m_mixture;
mod small_m_pair;
mod small_m_sum;
mod small_m_tiles;
mod sort;
mod stream;
mod weight_pairs;
mod weights;
mod x_rows;

pub(crate) use blueprint::SmallMBlueprint;
pub(crate) use decode::WeightFormat;
pub(crate) use groups::Pairing;
pub(crate) use input_layout::{InputLayout, bf16_pair, term_of};
pub(crate) use large_m::{LargeMBlueprint, large_m_kernel};
pub(crate) use plain::{CUBE_X_ROWS, PlainBlueprint, Role, plain_kernel};
pub(crate) use small_m::small_m_kernel;
pub(crate) use small_m_mixture::small_m_mixture_kernel;
pub(crate) use small_m_pair::small_m_pair_kernel;
pub(crate) use small_m_sum::small_m_sum_kernel;
pub(crate) use sort::{MAX_SORTED, SortBlueprint, sort_kernel, sum_slots_kernel};
pub(crate) use weights::StackLaunch;

/// K-steps of a K-block of the small-M kernels. In each, a lane has 16 bytes of each of its rows.
const K_STEPS: u32 = 4;
