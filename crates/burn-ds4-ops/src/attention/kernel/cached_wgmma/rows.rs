//! What the first warpgroup does: bringing queries and rows.

use cubecl::prelude::*;

use super::blueprint::{
    COLUMN_WORDS, COLUMNS, CachedWgmmaBlueprint, TILE_BYTES, TILE_VECTORS, WARPGROUP_HEADS,
};
use crate::attention::kernel::cached::CachedInputs;
use crate::attention::kernel::visibility::Visibility;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::{ballot, copy_vector, prefetch, sync_group};
use crate::warpgroup::{Ring, WARPGROUP};

/// Brings the queries of a tile of heads to the second-level cache. The first warpgroup calls this.
#[cube]
pub(super) fn prefetch_queries<F: Float, I: Int, P: Int>(
    inputs: &CachedInputs<F, I, P, Const<8>>,
    token: u32,
    head_tile: u32,
    #[comptime] blueprint: CachedWgmmaBlueprint,
) {
    let (shape, strides) = (&inputs.attention.shape, &inputs.attention.strides);
    let (sequence, query) = shape.query_of(token);
    let queries = sequence as usize * strides.queries_sequence + query as usize * strides.query;
    // A line of 128 bytes is as much as a row of a tile.
    #[unroll]
    for i in 0..comptime!(WARPGROUP_HEADS * blueprint.tiles() / WARPGROUP) {
        let line = UNIT_POS + comptime!(i * WARPGROUP);
        let head = head_tile * WARPGROUP_HEADS + line % WARPGROUP_HEADS;
        let first = line / WARPGROUP_HEADS * TILE_VECTORS;
        let at = queries + min(head, shape.heads - 1) as usize * strides.head + first as usize;
        prefetch(&inputs.attention.queries[at..at + 1]);
    }
}

/// The columns of a query, and where their rows are.
#[derive(CubeType)]
pub(super) struct RowSource {
    token: u32,
    pub visibility: Visibility,
    /// Compressed rows that the query may attend to.
    selected: u32,
    span: u32,
    #[cube(comptime)]
    blueprint: CachedWgmmaBlueprint,
}

#[cube]
impl RowSource {
    pub(super) fn new<F: Float, I: Int, P: Int>(
        inputs: &CachedInputs<F, I, P, Const<8>>,
        token: u32,
        #[comptime] blueprint: CachedWgmmaBlueprint,
    ) -> RowSource {
        let shape = &inputs.attention.shape;
        let visibility = Visibility::new::<P>(
            &inputs.positions,
            token,
            &inputs.layout,
            shape,
            blueprint.causal,
            blueprint.target,
        );
        let mut selected = shape.selected;
        if inputs.attention.picks.as_ref().is_none() {
            selected = min(selected, visibility.visible_rows);
        }
        RowSource {
            token,
            selected,
            span: shape.span,
            visibility,
            blueprint,
        }
    }

    /// Blocks of [`COLUMNS`] columns.
    pub(super) fn blocks(&self) -> u32 {
        (self.span + self.selected).div_ceil(COLUMNS)
    }

    /// The row of a column, of the window or compressed; `u32::MAX` if the column is hidden.
    pub(super) fn row<F: Float, I: Int, P: Int>(
        &self,
        inputs: &CachedInputs<F, I, P, Const<8>>,
        column: u32,
    ) -> u32 {
        let attention = &inputs.attention;
        let mut row = u32::MAX.runtime();
        if column < self.span {
            if self.visibility.is_visible(column, &attention.shape) {
                row = self.visibility.slot(column, &attention.shape);
            }
        } else if column < self.span + self.selected {
            let picked = attention.pick(self.token, column - self.span);
            let visible =
                picked >= I::from_int(0) && picked < I::cast_from(self.visibility.visible_rows);
            if visible {
                row = u32::cast_from(picked);
            }
        }
        row
    }

    /// Copies the rows of a block to the next stage, zeros for hidden columns, and says which those
    /// are. Eight units copy a row, each a chunk of 16 bytes of every tile to the place that the
    /// swizzle gives it.
    pub(super) fn copy<F: Float, I: Int, P: Int>(
        &self,
        inputs: &CachedInputs<F, I, P, Const<8>>,
        block: u32,
        ring: &mut Ring,
        row_tiles: u32,
        hidden: &mut Shared<[u32]>,
    ) {
        let blueprint = comptime!(self.blueprint);
        let (attention, sequence) = (&inputs.attention, self.visibility.sequence as usize);
        let strides = &attention.strides;
        let unit_rows = comptime!(COLUMNS * TILE_VECTORS / WARPGROUP);
        let first = block * COLUMNS;
        let (own, chunk) = (UNIT_POS / TILE_VECTORS, UNIT_POS % TILE_VECTORS);
        // All places before the wait: reading picks takes as long as it may.
        let mut rows = Array::<u32>::new(unit_rows as usize);
        #[unroll]
        for i in 0..unit_rows {
            let ahead = comptime!(i * WARPGROUP / TILE_VECTORS);
            rows[i as usize] = self.row(inputs, first + own + ahead);
        }
        let word_row = self.row(inputs, first + UNIT_POS % COLUMNS);
        let word = ballot(word_row == u32::MAX, blueprint.target);
        ring.wait_free();
        let stage = row_tiles + ring.slot * comptime!(blueprint.stage_bytes());
        let to = stage + own * 128 + (chunk ^ (own % 8)) * 16;
        #[unroll]
        for i in 0..unit_rows {
            let ahead = comptime!(i * WARPGROUP / TILE_VECTORS);
            let to = to + comptime!(ahead * 128);
            let row = rows[i as usize];
            let visible = row != u32::MAX;
            let row = select(visible, row, 0u32) as usize;
            if first + own + ahead >= self.span {
                let paged: ComptimeOption<usize> = attention.pages.as_ref().map(|pages| {
                    let of = self.visibility.sequence;
                    pages.row(of, row as u32) as usize * strides.row
                });
                let start =
                    paged.unwrap_or_else(|| sequence * strides.rows_sequence + row * strides.row);
                let from = start as u32 + chunk;
                #[unroll]
                for tile in 0..comptime!(blueprint.tiles()) {
                    let to = to + comptime!(tile * TILE_BYTES);
                    let from = from + comptime!(tile * TILE_VECTORS);
                    copy_vector(to, &attention.rows, from, visible);
                }
            } else {
                let start = sequence * strides.window_sequence + row * strides.window_row;
                let from = start as u32 + chunk;
                #[unroll]
                for tile in 0..comptime!(blueprint.tiles()) {
                    let to = to + comptime!(tile * TILE_BYTES);
                    let from = from + comptime!(tile * TILE_VECTORS);
                    copy_vector(to, &attention.window, from, visible);
                }
            }
        }
        if UNIT_POS < COLUMNS && UNIT_POS.is_multiple_of(32) {
            hidden[(ring.slot * COLUMN_WORDS + UNIT_POS / 32) as usize] = word;
        }
        sync_group(blueprint.target);
        ring.written();
        ring.copied();
    }
}
