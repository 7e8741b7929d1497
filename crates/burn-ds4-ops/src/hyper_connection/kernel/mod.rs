//! Kernels of hyper-connections. No token depends on another. Unless a kernel says otherwise, a
//! kernel that collapses streams has one cube for each token.

mod collapse;
mod expand;
mod project;
mod project_tiles;
mod sinkhorn;
mod token;

pub(super) use collapse::{PartialsBlueprint, TOKEN_CUBES, collapse_norm_kernel, head_norm_kernel};
pub(super) use expand::{PendingOutputLaunch, expand_kernel};
pub(super) use project::{ProjectBlueprint, SpreadOutputLaunch, expand_project_kernel};
pub(super) use project_tiles::{
    ProjectTilesBlueprint, STEP_CHANNELS, TILE_TOKENS, project_tiles_kernel,
};
pub(super) use token::{
    CollapsedRowsLaunch, MixParametersLaunch, RowNormLaunch, StreamsLaunch, TokenBlueprint,
};
