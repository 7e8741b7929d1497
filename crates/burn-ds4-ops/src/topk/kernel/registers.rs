use cubecl::prelude::*;

use super::radix_select::{RadixSelect, TopkSelection};
use crate::intrinsics::{ballot, plane_running_sum, plane_value, push_below};
use crate::select::key::key_of;
use crate::select::{CubeUnits, Scanner};

/// Elements of a row that the units of a cube hold in registers.
///
/// Each plane holds a contiguous part of them. It reads one vector for each lane at a time, so that
/// what a plane reads at once is contiguous.
#[derive(CubeType)]
pub(super) struct RowRegisters {
    /// The unit's elements, vector by vector: 32 at most.
    pub values: Array<f32>,
    /// Which of them take part, the first in the lowest bit.
    pub mask: u32,
    #[cube(comptime)]
    vectors: u32,
    /// Elements of a vector.
    #[cube(comptime)]
    length: u32,
    #[cube(comptime)]
    units: CubeUnits,
}

/// The unit's first vector, where every unit has `vectors` of them. Each of the others follows at a
/// distance of one plane.
#[cube]
pub(super) fn first_vector_of(#[comptime] vectors: u32, #[comptime] units: CubeUnits) -> u32 {
    UNIT_POS / units.plane * comptime!(vectors * units.plane) + UNIT_POS % units.plane
}

/// How many elements there are before each of a unit's vectors, and in all.
#[derive(CubeType)]
pub(super) struct ElementsBefore {
    pub vectors: Array<u32>,
    pub total: u32,
}

#[cube]
impl RowRegisters {
    pub fn new(
        #[comptime] vectors: u32,
        #[comptime] length: u32,
        #[comptime] units: CubeUnits,
    ) -> RowRegisters {
        comptime!(assert!(vectors * length <= 32, "a bit to an element"));
        RowRegisters {
            values: Array::new(comptime!((vectors * length) as usize)),
            mask: 0u32,
            vectors,
            length,
            units,
        }
    }

    /// Stores vector number `index` of the unit, of which the elements in `mask` take part.
    pub fn set<F: Float, N: Size>(
        &mut self,
        #[comptime] index: u32,
        vector: Vector<F, N>,
        mask: u32,
    ) {
        let first = comptime!(index * self.length);
        self.mask |= mask << first;
        #[unroll]
        for j in 0..comptime!(self.length as usize) {
            self.values[comptime!(first as usize + j)] = f32::cast_from(vector.extract(j));
        }
    }

    /// Counts the elements in a pass of a search.
    pub fn add_to(&self, search: &mut RadixSelect) {
        let count = comptime!(self.vectors * self.length);
        if search.whole {
            #[unroll]
            for pair in 0..comptime!(count.div_ceil(2)) {
                let (a, b) = comptime!((2 * pair, (2 * pair + 1).min(count - 1)));
                let has_a = self.mask & comptime!(1u32 << a) != 0;
                let mut has_b = false;
                if comptime!(b > a) {
                    has_b = self.mask & comptime!(1u32 << b) != 0;
                }
                search.add_pair(
                    self.values[a as usize],
                    self.values[b as usize],
                    has_a,
                    has_b,
                );
            }
        } else {
            // From the last to the first, so that the first ends up in the lowest bit.
            let mut outside = 0u32;
            #[unroll]
            for e in 0..count {
                let x = self.values[comptime!((count - 1 - e) as usize)];
                outside = search.push_outside(outside, x);
            }
            let mut inside = !outside;
            inside &= self.mask;
            // A plane seldom has more than a few of them.
            while inside != 0 {
                let x = value_at(
                    &self.values,
                    inside.trailing_zeros(),
                    comptime!(count as usize),
                );
                search.add_key(key_of(x), 1u32);
                inside &= inside - 1;
            }
        }
    }

    /// Which elements are not below a threshold. NaN ranks as -inf, which can be the threshold.
    pub fn at_least(&self, threshold: f32) -> u32 {
        let (count, units) = comptime!((self.vectors * self.length, self.units));
        let mut below = 0u32;
        #[unroll]
        for e in 0..count {
            let x = self.values[comptime!((count - 1 - e) as usize)];
            below = push_below(below, x, threshold, units.target);
        }
        !below & self.mask
    }

    /// Which elements are among the largest, once no pass is needed to rank those that are left.
    /// Every unit of the cube must call this.
    pub fn taken(&self, search: &mut RadixSelect) -> u32 {
        let taken = if search.can_rank() {
            self.ranked(search)
        } else {
            let selection = search.selection();
            self.selected(&selection, &mut search.scanner)
        };
        taken & self.mask
    }

