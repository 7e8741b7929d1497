//! Copying the rows of a cache for tensor cores.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::cached::CachedInputs;
use super::cached_tiles::CachedTilesBlueprint;
use super::head_tiles::{LANES, SUMMED_COLUMNS, TILE_PLANES, swizzled};
use super::visibility::Visibility;
use crate::attention::MASKED;
use crate::intrinsics::{commit_copies, plane_value};

/// Where the row of a column is: its number, with a bit for compressed rows; or that it is hidden.
const COMPRESSED: u32 = 1 << 31;
const HIDDEN: u32 = u32::MAX;

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

    /// Begins to copy the rows of the cube's columns from `first` on up to `end`, as many as fit,
    /// and writes their biases. Rows of hidden columns are zeros.
    ///
    /// A plane has every eighth column. Its lanes look up where their rows are, one each, so that a
    /// copy needs no more than the value of a lane.
    pub fn copy(
        &self,
        first: u32,
        end: u32,
        rows: &mut Shared<[Vector<F, Const<8>>]>,
        biases: &mut Shared<[f32]>,
    ) {
        let CachedTilesBlueprint {
            tiles, kv_cubes, ..
        } = comptime!(self.blueprint);
        let attention = &self.inputs.attention;
        let (shape, strides) = (&attention.shape, &attention.strides);
        let vectors = comptime!(tiles.vectors);
        let mut own_place = HIDDEN.runtime();
        if UNIT_POS_X < comptime!(tiles.columns / TILE_PLANES) {
            let own = UNIT_POS_X * TILE_PLANES + UNIT_POS_Y;
            let tile = (first + own) / SUMMED_COLUMNS * kv_cubes + CUBE_POS_Z;
            let column = tile * SUMMED_COLUMNS + own % SUMMED_COLUMNS;
            if column < self.first_compressed {
                if self.visibility.is_visible(column, shape) {
                    own_place = self.visibility.slot(column, shape);
                }
            } else if column < self.end {
                let picked = attention.pick(CUBE_POS_Y, column - self.first_compressed);
                let visible_rows = I::cast_from(self.visibility.visible_rows);
                if picked >= I::from_int(0) && picked < visible_rows {
                    own_place = u32::cast_from(picked) | COMPRESSED;
                }
            }
            biases[own as usize] = select(own_place == HIDDEN, MASKED, 0.0f32);
        }
        let sequence = self.visibility.sequence as usize;
        let window_start = sequence * strides.window_sequence;
        let rows_start = sequence * strides.rows_sequence;
        let count = min(max(end, first) - first, tiles.columns) / TILE_PLANES;
        for i in 0..count {
            let place = plane_value(own_place, i, tiles.target);
            let row = i * TILE_PLANES + UNIT_POS_Y;
            #[unroll]
            for step in 0..comptime!(vectors.div_ceil(LANES)) {
                let vector = UNIT_POS_X + comptime!(step * LANES);
                if comptime!((step + 1) * LANES <= vectors) || vector < vectors {
                    // Rows of a plane are the same modulo 8.
                    let to = (row * vectors + swizzled(UNIT_POS_Y, vector)) as usize;
                    if place == HIDDEN {
                        rows[to] = Vector::new(F::new(0.0));
                    } else if place >= COMPRESSED {
                        let row = (place - COMPRESSED) as usize * strides.row;
                        let from = rows_start + row + vector as usize;
                        copy_async(&attention.rows[from..from + 1], &mut rows[to..to + 1], 8u32);
                    } else {
                        let row = place as usize * strides.window_row;
                        let from = window_start + row + vector as usize;
                        copy_async(
                            &attention.window[from..from + 1],
                            &mut rows[to..to + 1],
                            8u32,
                        );
                    }
                }
            }
        }
        commit_copies();
    }
}
