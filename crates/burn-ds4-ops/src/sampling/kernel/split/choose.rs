//! The second stage: the token of a row whose segments are weighed.

use cubecl::prelude::*;

use super::cube::{DrawCube, DrawCubeExpand};
use crate::sampling::kernel::filter::{FilterBounds, Measure, weight_of};
use crate::sampling::kernel::lanes::LaneFilter;
use crate::sampling::kernel::parts::{SplitRow, bin_shift, last_of_bin, total_words};
use crate::sampling::kernel::radix_select::Found;
use crate::sampling::kernel::wide::Wide;
use crate::sampling::params::MAX_COLUMNS;
use crate::select::key::float_of;

/// Bits of an id.
const ID_BITS: u32 = MAX_COLUMNS.ilog2();

#[cube]
impl DrawCube {
    /// Chooses a token by `drawn`, a fraction in units of 2^-64, once all segments are weighed.
    /// Every unit of the cube must call this.
    pub fn choose<F: Float, N: Size>(
        &mut self,
        row: &SplitRow<'_, F, N>,
        totals: &[Atomic<u32>],
        highest: &Wide,
        filter: &LaneFilter,
        drawn: &Wide,
    ) -> u32 {
        let mut bounds = FilterBounds::new(highest.high, filter);
        let mut fits = true.runtime();
        // All elements of the bins before this one are kept, and none of those after it.
        let mut edge = 1u32;
        if filter.top_k > 0 || filter.top_p > 0 {
            self.read_totals(totals, row.index);
            if filter.top_k > 0 {
                fits = self.bound_logits::<F, N>(row, &mut bounds, filter.top_k);
            }
            if fits && filter.top_p > 0 {
                fits = self.bound_weights::<F, N>(row, &mut bounds, filter.top_p);
            }
            edge = row.bin_of(min(bounds.exponent, bounds.last));
            if fits && self.candidates.bin != edge {
                fits = self.candidates.collect::<F, N>(row, &bounds, edge, false);
            }
        }
        let (first, own) = self.own_bins();
        // What others still read of the bins has been read.
        sync_cube();
        if fits {
            for i in 0..own {
                let segment = first + i;
                let mut mass = Wide::new(0u32, 0u32);
                if segment < row.segments() {
                    mass.add(&row.mass(segment, edge));
                }
                self.bins.set(segment, &mass);
            }
            sync_cube();
            let mut at = UNIT_POS;
            while at < self.candidates.count {
                let exponent = self.candidates.ranks[at as usize];
                let id = self.candidates.ids[at as usize];
                if bounds.keeps(exponent, id) {
                    self.bins.add_wide(row.segment_of(id), &weight_of(exponent));
                }
                at += comptime!(self.blueprint.units.cube);
            }
            sync_cube();
            let scan = self.scanner.scan(&self.own_sum());
            let left = drawn.high_product(&scan.total);
            let mut before = scan.before;
            for i in 0..own {
                let is_before = left.is_below(&before);
                let rest = left.minus(&before);
                before.add(&self.bins.bin(first + i));
                if !is_before && left.is_below(&before) {
                    self.found[0usize] = first + i;
                    self.found[1usize] = rest.high;
                    self.found[2usize] = rest.low;
                }
            }
            sync_cube();
            let length = row.segment_vectors();
            let first = self.found[0usize] * length;
            row.row.locate_between(
                first,
                min(first + length, row.row.vectors),
                &Wide::new(self.found[1usize], self.found[2usize]),
                &bounds,
                &mut self.scanner,
                &mut self.found,
                Measure::KeptWeights,
            )
        } else {
            // Too many elements are alike: searches the whole row.
            self.clear_bins();
            row.row.draw(
                highest,
                filter,
                drawn,
                &mut self.scanner,
                &mut self.bins,
                &mut self.found,
            )
        }
    }

    /// Takes the sums of the row.
    fn read_totals(&mut self, totals: &[Atomic<u32>], index: u32) {
        let (first, own) = self.own_bins();
        for i in 0..own {
            let bin = first + i;
            let log2_bins = comptime!(self.blueprint.log2_bins);
            let bins = comptime!(1usize << log2_bins);
            let at = index as usize * total_words(log2_bins) + bin as usize;
            let mass = Wide::from_limbs(
                totals[at].load(),
                totals[at + bins].load(),
                totals[at + 2 * bins].load(),
            );
            self.bins.set(bin, &mass);
            self.counts[bin as usize].store(totals[at + 3 * bins].load());
        }
    }

