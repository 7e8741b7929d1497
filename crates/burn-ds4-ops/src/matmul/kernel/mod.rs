//! Kernels for products of a small number of rows of `x` by the matrices of a group.

mod input;
mod rows;
mod terms;
mod tile_rows;
mod tiles;

pub(super) use input::{InputBlueprint, InputLocation};
pub(super) use rows::{RowsBlueprint, rows_kernel};
pub(super) use tile_rows::PicksLaunch;
pub(super) use tiles::{K_BLOCK, TilesBlueprint, tiles_kernel};
