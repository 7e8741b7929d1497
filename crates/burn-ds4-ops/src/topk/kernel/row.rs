use cubecl::prelude::*;

use super::search::{Choice, Search, Units};
use super::window::Window;
use crate::intrinsics::{ballot, plane_value};

/// A row of logits.
#[derive(CubeType)]
pub(super) struct Row<'a, F: Float, N: Size> {
    logits: &'a [Vector<F, N>],
    /// The same, element by element.
    elements: &'a [F],
    /// Its first vector.
    first: usize,
    /// Its vectors, of which the last may reach beyond it.
    pub vectors: u32,
    pub window: Window,
}

#[cube]
impl<'a, F: Float, N: Size> Row<'a, F, N> {
    pub fn new(
        logits: &'a [Vector<F, N>],
        elements: &'a [F],
        first: usize,
        vectors: u32,
        window: Window,
    ) -> Row<'a, F, N> {
        Row::<'a, F, N> {
            logits,
            elements,
            first,
            vectors,
            window,
        }
    }

    pub fn read(&self, vector: u32) -> Vector<F, N> {
        self.logits[self.first + vector as usize]
    }

    /// What is at a column.
    pub fn value(&self, column: u32) -> f32 {
        f32::cast_from(self.elements[self.first * N::value() + column as usize])
    }

    /// The key of what is at a column, if that takes part.
    pub fn key(&self, value: F, column: u32) -> u32 {
        self.window.key::<F>(value, column)
    }

    /// The first vector of the window, and the one after the last.
    pub fn first_vector(&self) -> u32 {
        self.window.start / N::value() as u32
    }

    pub fn end_vector(&self) -> u32 {
        self.window.end.div_ceil(N::value() as u32)
    }

    /// Writes the `k` largest of a window of more columns, whatever it holds: reads the row again and again.
    pub fn choose_from_all(
        &self,
        search: &mut Search,
        ids: &mut [i32],
        out: usize,
        k: u32,
        #[comptime] units: Units,
    ) {
        let length = N::value();
        let size = N::value() as u32;
        let lane = UNIT_POS % units.plane;
        let (first, end) = (self.first_vector(), self.end_vector());
        search.begin(k);
        while search.goes_on() {
            let mut at = first;
            while at < end {
                let vector = at + UNIT_POS;
                let values = self.read(min(vector, end - 1));
                let mut keys = Array::<u32>::new(length);
                #[unroll]
                for j in 0..length {
                    keys[j] = self.key(values.extract(j), vector * size + j as u32);
                }
                // Equal keys, which may be all there are, would queue for the same counter.
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
        let choice = search.choice();

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
                count += choice.count(key);
            }
            // What earlier vectors have left of the equal ones.
            let rest = Choice {
                lowest: choice.lowest,
                equal: choice.equal,
                equals: choice.equals - min(equals, choice.equals),
                as_floats: choice.as_floats,
                lowest_float: choice.lowest_float,
            };
            let scan = search.scanner.scan(count);
            let mut rank = rest.rank(scan.before);
            #[unroll]
            for j in 0..length {
                let column = vector * size + j as u32;
                let key = self.key(values.extract(j), column);
                if rest.takes(key, &mut rank) {
                    let at = out + (taken + rank.taken) as usize - 1;
                    ids[at] = (column - self.window.start) as i32;
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

/// Writes all columns of a window that has no more than `k`.
#[cube]
pub(super) fn take_all(ids: &mut [i32], out: usize, length: u32, k: u32, #[comptime] units: Units) {
    let mut at = UNIT_POS;
    while at < length {
        ids[out + at as usize] = at as i32;
        at += units.cube;
    }
    fill(ids, out, length, k, units);
}

/// -1 in the slots that a window of so many columns leaves over.
#[cube]
fn fill(ids: &mut [i32], out: usize, length: u32, k: u32, #[comptime] units: Units) {
    let mut at = length + UNIT_POS;
    while at < k {
        ids[out + at as usize] = -1i32;
        at += units.cube;
    }
}
