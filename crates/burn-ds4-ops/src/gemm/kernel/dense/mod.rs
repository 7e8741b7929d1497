//! The schedule for a small number of rows of `x` and the matrices of floats of a group.

mod input;
mod rows;
mod tile_rows;
mod tiles;

pub(super) use input::InputRows;
pub(crate) use input::{InputBlueprint, InputLocation};
pub(crate) use rows::{RowsBlueprint, rows_kernel};
pub(super) use tile_rows::MatrixList;
pub(crate) use tile_rows::{MatrixListLaunch, PicksLaunch};
pub(super) use tiles::{CubeRange, multiply_group};
pub(crate) use tiles::{TilesBlueprint, tiles_kernel};
