//! Finds the interval of the k-th largest of a multiset of keys. Each pass divides the interval
//! into bins and continues with one of them.

use cubecl::prelude::*;

use super::bins::{BINS, LOG2_BINS, bins_of, first_key, lower_bound_of};
use super::ranked::{LastTaken, RankedKeys, most_ranked};
use crate::intrinsics::{
    add_shared, has_nan_bits, plane_running_sum, push_above, push_outside, sum_of_plane,
};
use crate::select::key::{NONE, float_of};
use crate::select::{CubeUnits, Scanner};

/// Passes after which an interval is a single key, at the latest, with some to spare.
const MAX_PASSES: u32 = 8;

/// Which keys are among the k largest: those that are at least `lowest`, and the first `equals` of
/// those that are `equal`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct TopkSelection {
    pub lowest: u32,
    pub equal: u32,
    pub equals: u32,
}

/// How many of the preceding keys have been taken, and how many were equal to the k-th largest.
#[derive(CubeType)]
pub(super) struct Rank {
    pub taken: u32,
    equals: u32,
}

#[cube]
impl TopkSelection {
    /// What a key adds to a sum that [`rank`](Self::rank) unpacks. The sum is over fewer than 2^16
    /// keys.
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

    /// Whether the next key, in the order of columns, is taken.
    pub fn takes(&self, key: u32, rank: &mut Rank) -> bool {
        let equal = key == self.equal && key != NONE;
        let takes = key >= self.lowest || (equal && rank.equals < self.equals);
        rank.equals += select(equal, 1u32, 0u32);
        rank.taken += select(takes, 1u32, 0u32);
        takes
    }
}

/// A radix select: the interval of keys that holds the k-th largest, and the counts of its bins.
#[derive(CubeType)]
pub(super) struct RadixSelect {
    bins: Shared<[Atomic<u32>]>,
    /// The bin found, and the numbers of keys above it and in it.
    found: Shared<[u32]>,
    pub scanner: Scanner,
    pub ranked: RankedKeys,
    /// The interval, both ends included.
    pub low: u32,
    pub high: u32,
    /// The ends of the interval as floats.
    low_float: f32,
    high_float: f32,
    /// How many of the interval's keys are among the k largest, and how many keys it has.
    pub needed: u32,
    pub inside: u32,
    /// Binary logarithm of the width of a bin.
    shift: u32,
    /// Passes so far.
    passes: u32,
    /// Whether the interval is that of all keys, whose bins have different widths.
    pub whole: bool,
    #[cube(comptime)]
    units: CubeUnits,
}

