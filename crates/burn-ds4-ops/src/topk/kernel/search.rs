//! Where the k-th largest of a multiset of keys is: the interval that it is in is divided into bins again and again.

use cubecl::prelude::*;

use super::key::{
    BINS, LOG2_BINS, NONE, bins_of, first_key, float_of, is_comparable, lower_bound_of,
};
use crate::intrinsics::{
    Target, has_nan_bits, plane_running_sum, plane_value, push_outside, sum_of_plane,
};

/// The units that work together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Units {
    /// Units of a cube: a power of two.
    pub cube: u32,
    /// Lanes of a plane.
    pub plane: u32,
    /// What the instructions are that the kernel may use.
    pub target: Target,
}

impl Units {
    fn planes(&self) -> u32 {
        self.cube / self.plane
    }
}

/// Divisions after which an interval is a single key, at the latest, with some to spare.
const MAX_STEPS: u32 = 8;

/// The keys that are among the k largest: those from `lowest` on, and the first `equals` of those that are `equal`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Choice {
    pub lowest: u32,
    pub equal: u32,
    pub equals: u32,
    /// The elements from `lowest_float` on are all that are taken. Only where no driver takes it for granted that there is no NaN.
    pub as_floats: bool,
    pub lowest_float: f32,
}

/// How many of the keys before have been taken, and how many were equal to the k-th largest.
#[derive(CubeType)]
pub(super) struct Rank {
    pub taken: u32,
    equals: u32,
}

#[cube]
impl Choice {
    /// What a key adds to a sum of which [`rank`](Self::rank) knows what it means, for fewer than 2^16 keys.
    pub fn count(&self, key: u32) -> u32 {
        let equal = select(key == self.equal && key != NONE, 1u32 << 16, 0u32);
        select(key >= self.lowest, 1u32, equal)
    }

    pub fn rank(&self, counts: u32) -> Rank {
        let equals = counts >> 16;
        Rank {
            taken: (counts & 0xffff) + min(equals, self.equals),
            equals,
        }
    }

    /// Whether the next key, in the order of their columns, is taken.
    pub fn takes(&self, key: u32, rank: &mut Rank) -> bool {
        let equal = key == self.equal && key != NONE;
        (key >= self.lowest || equal) && self.takes_next(equal, rank)
    }

    /// The same for a key that is known to be large enough or equal to the k-th largest.
    pub fn takes_next(&self, equal: bool, rank: &mut Rank) -> bool {
        let takes = !equal || rank.equals < self.equals;
        rank.equals += select(equal, 1u32, 0u32);
        rank.taken += select(takes, 1u32, 0u32);
        takes
    }
}

/// A sum over the units before this one, and over all.
#[derive(CubeType)]
pub(super) struct Scan {
    pub before: u32,
    pub total: u32,
}

/// Shared memory for sums over the cube.
#[derive(CubeType)]
pub(super) struct Scanner {
    planes: Shared<[u32]>,
    #[cube(comptime)]
    units: Units,
}

#[cube]
impl Scanner {
    pub fn new(#[comptime] units: Units) -> Scanner {
        Scanner {
            planes: Shared::new_slice(comptime!(units.planes() as usize)),
            units,
        }
    }

    /// All of the cube must be here; between two calls, all must have waited for each other.
    pub fn scan(&mut self, x: u32) -> Scan {
        let units = comptime!(self.units);
        let sum = plane_running_sum(x, units.plane, units.target);
        let last = comptime!(units.plane - 1);
        let all = self.scan_planes(plane_value(sum, last, units.target));
        Scan {
            before: all.before + sum - x,
            total: all.total,
        }
    }

    /// The sum over the planes before this one, and over all, of what all lanes of a plane have.
    pub fn scan_planes(&mut self, sum: u32) -> Scan {
        let units = comptime!(self.units);
        let count = comptime!(units.planes());
        let lane = UNIT_POS % units.plane;
        let plane = UNIT_POS / units.plane;
        if lane == 0 {
            self.planes[plane as usize] = sum;
        }
        sync_cube();
        let mut before = 0u32;
        let mut total = 0u32;
        #[unroll]
        for i in 0..comptime!(count.div_ceil(units.plane)) {
            let other = i * units.plane + lane;
            let mut sum = 0u32;
            if comptime!(count % units.plane == 0) || other < count {
                sum = self.planes[other as usize];
            }
            before += select(other < plane, sum, 0u32);
            total += sum;
        }
        Scan {
            before: sum_of_plane(before, units.plane, units.target),
            total: sum_of_plane(total, units.plane, units.target),
        }
    }
}

/// The interval of keys that the k-th largest is in.
#[derive(CubeType)]
pub(super) struct Search {
    bins: Shared<[Atomic<u32>]>,
    /// The bin found, and the keys above and in it.
    found: Shared<[u32]>,
    pub scanner: Scanner,
    /// The interval, with both ends.
    pub low: u32,
    pub high: u32,
    /// The same as floats.
    low_float: f32,
    high_float: f32,
    /// How many of its keys are among the k largest, and how many there are.
    pub needed: u32,
    pub inside: u32,
    /// Binary logarithm of the width of a bin.
    shift: u32,
    /// Divisions so far.
    steps: u32,
    /// The interval is that of all keys, whose bins are of different widths.
    pub whole: bool,
    #[cube(comptime)]
    units: Units,
}

#[cube]
impl Search {
    pub fn new(#[comptime] units: Units) -> Search {
        let mut search = Search {
            bins: Shared::new_slice(comptime!(BINS as usize)),
            found: Shared::new_slice(3usize),
            scanner: Scanner::new(units),
            low: NONE + 1,
            high: u32::MAX,
            low_float: 0.0f32,
            high_float: 0.0f32,
            needed: 0u32,
            inside: 0u32,
            shift: 0u32,
            steps: 0u32,
            whole: true,
            units,
        };
        search.clear();
        search
    }

