//! Copying the rows of a cache for tensor cores.

use cubecl::prelude::*;

use super::cached::{CachedInputs, CachedTilesBlueprint};
use super::head_tiles::{LANES, SUMMED_COLUMNS, TILE_PLANES, swizzled};
use super::inputs::AttentionInputs;
use super::visibility::Visibility;
use crate::attention::options::MASKED;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::{commit_copies, copy_address, global_address, plane_value, shared_address};

/// In an address, which is a multiple of 16: the row is hidden.
const HIDDEN: u64 = 1;
/// Rows of a plane that are copied before the loop goes on: a tile has as many of each plane.
const PLANE_ROWS: u32 = SUMMED_COLUMNS / TILE_PLANES;

/// Where the rows of a query's columns come from.
#[derive(CubeType)]
pub(super) struct CachedRows<'a, F: Float, I: Int, P: Int> {
    inputs: &'a CachedInputs<F, I, P, Const<8>>,
    visibility: &'a Visibility,
    /// The first column that is a compressed row, and the end.
    first_compressed: u32,
    end: u32,
    #[cube(comptime)]
    blueprint: CachedTilesBlueprint,
}

/// Whose row a lane looks up, in the block of the cube's columns from `first` on: the number in the
/// block, and the column.
#[cube]
fn lane_column(first: u32, #[comptime] blueprint: CachedTilesBlueprint) -> (u32, u32) {
    let own = UNIT_POS_X * TILE_PLANES + UNIT_POS_Y;
    let tile = (first + own) / SUMMED_COLUMNS * blueprint.kv_cubes + CUBE_POS_Z;
    (own, tile * SUMMED_COLUMNS + own % SUMMED_COLUMNS)
}

/// Whether a lane has a column in a block.
#[cube]
fn has_column(#[comptime] blueprint: CachedTilesBlueprint) -> bool {
    UNIT_POS_X < comptime!(blueprint.tiles.columns / TILE_PLANES)
}

/// The compressed row of the lane's column in the block from `first` on, which may be out of range;
/// nothing is read for a column of the window. It can be read before it is known what is visible.
#[cube]
pub(super) fn lane_pick<F: Float, I: Int>(
    attention: &AttentionInputs<F, I, Const<8>>,
    token: u32,
    first: u32,
    first_compressed: u32,
    #[comptime] blueprint: CachedTilesBlueprint,
) -> I {
    let (_, column) = lane_column(first, blueprint);
    let mut pick = I::from_int(0);
    let end = first_compressed + attention.shape.selected;
    if has_column(blueprint) && column >= first_compressed && column < end {
        let index = column - first_compressed;
        let target = comptime!(blueprint.tiles.target);
        pick = attention.pick_in_order(token, index, target);
    }
    pick
}

