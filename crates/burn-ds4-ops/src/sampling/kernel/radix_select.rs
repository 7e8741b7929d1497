//! A radix select over weighted elements: finds the last element, in descending order, with which a
//! given sum is reached, digit by digit of its rank.

use cubecl::prelude::*;

use super::candidates::Candidates;
use super::filter::{FilterBounds, Measure, weight_of};
use super::row::SamplingRow;
use super::scan::WideScanner;
use super::wide::Wide;

/// The element that was found.
#[derive(CubeType)]
pub(super) struct Found {
    /// Whether the sum over all elements reaches the target.
    pub exists: bool,
    pub rank: u32,
    /// The part of the target that elements with this rank must add.
    pub needed: Wide,
    /// The sum over all elements with this rank.
    pub equal: Wide,
}

/// Sums of the elements by a digit of their ranks.
#[derive(CubeType)]
pub(super) struct WeightedRadixSelect {
    high: Shared<[Atomic<u32>]>,
    low: Shared<[Atomic<u32>]>,
    found: Shared<[u32]>,
    #[cube(comptime)]
    log2_bins: u32,
    #[cube(comptime)]
    units: u32,
}

#[cube]
impl WeightedRadixSelect {
    pub fn new(#[comptime] log2_bins: u32, #[comptime] units: u32) -> WeightedRadixSelect {
        let bins = comptime!(1usize << log2_bins);
        let mut search = WeightedRadixSelect {
            high: Shared::new_slice(bins),
            low: Shared::new_slice(bins),
            found: Shared::new_slice(5usize),
            log2_bins,
            units,
        };
        #[unroll]
        for i in 0..comptime!(bins as u32 / units) {
            search.set(UNIT_POS + i * units, &Wide::new(0u32, 0u32));
        }
        sync_cube();
        search
    }

    /// Finds where a sum is reached: `count` for logits, and for weights `fraction` of their total
    /// in units of 2^-32. Every unit of the cube must call this.
    pub fn find<F: Float, N: Size>(
        &mut self,
        row: &SamplingRow<'_, F, N>,
        bounds: &FilterBounds,
        scanner: &mut WideScanner,
        count: u32,
        fraction: u32,
        #[comptime] measure: Measure,
    ) -> Found {
        let counts = comptime!(measure == Measure::Logits);
        let mut found = Found {
            exists: true.runtime(),
            rank: 0u32,
            needed: Wide::new(0u32, count),
            equal: Wide::new(0u32, 0u32),
        };
        let log2_bins = comptime!(self.log2_bins);
        for step in 0..comptime!(32u32.div_ceil(log2_bins)) {
            let upper = 32 - step * log2_bins;
            let shift = max(upper, log2_bins) - log2_bins;
            let mut at = UNIT_POS;
            while at < row.vectors {
                let vector = row.read(at);
                #[unroll]
                for i in 0..N::value() {
                    let x = f32::cast_from(vector.extract(i));
                    let id = at * N::value() as u32 + i as u32;
                    let rank = bounds.rank(x, measure);
                    // No shift is by 32, which would be undefined.
                    let other = ((rank ^ found.rank) >> (upper - 1)) >> 1;
                    let inside = bounds.is_searched(x, id) && other == 0;
                    if inside {
                        self.add(rank, shift, measure);
                    }
                }
                at += comptime!(self.units);
            }
            sync_cube();
            self.advance(&mut found, scanner, fraction, shift, step == 0, counts);
        }
        found
    }

