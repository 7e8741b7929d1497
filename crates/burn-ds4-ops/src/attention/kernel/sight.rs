//! What a query sees of a cache.

use cubecl::prelude::*;

use super::rotate::Table;
use super::sink::Sizes;

/// What follows from a query's position.
#[derive(CubeType)]
pub(super) struct Sight {
    pub sequence: u32,
    /// Number of the query among those of its sequence.
    pub query: u32,
    /// Where its angles are.
    pub angle: usize,
    /// Positions up to its own; none of a sequence that is not there.
    pub known: u32,
    /// Compressed rows that are complete.
    pub visible: u32,
    /// Its slot, and that of the first position of its window, which may be before the first of all.
    own_slot: u32,
    first_slot: u32,
}

#[cube]
impl Sight {
    /// Of query number `token` of all.
    pub fn new<P: Int>(start: &[P], token: u32, ratio: u32, sizes: &Sizes, table: &Table) -> Sight {
        let (sequence, query) = (token / sizes.count, token % sizes.count);
        let given = start[sequence as usize];
        let there = given >= P::from_int(0) && given < P::cast_from(table.known);
        let position = select(there, u32::cast_from(given), 0u32) + query;
        let known = select(there, position + 1, 0u32);
        let slots = sizes.columns;
        let own_slot = position % slots;
        Sight {
            sequence,
            query,
            angle: table.at::<P>(given, query),
            known,
            visible: min(known / ratio, sizes.rows),
            own_slot,
            first_slot: (own_slot + slots + 1 - sizes.span) % slots,
        }
    }

    /// Whether a column of the window is seen.
    pub fn sees(&self, column: u32, sizes: &Sizes) -> bool {
        column < sizes.span && column + self.known >= sizes.span
    }

    /// Its slot. What is not seen may be anything; the query's own row is seen.
    pub fn slot(&self, column: u32, sizes: &Sizes) -> u32 {
        let slot = self.first_slot + column;
        let slot = select(slot < sizes.columns, slot, slot - sizes.columns);
        select(self.sees(column, sizes), slot, self.own_slot)
    }
}