    /// Bounds the logits by top-k, and the sums of bins with them. Returns whether a cube can sort
    /// the bin in question.
    fn bound_logits<F: Float, N: Size>(
        &mut self,
        row: &SplitRow<'_, F, N>,
        bounds: &mut FilterBounds,
        top_k: u32,
    ) -> bool {
        let mut fits = true.runtime();
        let (first, own) = self.own_bins();
        let mut sum = 0u32;
        for i in 0..own {
            sum += self.counts[(first + i) as usize].load();
        }
        let scan = self.scanner.scan(&Wide::new(0u32, sum));
        // Otherwise all are kept whose weight is not 0.
        if scan.total.low >= top_k {
            let mut before = scan.before.low;
            for i in 0..own {
                let count = self.counts[(first + i) as usize].load();
                if before < top_k && before + count >= top_k {
                    self.found[0usize] = first + i;
                    self.found[1usize] = top_k - before;
                    self.found[2usize] = count;
                }
                before += count;
            }
            sync_cube();
            let bin = self.found[0usize];
            let needed = self.found[1usize];
            let is_whole = self.found[2usize] == needed;
            bounds.exponent = last_of_bin(bin, comptime!(self.blueprint.log2_bins));
            let mut kept = Wide::new(0u32, 0u32);
            if !is_whole {
                fits = self.candidates.collect::<F, N>(row, &*bounds, bin, true);
                if fits {
                    self.candidates.sort();
                    let last = (needed - 1) as usize;
                    bounds.key = !self.candidates.ranks[last];
                    bounds.key_id = self.candidates.ids[last];
                    let mut at = UNIT_POS;
                    while at < needed {
                        let key = !self.candidates.ranks[at as usize];
                        kept.add(&weight_of(bounds.exponent_of(float_of(key), key)));
                        at += comptime!(self.blueprint.units.cube);
                    }
                    let scan = self.scanner.scan(&kept);
                    kept.high = scan.total.high;
                    kept.low = scan.total.low;
                }
            }
            for i in 0..own {
                if first + i > bin {
                    self.bins.set(first + i, &Wide::new(0u32, 0u32));
                } else if first + i == bin && !is_whole {
                    self.bins.set(bin, &kept);
                }
            }
        }
        fits
    }

    /// Bounds the weights by top-p, in units of 2^-32. Returns whether a cube can sort the bin in
    /// question.
    fn bound_weights<F: Float, N: Size>(
        &mut self,
        row: &SplitRow<'_, F, N>,
        bounds: &mut FilterBounds,
        top_p: u32,
    ) -> bool {
        let mut fits = true.runtime();
        let (first, own) = self.own_bins();
        let scan = self.scanner.scan(&self.own_sum());
        let needed = scan.total.fraction(top_p);
        let mut before = scan.before;
        for i in 0..own {
            let mass = self.bins.bin(first + i);
            let reaches = before.is_below(&needed);
            let part = needed.minus(&before);
            before.add(&mass);
            if reaches && !before.is_below(&needed) {
                self.found[0usize] = first + i;
                self.found[1usize] = part.high;
                self.found[2usize] = part.low;
                self.found[3usize] = mass.high;
                self.found[4usize] = mass.low;
            }
        }
        sync_cube();
        let bin = self.found[0usize];
        let needed = Wide::new(self.found[1usize], self.found[2usize]);
        let all = Wide::new(self.found[3usize], self.found[4usize]);
        let bin_end = last_of_bin(bin, comptime!(self.blueprint.log2_bins));
        // Where min-p drops the bin, it does not matter which of its elements top-p keeps.
        if needed.is_below(&all) && bin <= row.bin_of(bounds.last) {
            fits = self.candidates.collect::<F, N>(row, &*bounds, bin, false);
            if fits {
                self.clear_bins();
                let bits = comptime!(bin_shift(self.blueprint.log2_bins));
                let mut last = Found {
                    exists: true.runtime(),
                    rank: !bin << bits,
                    needed: Wide::new(needed.high, needed.low),
                    equal: Wide::new(all.high, all.low),
                };
                self.bins.narrow(
                    &mut last,
                    &self.candidates,
                    &mut self.scanner,
                    bin_end,
                    bits,
                    false,
                );
                bounds.exponent = !last.rank;
                // If the equal ones without the last are not enough, all of them are kept.
                let others = last.equal.minus(&weight_of(bounds.exponent));
                if !others.is_below(&last.needed) {
                    last.rank = comptime!(!0u32 << ID_BITS).runtime();
                    self.bins.narrow(
                        &mut last,
                        &self.candidates,
                        &mut self.scanner,
                        bounds.exponent,
                        ID_BITS,
                        true,
                    );
                    bounds.exponent_id = !last.rank;
                }
            }
        } else {
            bounds.exponent = bin_end;
        }
        fits
    }
}
