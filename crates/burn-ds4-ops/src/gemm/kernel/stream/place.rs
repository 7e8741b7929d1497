//! Where a lane is in tiles of weights and of `x`.

use cubecl::prelude::*;

use super::blueprint::{SPREAD_ROWS, StreamBlueprint};
use crate::gemm::kernel::weights::K_STEPS;
use crate::intrinsics::modulo;

/// Where a lane is in the tiles of a cube.
#[derive(CubeType, Clone, Copy)]
pub(super) struct LanePlace {
    /// Its row of a tile.
    pub row: u32,
    /// Its plane among those that split K, and which of their groups that is.
    pub plane: u32,
    pub concurrent_tile: u32,
    /// Rows of the output, and how far a lane's upper row is from its lower one: a tile has 16 rows
    /// of the output, or 8 with their gates.
    pub outputs: u32,
    pub to_high: u32,
    /// Where its row of `x` starts in shared memory, in vec8s.
    pub x_row: usize,
}

#[cube]
impl LanePlace {
    pub fn new(outputs: u32, #[comptime] blueprint: StreamBlueprint) -> LanePlace {
        let row = UNIT_POS_X / 4;
        let to_high = if comptime!(blueprint.gated.is_some()) {
            outputs
        } else {
            8u32.runtime()
        };
        LanePlace {
            row,
            plane: modulo(UNIT_POS_Y, blueprint.planes),
            concurrent_tile: UNIT_POS_Y / blueprint.planes,
            outputs,
            to_high,
            x_row: (modulo(row, blueprint.x_rows) * comptime!(blueprint.row_pitch())) as usize,
        }
    }

    /// Where the lane's partial sums are of tile `tile` of its plane, and of the first tile of `x`.
    pub fn partial_slot(&self, tile: u32, #[comptime] blueprint: StreamBlueprint) -> u32 {
        let group = tile * blueprint.concurrent_tiles + self.concurrent_tile;
        let slot = group * comptime!(blueprint.tile_partials()) + self.plane;
        slot * comptime!(32 * blueprint.x_tiles()) + UNIT_POS_X
    }
}

/// What the eight columns of a tile of `x` are, of which each is held by four lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum XColumns {
    /// Rows, of one K-step at a time.
    Rows,
    /// All K-steps of at most [`SPREAD_ROWS`] rows, which most experts have: each K-step has
    /// columns of its own. So a plane reads all `x` of a K-block at once, before it fetches the
    /// weights. What it reads later waits for those, because memory answers in order.
    KSteps,
}

/// The row of `x` of a lane's column, and the K-step if they are `spread`. The last K-step has the
/// first columns, where the sums belong.
#[cube]
pub(super) fn x_place(spread: bool) -> (u32, u32) {
    let column = UNIT_POS_X / 4;
    let k_step = comptime!(K_STEPS - 1) - column / SPREAD_ROWS;
    (
        select(spread, column % SPREAD_ROWS, column),
        select(spread, k_step, 0u32),
    )
}
