use cubecl::prelude::*;

use super::key::key_of;
use super::search::{Choice, Scanner, Search, Units};
use crate::intrinsics::{ballot, plane_running_sum, plane_value, push_below};

/// Elements that the units of a cube hold in registers.
///
/// Each plane has a stretch of them. It takes it in rounds of one vector to a lane, so that what a plane reads at once lies together.
#[derive(CubeType)]
pub(super) struct Held {
    /// The unit's, round by round: 32 at most.
    pub values: Array<f32>,
    /// Which of them take part, the first in the lowest bit.
    pub mask: u32,
    #[cube(comptime)]
    rounds: u32,
    /// Elements of a vector.
    #[cube(comptime)]
    length: u32,
    #[cube(comptime)]
    units: Units,
}

/// The first vector of a unit, if every unit has so many. Those of its other rounds follow at the distance of a plane.
#[cube]
pub(super) fn first_vector_of(#[comptime] rounds: u32, #[comptime] units: Units) -> u32 {
    UNIT_POS / units.plane * comptime!(rounds * units.plane) + UNIT_POS % units.plane
}

/// Which elements of a unit are among the largest, and where in the result each round's begin.
#[derive(CubeType)]
pub(super) struct Taken {
    /// The first in the lowest bit.
    pub above: u32,
    /// Those that are equal to the k-th largest, and are taken if there is room.
    pub equal: u32,
    /// Numbers of elements before each round, in the form that [`Choice::rank`] knows.
    pub before: Array<u32>,
    /// Of all, in the same form.
    pub total: u32,
}

#[cube]
impl Held {
    pub fn new(#[comptime] rounds: u32, #[comptime] length: u32, #[comptime] units: Units) -> Held {
        comptime!(assert!(rounds * length <= 32, "a bit to an element"));
        Held {
            values: Array::new(comptime!((rounds * length) as usize)),
            mask: 0u32,
            rounds,
            length,
            units,
        }
    }

    /// Takes a vector in, of which the elements in `mask` take part.
    pub fn set<F: Float, N: Size>(
        &mut self,
        #[comptime] round: u32,
        vector: Vector<F, N>,
        mask: u32,
    ) {
        let first = comptime!(round * self.length);
        self.mask |= mask << first;
        #[unroll]
        for j in 0..comptime!(self.length as usize) {
            self.values[comptime!(first as usize + j)] = f32::cast_from(vector.extract(j));
        }
    }

    /// Adds them to a step of a search.
    pub fn add_to(&self, search: &mut Search) {
        let count = comptime!(self.rounds * self.length);
        if search.whole {
            #[unroll]
            for pair in 0..comptime!(count.div_ceil(2)) {
                let (a, b) = comptime!((2 * pair, (2 * pair + 1).min(count - 1)));
                let has_a = self.mask & comptime!(1u32 << a) != 0;
                let mut has_b = false;
                if comptime!(b > a) {
                    has_b = self.mask & comptime!(1u32 << b) != 0;
                }
                search.add_first(
                    self.values[a as usize],
                    self.values[b as usize],
                    has_a,
                    has_b,
                );
            }
        } else {
            // Backwards, so that the first ends up in the lowest bit.
            let mut outside = 0u32;
            #[unroll]
            for e in 0..count {
                let x = self.values[comptime!((count - 1 - e) as usize)];
                outside = search.push_outside(outside, x);
            }
            let mut inside = !outside;
            inside &= self.mask;
            // Seldom more than a few in a plane.
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

    /// Which of them are not below a threshold. NaN ranks as -inf, which can be the threshold.
    pub fn from(&self, threshold: f32) -> u32 {
        let (count, units) = comptime!((self.rounds * self.length, self.units));
        let mut below = 0u32;
        #[unroll]
        for e in 0..count {
            let x = self.values[comptime!((count - 1 - e) as usize)];
            below = push_below(below, x, threshold, units.target);
        }
        !below & self.mask
    }

    /// Which of them are among the largest. All of the cube must be here.
    pub fn taken(&self, choice: &Choice, scanner: &mut Scanner) -> Taken {
        let count = comptime!(self.rounds * self.length);
        let mut above = 0u32;
        let mut equal = 0u32;
        if choice.as_floats {
            #[unroll]
            for e in 0..count {
                let bit = comptime!(1u32 << e);
                above |= select(self.values[e as usize] >= choice.lowest_float, bit, 0u32);
            }
        } else {
            #[unroll]
            for e in 0..count {
                let bit = comptime!(1u32 << e);
                let key = key_of(self.values[e as usize]);
                above |= select(key >= choice.lowest, bit, 0u32);
                equal |= select(key == choice.equal, bit, 0u32);
            }
        }
        self.in_order(above & self.mask, equal & self.mask, scanner)
    }

    /// Counts those before each round. All of the cube must be here.
    pub fn in_order(&self, above: u32, equal: u32, scanner: &mut Scanner) -> Taken {
        let (rounds, units) = comptime!((self.rounds, self.units));
        let lane = UNIT_POS % units.plane;
        let mut before = Array::<u32>::new(comptime!(rounds as usize));
        let mut total = 0u32;
        #[unroll]
        for round in 0..rounds {
            let bits = comptime!((((1u64 << self.length) - 1) as u32) << (round * self.length));
            // Both counts in one: there are fewer than 2^16 elements.
            if comptime!(self.length == 1) {
                let above = ballot(above & bits != 0, units.target);
                let equal = ballot(equal & bits != 0, units.target);
                let first = (1u32 << lane) - 1;
                before[round as usize] =
                    total + (above & first).count_ones() + ((equal & first).count_ones() << 16);
                total += above.count_ones() + (equal.count_ones() << 16);
            } else {
                let own = (above & bits).count_ones() + ((equal & bits).count_ones() << 16);
                let sum = plane_running_sum(own, units.plane, units.target);
                before[round as usize] = total + sum - own;
                total += plane_value(sum, comptime!(units.plane - 1), units.target);
            }
        }
        let planes = scanner.scan_planes(total);
        #[unroll]
        for round in 0..rounds {
            before[round as usize] += planes.before;
        }
        Taken {
            above,
            equal,
            before,
            total: planes.total,
        }
    }
}

/// One of so many values: arrays in registers have no index.
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
