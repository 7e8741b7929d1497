//! Kernels for products of a few rows of `x` by the matrices of a group.

mod group;
mod parts;
mod rows;
mod source;
mod tiles;

pub(super) use group::PicksLaunch;
pub(super) use rows::{RowsBlueprint, rows_kernel};
pub(super) use source::{Place, SourceBlueprint};
pub(super) use tiles::{STRETCH, TilesBlueprint, tiles_kernel};