    /// [`taken`](Self::taken) where the elements of the interval are ranked.
    fn ranked(&self, search: &mut RadixSelect) -> u32 {
        let count = comptime!(self.vectors * self.length);
        let mut outside = 0u32;
        let mut above = 0u32;
        #[unroll]
        for e in 0..count {
            let x = self.values[comptime!((count - 1 - e) as usize)];
            outside = search.push_outside(outside, x);
            above = search.push_above(above, x);
        }
        let inside = !outside & self.mask;
        // A plane seldom has more than a few of them.
        let mut rest = inside;
        while rest != 0 {
            let e = rest.trailing_zeros();
            let key = key_of(value_at(&self.values, e, comptime!(count as usize)));
            if search.contains(key) {
                search.ranked.add(key, self.place(e));
            }
            rest &= rest - 1;
        }
        let last = search.last_taken();
        // Comparisons of floats may have left elements here that are not in the interval.
        let mut rest = inside;
        while rest != 0 {
            let e = rest.trailing_zeros();
            let key = key_of(value_at(&self.values, e, comptime!(count as usize)));
            above |= select(last.takes(key, self.place(e)), 1u32 << e, 0u32);
            rest &= rest - 1;
        }
        above
    }

    /// [`taken`](Self::taken) where the k-th largest is known.
    fn selected(&self, selection: &TopkSelection, scanner: &mut Scanner) -> u32 {
        let (count, vectors) = comptime!((self.vectors * self.length, self.vectors));
        let mut above = 0u32;
        let mut equal = 0u32;
        #[unroll]
        for e in 0..count {
            let bit = comptime!(1u32 << e);
            let key = key_of(self.values[e as usize]);
            above |= select(key >= selection.lowest, bit, 0u32);
            equal |= select(key == selection.equal, bit, 0u32);
        }
        equal &= self.mask;
        if selection.equals > 0 {
            let before = self.in_order(equal, scanner);
            #[unroll]
            for i in 0..vectors {
                let mut equals = before.vectors[i as usize];
                let mut rest = equal & comptime!(vector_bits(i, self.length));
                while rest != 0 && equals < selection.equals {
                    let others = rest & (rest - 1);
                    above |= rest ^ others;
                    rest = others;
                    equals += 1;
                }
            }
            // The scanner is used again.
            sync_cube();
        }
        above
    }

    /// Where an element is in the row, of all that the cube holds.
    fn place(&self, index: u32) -> u32 {
        let length = comptime!(self.length);
        // Shift and mask: a remainder of a division by 1 is not always 0.
        let (i, j) = (index >> comptime!(length.ilog2()), index & (length - 1));
        let (vectors, units) = comptime!((self.vectors, self.units));
        (first_vector_of(vectors, units) + i * units.plane) * length + j
    }

    /// Counts the elements in `bits` that are before each vector, in the order of the row. Every
    /// unit of the cube must call this.
    pub fn in_order(&self, bits: u32, scanner: &mut Scanner) -> ElementsBefore {
        let (vectors, units) = comptime!((self.vectors, self.units));
        let lane = UNIT_POS % units.plane;
        let mut before = Array::<u32>::new(comptime!(vectors as usize));
        let mut total = 0u32;
        #[unroll]
        for i in 0..vectors {
            let own = bits & comptime!(vector_bits(i, self.length));
            if comptime!(self.length == 1) {
                let all = ballot(own != 0, units.target);
                before[i as usize] = total + (all & ((1u32 << lane) - 1)).count_ones();
                total += all.count_ones();
            } else {
                let own = own.count_ones();
                let sum = plane_running_sum(own, units.plane, units.target);
                before[i as usize] = total + sum - own;
                total += plane_value(sum, comptime!(units.plane - 1), units.target);
            }
        }
        let planes = scanner.scan_planes(total);
        #[unroll]
        for i in 0..vectors {
            before[i as usize] += planes.before;
        }
        ElementsBefore {
            vectors: before,
            total: planes.total,
        }
    }
}

/// The bits of the elements of vector number `index`.
fn vector_bits(index: u32, length: u32) -> u32 {
    (((1u64 << length) - 1) as u32) << (index * length)
}

/// The value at `index`. Arrays in registers cannot be indexed, so this selects it bit by bit of
/// the index.
#[cube]
fn value_at(values: &Array<f32>, index: u32, #[comptime] count: usize) -> f32 {
    let last = comptime!(count - 1);
    let count = comptime!(count.next_power_of_two());
    let mut rest = Array::<f32>::new(count);
    #[unroll]
    for e in 0..count {
        rest[e] = values[comptime!(e.min(last))];
    }
    #[unroll]
    for bit in 0..comptime!(count.ilog2()) {
        let odd = (index >> bit) & 1 == 1;
        #[unroll]
        for e in 0..comptime!(count >> (bit + 1)) {
            rest[e] = select(odd, rest[comptime!(2 * e + 1)], rest[comptime!(2 * e)]);
        }
    }
    rest[0usize]
}
