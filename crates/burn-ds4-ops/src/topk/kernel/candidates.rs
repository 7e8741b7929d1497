//! The elements of a row that may be among the largest: those that are not below a threshold.

use cubecl::prelude::*;

use super::bins::{key_of_column, lower_bound_of};
use super::bitmap::ColumnBitmap;
use super::radix_select::RadixSelect;
use super::row::{TopkIds, TopkRow};
use crate::intrinsics::{ballot, plane_running_sum, plane_value, push_below};
use crate::select::CubeUnits;
use crate::select::key::{NONE, key_of};

/// How [`long_row_kernel`](super::long_row_kernel) is compiled, for rows that no cube can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LongRowBlueprint {
    /// Vectors that a unit reads at once.
    pub vectors: u32,
    /// Vectors of the sample that each unit reads.
    pub sample: u32,
    /// Most candidates that shared memory holds.
    pub capacity: u32,
    /// Words of the bitmap of chosen columns: a power of two, and at least one for each unit.
    pub words: u32,
    /// The units of a cube.
    pub units: CubeUnits,
}

/// Candidates in shared memory, in no particular order.
#[derive(CubeType)]
pub(super) struct Candidates {
    pub values: Shared<[f32]>,
    /// Relative to the window.
    pub columns: Shared<[u32]>,
    count: Shared<[Atomic<u32>]>,
    #[cube(comptime)]
    blueprint: LongRowBlueprint,
}

#[cube]
impl Candidates {
    /// Creates an empty list. The cube must synchronise before the first candidate is added.
    pub fn new(#[comptime] blueprint: LongRowBlueprint) -> Candidates {
        let candidates = Candidates {
            values: Shared::new_slice(comptime!(blueprint.capacity as usize)),
            columns: Shared::new_slice(comptime!(blueprint.capacity as usize)),
            count: Shared::new_slice(1usize),
            blueprint,
        };
        if UNIT_POS == 0 {
            candidates.count[0usize].store(0u32);
        }
        candidates
    }

    /// The number of candidates, including those beyond the capacity, which are dropped.
    pub fn count(&self) -> u32 {
        self.count[0usize].load()
    }

    /// Adds the elements of the vectors `from..end` that are not below `threshold`. Every unit of
    /// the cube must call this.
    pub fn collect<F: Float, N: Size>(
        &mut self,
        row: &TopkRow<'_, F, N>,
        from: u32,
        end: u32,
        threshold: u32,
    ) {
        let blueprint = comptime!(self.blueprint);
        let units = comptime!(blueprint.units);
        let count = comptime!(blueprint.vectors as usize);
        let length = N::value();
        let size = N::value() as u32;
        // A comparison that rounds very small numbers to zero adds more candidates, never fewer.
        let lowest = lower_bound_of(threshold);
        let step = comptime!(units.cube * blueprint.vectors);
        let mut at = from;
        while at < end {
            let mut values = Array::<Vector<F, N>>::new(count);
            #[unroll]
            for i in 0..count {
                let vector = at + UNIT_POS + comptime!(i as u32 * units.cube);
                values[i] = row.read(min(vector, end - 1));
            }
            // The first element is in the highest bit.
            let mut below = 0u32;
            #[unroll]
            for i in 0..count {
                #[unroll]
                for j in 0..length {
                    let x = f32::cast_from(values[i].extract(j));
                    // NaN ranks as -inf, which can be the threshold.
                    below = push_below(below, x, lowest, units.target);
                }
            }
            let mut hits = below ^ comptime!(((1u64 << (count * length)) - 1) as u32);
            // The window begins or ends within a vector, or the vectors end within this iteration.
            let whole = at * size >= row.window.start && (at + step) * size <= row.window.end;
            if !whole || at + step > end {
                #[unroll]
                for i in 0..count {
                    let vector = at + UNIT_POS + comptime!(i as u32 * units.cube);
                    #[unroll]
                    for j in 0..length {
                        let column = vector * size + j as u32;
                        let bit = comptime!(1u32 << (count * length - 1 - (i * length + j)));
                        let holds = vector < end && row.window.holds(column);
                        hits &= select(holds, u32::MAX, comptime!(!bit));
                    }
                }
            }
            if ballot(hits != 0, units.target) != 0 {
                let own = hits.count_ones();
                let sum = plane_running_sum(own, units.plane, units.target);
                let last = comptime!(units.plane - 1);
                let mut base = 0u32;
                if UNIT_POS % units.plane == last {
                    base = self.count[0usize].fetch_add(sum);
                }
                let mut slot = plane_value(base, last, units.target) + sum - own;
                // Few lanes have more than one hit.
                while hits != 0 {
                    let bit = hits.trailing_zeros();
                    let hit = comptime!((count * length) as u32 - 1) - bit;
                    // Shift and mask, as in WGSL a remainder of a division by 1 is not 0 on every
                    // driver.
                    let (i, j) = (
                        hit >> comptime!(length.ilog2()),
                        hit & comptime!(length as u32 - 1),
                    );
                    let column = (at + UNIT_POS + i * units.cube) * size + j;
                    if slot < blueprint.capacity {
                        // Reading it again from the cache costs less than finding it in a register.
                        self.values[slot as usize] = row.value(column);
                        self.columns[slot as usize] = column - row.window.start;
                    }
                    slot += 1;
                    hits &= hits - 1;
                }
            }
            at += step;
        }
    }

    /// Writes the columns of the `k` largest of the first `count`, ascending. Every unit of the
    /// cube must call this.
    pub fn choose(
        &self,
        search: &mut RadixSelect,
        bitmap: &mut ColumnBitmap,
        count: u32,
        length: u32,
        output: &mut TopkIds,
        out: usize,
    ) {
        let units = comptime!(self.blueprint.units);
        search.begin(output.k);
        while search.needs_pass() {
            let mut i = UNIT_POS;
            while i < count {
                let x = self.values[i as usize];
                if search.whole {
                    search.add_pair(x, x, true, false);
                } else if search.may_contain(x) {
                    search.add_key(key_of(x), 1u32);
                }
                i += units.cube;
            }
            search.advance();
        }
        let selection = search.selection();
        let mut last = NONE.runtime();
        if selection.equals > 0 {
            let (first, end) = (key_of_column(length - 1), key_of_column(0u32));
            let (needed, inside) = (search.needed, search.inside);
            search.begin_in(needed, inside, first, end);
            while search.needs_pass() {
                let mut i = UNIT_POS;
                while i < count {
                    if key_of(self.values[i as usize]) == selection.equal {
                        search.add_key(key_of_column(self.columns[i as usize]), 1u32);
                    }
                    i += units.cube;
                }
                search.advance();
            }
            last = search.low;
        }

        let mut first = 0u32;
        let mut taken = 0u32;
        while first < length {
            let mut i = UNIT_POS;
            while i < count {
                let key = key_of(self.values[i as usize]);
                let column = self.columns[i as usize];
                let equal = selection.equals > 0 && key == selection.equal;
                if key >= selection.lowest || (equal && key_of_column(column) >= last) {
                    bitmap.mark(column, first);
                }
                i += units.cube;
            }
            taken += bitmap.write(&mut search.scanner, first, output, out + taken as usize);
            first += comptime!(self.blueprint.words * 32);
        }
    }
}
