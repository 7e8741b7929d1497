//! The schedule for a small number of rows of `x` and the matrices of floats of a group.

mod input;
mod rows;
mod tile_rows;
mod tiles;

pub(crate) use input::{InputBlueprint, InputLocation};
pub(crate) use rows::{RowsBlueprint, rows_kernel};
pub(crate) use tile_rows::{MatrixGroupLaunch, PicksLaunch};
pub(crate) use tiles::{K_BLOCK, TilesBlueprint, tiles_kernel};
