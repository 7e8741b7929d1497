use cubecl::prelude::*;

use super::radix_select::{RadixSelect, TopkSelection};
use super::window::Window;
use crate::intrinsics::{ballot, plane_value};
use crate::select::CubeUnits;

/// Rows of logits in elements of `W`: numbers, or vectors, of which the last may reach beyond its
/// row, but can be read.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct LogitRows<W: CubePrimitive> {
    pub elements: Box<[W]>,
    pub columns: u32,
    /// Elements from one row to the next.
    pub stride: usize,
}

/// The chosen columns of each row, relative to its window: `[rows, k]`, -1 in slots without one.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct TopkIds {
    pub ids: Box<[i32]>,
    pub k: u32,
}

/// A row of logits.
#[derive(CubeType)]
pub(super) struct TopkRow<'a, F: Float, N: Size> {
    logits: &'a LogitRows<Vector<F, N>>,
    /// The same, element by element.
    elements: &'a [F],
    /// Vector that the row begins with.
    first: usize,
    /// Vectors of the row, of which the last may reach beyond it.
    pub vectors: u32,
    pub window: Window,
}

#[cube]
impl<'a, F: Float, N: Size> TopkRow<'a, F, N> {
    pub fn new(
        logits: &'a LogitRows<Vector<F, N>>,
        elements: &'a [F],
        first: usize,
        vectors: u32,
        window: Window,
    ) -> TopkRow<'a, F, N> {
        TopkRow::<'a, F, N> {
            logits,
            elements,
            first,
            vectors,
            window,
        }
    }

    pub fn read(&self, vector: u32) -> Vector<F, N> {
        self.logits.elements[self.first + vector as usize]
    }

    /// The element at a column.
    pub fn value(&self, column: u32) -> f32 {
        f32::cast_from(self.elements[self.first * N::value() + column as usize])
    }

    /// The key of the element at a column, or [`NONE`](crate::select::key::NONE) if it does not
    /// take part.
    pub fn key(&self, value: F, column: u32) -> u32 {
        self.window.key::<F>(value, column)
    }

    /// The first vector of the window.
    pub fn first_vector(&self) -> u32 {
        self.window.start / N::value() as u32
    }

    /// The vector after the last of the window.
    pub fn end_vector(&self) -> u32 {
        self.window.end.div_ceil(N::value() as u32)
    }

    /// Writes the `k` largest of a window that has more columns, whatever it holds. Reads the row
    /// once for each pass. Every unit of the cube must call this.
    pub fn choose_by_passes(
        &self,
        search: &mut RadixSelect,
        output: &mut TopkIds,
        out: usize,
        #[comptime] units: CubeUnits,
    ) {
        let length = N::value();
        let size = N::value() as u32;
        let lane = UNIT_POS % units.plane;
        let (first, end) = (self.first_vector(), self.end_vector());
        search.begin(output.k);
        while search.needs_pass() {
            let mut at = first;
            while at < end {
                let vector = at + UNIT_POS;
                let values = self.read(min(vector, end - 1));
                let mut keys = Array::<u32>::new(length);
                #[unroll]
                for j in 0..length {
                    keys[j] = self.key(values.extract(j), vector * size + j as u32);
                }
                // Counts equal keys with one addition: units of a plane that all have the same key
                // would otherwise queue for the same counter.
                let leader = plane_value(keys[0usize], 0u32, units.target);
                let mut same = true;
                #[unroll]
                for j in 0..length {
                    same = same && keys[j] == leader;
                }
                let same = ballot(same, units.target).count_ones();
                if same == units.plane {
                    if lane == 0 {
                        search.add_key(leader, size * units.plane);
                    }
                } else {
                    #[unroll]
                    for j in 0..length {
                        search.add_key(keys[j], 1u32);
                    }
                }
                at += units.cube;
            }
            search.advance();
        }
        let selection = search.selection();

        let mut taken = 0u32;
        let mut equals = 0u32;
        let mut at = first;
        while at < end {
            let vector = at + UNIT_POS;
            let values = self.read(min(vector, end - 1));
            let mut count = 0u32;
            #[unroll]
            for j in 0..length {
                let key = self.key(values.extract(j), vector * size + j as u32);
                count += selection.count(key);
            }
            // The selection with as many equal keys as earlier vectors have left to take.
            let rest = TopkSelection {
                lowest: selection.lowest,
                equal: selection.equal,
                equals: selection.equals - min(equals, selection.equals),
            };
            let scan = search.scanner.scan(count);
            let mut rank = rest.rank(scan.before);
            #[unroll]
            for j in 0..length {
                let column = vector * size + j as u32;
                let key = self.key(values.extract(j), column);
                if rest.takes(key, &mut rank) {
                    let at = out + (taken + rank.taken) as usize - 1;
                    output.ids[at] = (column - self.window.start) as i32;
                }
            }
            let all = rest.rank(scan.total);
            taken += all.taken;
            equals += scan.total >> 16;
            at += units.cube;
            sync_cube();
        }
    }
}

/// Writes all columns of a window that has no more than `k`, and -1 to the slots that it leaves
/// over.
#[cube]
pub(super) fn write_all_columns(
    output: &mut TopkIds,
    out: usize,
    length: u32,
    #[comptime] units: CubeUnits,
) {
    let mut at = UNIT_POS;
    while at < length {
        output.ids[out + at as usize] = at as i32;
        at += units.cube;
    }
    let mut at = length + UNIT_POS;
    while at < output.k {
        output.ids[out + at as usize] = -1i32;
        at += units.cube;
    }
}