    /// Narrows a search by weights to the candidate with which the sum is reached: to its exponent,
    /// or to its id among those with this `exponent`. What is searched for differs in the lower
    /// `bits` only. Every unit of the cube must call this. The bins are empty, and so they are
    /// afterwards.
    pub fn narrow(
        &mut self,
        found: &mut Found,
        candidates: &Candidates,
        scanner: &mut WideScanner,
        exponent: u32,
        #[comptime] bits: u32,
        #[comptime] by_id: bool,
    ) {
        let log2_bins = comptime!(self.log2_bins);
        for step in 0..comptime!(bits.div_ceil(log2_bins)) {
            let upper = bits - step * log2_bins;
            let shift = max(upper, log2_bins) - log2_bins;
            let mut at = UNIT_POS;
            while at < candidates.count {
                let own = candidates.ranks[at as usize];
                let mut rank = !own;
                let mut inside = true.runtime();
                if comptime!(by_id) {
                    rank = !candidates.ids[at as usize];
                    inside = own == exponent;
                }
                if inside && (rank ^ found.rank) >> upper == 0 {
                    let bin = self.bin_of(rank, shift);
                    self.add_wide(bin, &weight_of(own));
                }
                at += comptime!(self.units);
            }
            sync_cube();
            self.advance(found, scanner, 0u32, shift, false, false);
        }
    }

    fn add(&mut self, rank: u32, shift: u32, #[comptime] measure: Measure) {
        let bin = self.bin_of(rank, shift);
        if comptime!(measure == Measure::Logits) {
            self.low[bin as usize].fetch_add(1u32);
        } else {
            self.add_wide(bin, &weight_of(!rank));
        }
    }

    /// The bin of a rank by its digit from bit `shift` on.
    fn bin_of(&self, rank: u32, shift: u32) -> u32 {
        (rank >> shift) & comptime!((1u32 << self.log2_bins) - 1)
    }

    /// Adds to a bin.
    pub fn add_wide(&mut self, index: u32, amount: &Wide) {
        let bin = index as usize;
        let before = self.low[bin].fetch_add(amount.low);
        let after = before + amount.low;
        let high = amount.high + select(after < before, 1u32, 0u32);
        // Most weights are small.
        if high > 0 {
            self.high[bin].fetch_add(high);
        }
    }

    pub fn set(&mut self, index: u32, sum: &Wide) {
        self.high[index as usize].store(sum.high);
        self.low[index as usize].store(sum.low);
    }

    pub fn bin(&self, index: u32) -> Wide {
        Wide::new(
            self.high[index as usize].load(),
            self.low[index as usize].load(),
        )
    }

    /// Narrows the search to the bin in which the sum is reached, and clears all bins.
    fn advance(
        &mut self,
        found: &mut Found,
        scanner: &mut WideScanner,
        fraction: u32,
        shift: u32,
        is_first: bool,
        #[comptime] counts: bool,
    ) {
        let own = comptime!((1u32 << self.log2_bins) / self.units);
        let last = comptime!((1u32 << self.log2_bins) - 1);
        let mut sum = Wide::new(0u32, 0u32);
        for i in 0..own {
            let bin = self.bin(last - (UNIT_POS * own + i));
            sum.add(&bin);
        }
        let scan = scanner.scan(&sum);
        if is_first {
            if comptime!(!counts) {
                let needed = scan.total.fraction(fraction);
                found.needed.high = needed.high;
                found.needed.low = needed.low;
            }
            found.exists = !scan.total.is_below(&found.needed);
        }
        let mut before = Wide::new(0u32, 0u32);
        before.add(&scan.before);
        for i in 0..own {
            let index = last - (UNIT_POS * own + i);
            let bin = self.bin(index);
            self.set(index, &Wide::new(0u32, 0u32));
            let reaches = before.is_below(&found.needed);
            let above = found.needed.minus(&before);
            before.add(&bin);
            if reaches && !before.is_below(&found.needed) {
                self.found[0usize] = index;
                self.found[1usize] = above.high;
                self.found[2usize] = above.low;
                self.found[3usize] = bin.high;
                self.found[4usize] = bin.low;
            }
        }
        sync_cube();
        found.rank |= self.found[0usize] << shift;
        found.needed.high = self.found[1usize];
        found.needed.low = self.found[2usize];
        found.equal.high = self.found[3usize];
        found.equal.low = self.found[4usize];
        sync_cube();
    }
}