    fn clear(&mut self) {
        let units = comptime!(self.units);
        #[unroll]
        for i in 0..comptime!(BINS / units.cube) {
            self.bins[(UNIT_POS + i * units.cube) as usize].store(0u32);
        }
    }

    /// Begins with all keys. Fewer than `needed` leave the interval as it is.
    pub fn begin(&mut self, needed: u32) {
        self.steps = 0u32;
        self.needed = needed;
        self.low = NONE + 1;
        self.high = u32::MAX;
        self.inside = u32::MAX;
        self.shift = 0u32;
        self.whole = true;
    }

    /// Begins with an interval, which must not be that of all keys.
    pub fn begin_within(&mut self, needed: u32, inside: u32, low: u32, high: u32) {
        self.steps = 0u32;
        self.needed = needed;
        self.inside = inside;
        self.narrow(low, high);
    }

    fn narrow(&mut self, low: u32, high: u32) {
        self.low = low;
        self.high = high;
        self.low_float = lower_bound_of(low);
        self.high_float = float_of(high);
        let bits = 32u32 - (high - low).leading_zeros();
        self.shift = select(bits > LOG2_BINS, bits - LOG2_BINS, 0u32);
        self.whole = false;
    }

    /// Whether it takes another division to tell which keys are larger than the k-th largest.
    pub fn goes_on(&self) -> bool {
        // The number of steps ends it where there are fewer keys than the caller says.
        self.inside != self.needed && self.low != self.high && self.steps < MAX_STEPS
    }

    /// What is among the k largest: once the search does not go on.
    pub fn choice(&self) -> Choice {
        let ties = self.inside > self.needed;
        Choice {
            lowest: select(ties, self.high + 1, self.low),
            equal: select(ties, self.high, NONE),
            equals: select(ties, self.needed, 0u32),
            as_floats: comptime!(self.units.target.ptx) && !ties && is_comparable(self.low),
            lowest_float: self.low_float,
        }
    }

    /// Counts two elements in the first step of a search that began with all keys, if they take part.
    pub fn add_first(&mut self, a: f32, b: f32, has_a: bool, has_b: bool) {
        let places = comptime!(((BINS - 1) << 16) | (BINS - 1))
            - bins_of(a, b, comptime!(self.units.target));
        if has_a {
            self.bins[(places & 0xffff) as usize].fetch_add(1u32);
        }
        if has_b {
            self.bins[(places >> 16) as usize].fetch_add(1u32);
        }
    }

    /// Whether an element is in the interval, or may be: NaN, and whatever a comparison of floats rounds to zero.
    pub fn may_hold(&self, x: f32) -> bool {
        !(x < self.low_float || x > self.high_float) || has_nan_bits(x)
    }

    /// `bits` shifted up by one, and in the lowest bit whether an element is outside of the interval for sure.
    pub fn push_outside(&self, bits: u32, x: f32) -> u32 {
        push_outside(
            bits,
            x,
            self.low_float,
            self.high_float,
            comptime!(self.units.target),
        )
    }

    /// Counts a key so many times, if it is in the interval and an element's.
    pub fn add_key(&mut self, key: u32, count: u32) {
        // The keys below the interval become very large.
        let offset = key - self.low;
        if offset <= self.high - self.low {
            let mut place = offset >> self.shift;
            if self.whole {
                let x = float_of(key);
                place = bins_of(x, x, comptime!(self.units.target)) & 0xffff;
            }
            self.bins[(comptime!(BINS - 1) - place) as usize].fetch_add(count);
        }
    }

    /// All keys have been added: goes on to the bin of the k-th largest. All of the cube must be here.
    pub fn advance(&mut self) {
        let units = comptime!(self.units);
        // Each plane has a stretch of bins, in rows of as many as it has lanes. Largest first.
        let rows = comptime!(BINS / units.cube);
        let first = UNIT_POS / units.plane * comptime!(rows * units.plane) + UNIT_POS % units.plane;
        self.steps += 1;
        sync_cube();
        let mut counts = Array::<u32>::new(comptime!(rows as usize));
        let mut sum = 0u32;
        #[unroll]
        for i in 0..rows {
            let place = (first + i * units.plane) as usize;
            let count = self.bins[place].load();
            self.bins[place].store(0u32);
            counts[i as usize] = count;
            sum += count;
        }
        let plane = sum_of_plane(sum, units.plane, units.target);
        let scan = self.scanner.scan_planes(plane);
        // The same for all lanes.
        if scan.before < self.needed && scan.before + plane >= self.needed {
            let mut before = scan.before;
            #[unroll]
            for i in 0..rows {
                let count = counts[i as usize];
                let row = sum_of_plane(count, units.plane, units.target);
                if before < self.needed && before + row >= self.needed {
                    let running = plane_running_sum(count, units.plane, units.target);
                    let above = before + running - count;
                    if above < self.needed && above + count >= self.needed {
                        self.found[0usize] = comptime!(BINS - 1) - (first + i * units.plane);
                        self.found[1usize] = above;
                        self.found[2usize] = count;
                    }
                }
                before += row;
            }
        }
        sync_cube();
        if scan.total >= self.needed && self.needed > 0 {
            let bin = self.found[0usize];
            self.needed -= self.found[1usize];
            self.inside = self.found[2usize];
            if self.whole {
                let target = comptime!(self.units.target);
                self.narrow(first_key(bin, target), first_key(bin + 1, target) - 1);
            } else {
                let low = self.low + (bin << self.shift);
                let high = low + ((1u32 << self.shift) - 1);
                self.narrow(low, min(high, self.high));
            }
        }
    }
}
