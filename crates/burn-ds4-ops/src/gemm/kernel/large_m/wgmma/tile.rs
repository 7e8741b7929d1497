//! The tiles of cubes, and their order.

use cubecl::prelude::*;

use super::blueprint::{WgmmaBlueprint, hidden_block};
use super::order::column_at;
use crate::gemm::kernel::large_m::problem::{LargeMPairs, Problem};
use crate::gemm::kernel::weights::WeightFormat;

/// Rows of tiles that are multiplied at about the same time, so that what they read stays in the
/// cache.
pub(super) const BAND: u32 = 16;

/// What a cube multiplies at a time: rows of `x` and rows of weights.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Tile {
    pub problem: Problem,
    /// The first output, or its position.
    pub first: u32,
}

#[cube]
impl Tile {
    /// The output of a row of the tile. With a gate, 16 rows are the gates of eight outputs and
    /// what those are multiplied by.
    pub fn output_of(&self, row: u32, #[comptime] blueprint: WgmmaBlueprint) -> u32 {
        #[comptime]
        if let Option::Some(format) = blueprint.gated {
            column_at(self.first + row / 16 * 8 + row % 8, format)
        } else {
            self.first + row
        }
    }

    /// The row of the matrix; the last one past the end.
    pub fn matrix_row(&self, row: u32, rows: u32, #[comptime] blueprint: WgmmaBlueprint) -> u32 {
        let own = self.output_of(row, blueprint);
        if comptime!(blueprint.gated.is_some()) {
            let outputs = rows / 2;
            min(own, outputs - 1) + row / 8 % 2 * outputs
        } else {
            min(own, rows - 1)
        }
    }
}

/// Columns of a gated result with padding, which tiles write, too.
#[cube]
pub(super) fn padded(columns: u32, #[comptime] format: WeightFormat) -> u32 {
    let block = comptime!(hidden_block(format));
    columns.div_ceil(block) * block
}

/// A tile by its index: those of the same rows of `x` after each other for sorted pairs, or bands
/// of rows of weights.
#[cube]
pub(super) fn tile_at(
    index: u32,
    tile_rows: u32,
    problems: u32,
    pairs: &LargeMPairs,
    max_problems: u32,
    #[comptime] blueprint: WgmmaBlueprint,
) -> Tile {
    let band = if comptime!(blueprint.sorted) {
        tile_rows
    } else {
        BAND.runtime()
    };
    let (problem, row) = place_at(index, tile_rows, problems, band);
    Tile {
        problem: pairs.problem(problem, max_problems, blueprint.columns),
        first: row * comptime!(blueprint.outputs()),
    }
}

/// The problem and the row of tiles of a tile: `band` rows of tiles of every problem come one after
/// the other.
#[cube]
pub(super) fn place_at(index: u32, tile_rows: u32, problems: u32, band: u32) -> (u32, u32) {
    let first = index / (band * problems) * band;
    let height = min(tile_rows - first, band);
    let place = index % (band * problems);
    (place / height, first + place % height)
}
