//! Which rows of a cache are visible to a query.

use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use super::inputs::AttentionShape;
use super::rotate::Positions;
use crate::caps::Target;
use crate::intrinsics::read_ordered;

/// How the rows of a cache stand for positions.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct CacheLayout {
    /// Positions of a compressed row, and slots of the window.
    pub ratio: FastDivmod<u32>,
    pub slots: FastDivmod<u32>,
    /// Whether the window ends with the last query, rather than being a ring.
    pub latest: u32,
}

/// What is visible to a query, by its position.
#[derive(CubeType)]
pub(crate) struct Visibility {
    pub sequence: u32,
    /// The query's number among those of its sequence.
    pub query: u32,
    /// The offset of its angles.
    pub angle: usize,
    /// Positions up to the newest that it sees, which is its own where attention is causal and else
    /// that of the last query; or 0 for a vacant sequence.
    pub visible_positions: u32,
    /// Compressed rows whose blocks are complete.
    pub visible_rows: u32,
    /// The slots of that newest position, and of the first one of the window, which may be before
    /// the start of the sequence.
    own_slot: u32,
    first_slot: u32,
}

#[cube]
impl Visibility {
    /// For query number `token` of all sequences. The position is requested after what was before.
    pub fn new<P: Int>(
        positions: &Positions<P>,
        token: u32,
        layout: &CacheLayout,
        shape: &AttentionShape,
        #[comptime] causal: bool,
        #[comptime] target: Target,
    ) -> Visibility {
        let table = &positions.table;
        let (sequence, query) = shape.query_of(token);
        let given = read_ordered(&positions.start, sequence as usize, target);
        let active = given >= P::from_int(0) && given < P::cast_from(table.positions);
        // The newest position that it sees, up to which all of its span lies.
        let newest = if comptime!(causal) {
            query
        } else {
            shape.count - 1
        };
        let position = select(active, u32::cast_from(given), 0u32) + newest;
        let visible_positions = select(active, position + 1, 0u32);
        let slots = shape.columns;
        // The last query has the last slot.
        let latest = slots - shape.count + newest;
        let own_slot = select(layout.latest != 0, latest, layout.slots.modulo(position));
        // No more than the slots, as a span is.
        let first = own_slot + slots + 1 - shape.span;
        Visibility {
            sequence,
            query,
            angle: table.at::<P>(given, query),
            visible_positions,
            visible_rows: min(layout.ratio.div(visible_positions), shape.rows),
            own_slot,
            first_slot: select(first < slots, first, first - slots),
        }
    }

    /// For query number `token` where masks say what is visible. The window's last rows are those
    /// of the queries, in their order.
    pub fn of_masks(shape: &AttentionShape, token: u32) -> Visibility {
        let (sequence, query) = shape.query_of(token);
        let first = shape.columns + 1 - shape.count - shape.span + query;
        Visibility {
            sequence,
            query,
            angle: 0usize.runtime(),
            visible_positions: shape.span,
            visible_rows: shape.rows,
            own_slot: first,
            first_slot: first,
        }
    }

    /// Whether a column of the window is visible.
    pub fn is_visible(&self, column: u32, shape: &AttentionShape) -> bool {
        column < shape.span && column + self.visible_positions >= shape.span
    }

    /// The slot of a column of the window. For a column that is not visible, it is that of
    /// the newest, since hidden rows may hold anything.
    pub fn slot(&self, column: u32, shape: &AttentionShape) -> u32 {
        let slot = self.first_slot + column;
        let slot = select(slot < shape.columns, slot, slot - shape.columns);
        select(self.is_visible(column, shape), slot, self.own_slot)
    }
}