#[cube]
impl RadixSelect {
    pub fn new(#[comptime] units: CubeUnits) -> RadixSelect {
        let mut search = RadixSelect {
            bins: Shared::new_slice(comptime!(BINS as usize)),
            found: Shared::new_slice(3usize),
            scanner: Scanner::new(units),
            ranked: RankedKeys::new(units),
            low: NONE + 1,
            high: u32::MAX,
            low_float: 0.0f32,
            high_float: 0.0f32,
            needed: 0u32,
            inside: 0u32,
            shift: 0u32,
            passes: 0u32,
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

    /// Begins with the interval of all keys. If there are fewer than `needed` keys, it stays as it
    /// is.
    pub fn begin(&mut self, needed: u32) {
        self.passes = 0u32;
        self.needed = needed;
        self.low = NONE + 1;
        self.high = u32::MAX;
        self.inside = u32::MAX;
        self.shift = 0u32;
        self.whole = true;
    }

    /// Begins with a given interval, which must not be that of all keys.
    pub fn begin_in(&mut self, needed: u32, inside: u32, low: u32, high: u32) {
        self.passes = 0u32;
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

    /// Whether another pass is needed to tell which keys are larger than the k-th largest.
    pub fn needs_pass(&self) -> bool {
        // The number of passes ends the search where there are fewer keys than the caller says.
        self.inside != self.needed && self.low != self.high && self.passes < MAX_PASSES
    }

    /// Whether so few keys are left that they can be ranked.
    pub fn can_rank(&self) -> bool {
        self.inside <= comptime!(most_ranked(self.units))
    }

    /// Whether another pass is needed before the keys that are left can be ranked, or to tell which
    /// keys are larger than the k-th largest.
    pub fn needs_pass_to_rank(&self) -> bool {
        self.needs_pass() && !self.can_rank()
    }

    /// The last of the k largest, once all keys of the interval were added to `ranked`. Every unit
    /// of the cube must call this.
    pub fn last_taken(&mut self) -> LastTaken {
        let needed = self.needed;
        self.ranked.last_taken(needed)
    }

    /// Which keys are among the k largest. Valid once no pass is needed.
    pub fn selection(&self) -> TopkSelection {
        let ties = self.inside > self.needed;
        TopkSelection {
            lowest: select(ties, self.high + 1, self.low),
            equal: select(ties, self.high, NONE),
            equals: select(ties, self.needed, 0u32),
        }
    }

    /// Counts two elements in the first pass of a search over all keys, if they take part.
    pub fn add_pair(&mut self, a: f32, b: f32, has_a: bool, has_b: bool) {
        let reversed = comptime!(((BINS - 1) << 16) | (BINS - 1))
            - bins_of(a, b, comptime!(self.units.target));
        if has_a {
            self.add(reversed & 0xffff, 1u32);
        }
        if has_b {
            self.add(reversed >> 16, 1u32);
        }
    }

    fn add(&mut self, index: u32, count: u32) {
        add_shared(&self.bins, index, count, comptime!(self.units.target));
    }

    /// Whether an element is in the interval, or may be: NaN, and whatever a comparison of floats
    /// rounds to zero.
    pub fn may_contain(&self, x: f32) -> bool {
        !(x < self.low_float || x > self.high_float) || has_nan_bits(x)
    }

    /// Shifts `bits` up by one and sets the lowest bit if an element is certainly outside of the
    /// interval.
    pub fn push_outside(&self, bits: u32, x: f32) -> u32 {
        push_outside(
            bits,
            x,
            self.low_float,
            self.high_float,
            comptime!(self.units.target),
        )
    }

    /// The same for elements that are certainly above the interval.
    pub fn push_above(&self, bits: u32, x: f32) -> u32 {
        push_above(bits, x, self.high_float, comptime!(self.units.target))
    }

    /// Whether a key is in the interval.
    pub fn contains(&self, key: u32) -> bool {
        key >= self.low && key <= self.high
    }

    /// Counts a key `count` times, if it is in the interval and belongs to an element.
    pub fn add_key(&mut self, key: u32, count: u32) {
        // The subtraction wraps to a very large number for keys below the interval.
        let offset = key - self.low;
        if offset <= self.high - self.low {
            let mut bin = offset >> self.shift;
            if self.whole {
                let x = float_of(key);
                bin = bins_of(x, x, comptime!(self.units.target)) & 0xffff;
            }
            self.add(comptime!(BINS - 1) - bin, count);
        }
    }

    /// Ends a pass, after all keys were added: narrows the interval to the bin of the k-th largest.
    /// Every unit of the cube must call this.
    pub fn advance(&mut self) {
        let units = comptime!(self.units);
        // Each plane has a contiguous part of the bins, in rows of one bin for each lane, largest
        // first.
        let rows = comptime!(BINS / units.cube);
        let first = UNIT_POS / units.plane * comptime!(rows * units.plane) + UNIT_POS % units.plane;
        self.passes += 1;
        sync_cube();
        let mut counts = Array::<u32>::new(comptime!(rows as usize));
        let mut sum = 0u32;
        #[unroll]
        for i in 0..rows {
            let index = (first + i * units.plane) as usize;
            let count = self.bins[index].load();
            self.bins[index].store(0u32);
            counts[i as usize] = count;
            sum += count;
        }
        let plane = sum_of_plane(sum, units.plane, units.target);
        let scan = self.scanner.scan_planes(plane);
        // The condition is the same for all lanes of a plane.
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
