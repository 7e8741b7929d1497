pub(crate) mod dense;
mod epilogue;
mod groups;
mod input;
mod large_m;
mod linear_group;
mod portable;
mod stream;
mod weights;

pub(crate) use groups::{PairSizesLaunch, Pairing, SortedProblemsLaunch};
pub(crate) use input::{InputLayout, bf16_pair, term_of};
pub(crate) use large_m::{
    FP8_TILE, Fp8Blueprint, LargeMBlueprint, LargeMPairsLaunch, MAX_SORTED, RowFormat,
    SortBlueprint, SortSizesLaunch, WgmmaBlueprint, WgmmaBoxesLaunch, WgmmaOperands,
    WgmmaRowsLaunch, hidden_block, large_m_kernel, permute_kernel, quantize_kernel, sort_kernel,
    sum_slots_kernel, sum_splits_kernel, wgmma_fp8_kernel, wgmma_kernel,
};
pub(crate) use linear_group::{DenseProblemLaunch, LinearGroupBlueprint, linear_group_kernel};
pub(crate) use portable::{
    CUBE_X_ROWS, EpilogueLaunch, PLANES as PORTABLE_PLANES, PairsLaunch, PortableBlueprint, Role,
    X_ROWS, portable_kernel,
};
pub(crate) use stream::{
    CubeSplitLaunch, GroupSplitLaunch, StreamBlueprint, StreamProblemLaunch, SumProblemLaunch,
    slot_sum_kernel, stream_kernel,
};
pub(crate) use weights::{MatrixStackLaunch, StackLayoutLaunch, WeightFormat};