#[cube]
impl<'a, F: Float, I: Int, P: Int> CachedRows<'a, F, I, P> {
    pub fn new(
        inputs: &'a CachedInputs<F, I, P, Const<8>>,
        visibility: &'a Visibility,
        first_compressed: u32,
        end: u32,
        #[comptime] blueprint: CachedTilesBlueprint,
    ) -> CachedRows<'a, F, I, P> {
        CachedRows::<'a, F, I, P> {
            inputs,
            visibility,
            first_compressed,
            end,
            blueprint,
        }
    }

    /// Columns of this cube, in whole tiles. None for a vacant sequence: even the query's own row
    /// must not be read.
    pub fn cube_columns(&self) -> u32 {
        let kv_cubes = comptime!(self.blueprint.kv_cubes);
        let all_tiles = (self.end + comptime!(SUMMED_COLUMNS - 1)) / SUMMED_COLUMNS;
        let own_tiles = (all_tiles + comptime!(kv_cubes - 1) - CUBE_POS_Z) / kv_cubes;
        select(
            self.visibility.visible_positions > 0,
            own_tiles * SUMMED_COLUMNS,
            0u32,
        )
    }

    /// The [lane's pick](lane_pick) in the block from `first` on, for query `token`.
    pub fn pick(&self, token: u32, first: u32) -> I {
        let attention = &self.inputs.attention;
        lane_pick::<F, I>(
            attention,
            token,
            first,
            self.first_compressed,
            self.blueprint,
        )
    }

    /// The offset of the row that is picked. Only in pages does it have to be visible for that.
    fn row_start(&self, pick: I, visible: bool) -> usize {
        let attention = &self.inputs.attention;
        let sequence = self.visibility.sequence;
        let strides = &attention.strides;
        let paged: ComptimeOption<usize> = attention.pages.as_ref().map(|pages| {
            let row = pages.row(sequence, select(visible, u32::cast_from(pick), 0u32));
            row as usize * strides.row
        });
        paged.unwrap_or_else(|| {
            let row = u32::cast_from(pick) as usize * strides.row;
            sequence as usize * strides.rows_sequence + row
        })
    }

    /// Begins to copy the rows of the cube's columns from `first` on up to `end`, as many as fit,
    /// and writes their biases, to those from `stage` on. Rows of hidden columns are zeros. `pick`
    /// is the [lane's](lane_pick).
    ///
    /// A plane has every eighth column. Its lanes work out where their rows are, one each, so that
    /// a copy needs no more than the address of a lane.
    pub fn copy(
        &self,
        first: u32,
        end: u32,
        pick: I,
        stage: u32,
        rows: &mut Shared<[Vector<F, Const<8>>]>,
        biases: &mut Shared<[f32]>,
    ) {
        let tiles = comptime!(self.blueprint.tiles);
        let attention = &self.inputs.attention;
        let (shape, strides) = (&attention.shape, &attention.strides);
        let vectors = comptime!(tiles.vectors);
        let sequence = self.visibility.sequence as usize;
        let window = global_address(&attention.window);
        let mut address = window | HIDDEN;
        if has_column(self.blueprint) {
            let (own, column) = lane_column(first, self.blueprint);
            let mut visible = false;
            let mut bias = 0.0f32;
            if column < self.first_compressed {
                visible = self.visibility.is_visible(column, shape);
                let slot = self.visibility.slot(column, shape);
                let row = sequence * strides.window_sequence + slot as usize * strides.window_row;
                address = window + 16 * row as u64;
                bias = self.inputs.window_bias(self.visibility, slot);
            } else if column < self.end {
                let visible_rows = I::cast_from(self.visibility.visible_rows);
                visible = pick >= I::from_int(0) && pick < visible_rows;
                let row = self.row_start(pick, visible);
                address = global_address(&attention.rows) + 16 * row as u64;
                let known = select(visible, u32::cast_from(pick), 0u32);
                bias = self.inputs.row_bias(self.visibility, known);
            }
            address = select(visible, address, window | HIDDEN);
            biases[(stage + own) as usize] = select(visible, bias, MASKED);
        }
        let (low, high) = (u32::cast_from(address), u32::cast_from(address >> 32));
        // Rows of a plane are the same modulo 8.
        let to = (stage + UNIT_POS_Y) * vectors + swizzled(UNIT_POS_Y, UNIT_POS_X);
        let to = shared_address(&rows[0..1]) + to * 16;
        let count = min(max(end, first) - first, tiles.columns) / SUMMED_COLUMNS;
        for tile in 0..count {
            #[unroll]
            for i in 0..PLANE_ROWS {
                let row = tile * PLANE_ROWS + i;
                let low = plane_value(low, row, tiles.target);
                let high = plane_value(high, row, tiles.target);
                let visible = low & 1 == 0;
                let from = (u64::cast_from(high) << 32 | u64::cast_from(low)) & !HIDDEN;
                let from = from + u64::cast_from(UNIT_POS_X * 16);
                let to = to + row * comptime!(TILE_PLANES * vectors * 16);
                #[unroll]
                for step in 0..comptime!(vectors.div_ceil(LANES)) {
                    let vector = UNIT_POS_X + comptime!(step * LANES);
                    if comptime!((step + 1) * LANES <= vectors) || vector < vectors {
                        copy_address(to, from, visible, comptime!(step * LANES * 16));
                    }
                }
            }
        }
        commit_copies();
    }
}
