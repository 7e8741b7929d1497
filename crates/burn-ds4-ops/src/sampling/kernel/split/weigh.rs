//! The first stage: the weights of a segment.

use cubecl::prelude::*;

use super::cube::{DrawCube, DrawCubeExpand};
use crate::sampling::kernel::filter::{FilterBounds, weight_if};
use crate::sampling::kernel::parts::{
    BinPair, RowParts, SplitShape, bin_shift, pair_at, total_words,
};
use crate::sampling::kernel::row::{SampleBlueprint, SamplingRow};
use crate::sampling::kernel::wide::Wide;
use crate::sampling::weight::LIGHTEST;

/// Vectors that a unit reads at once.
const READS: u32 = 2;

/// Vectors of a row that a unit reads at once, one for each unit of the cube apart.
#[derive(CubeType)]
struct Reads<F: Float, N: Size> {
    values: Array<Vector<F, N>>,
    at: u32,
    end: u32,
    #[cube(comptime)]
    units: u32,
}

#[cube]
impl<F: Float, N: Size> Reads<F, N> {
    /// Reads those from `at` on that are before `end`.
    fn new(row: &SamplingRow<'_, F, N>, at: u32, end: u32, #[comptime] units: u32) -> Reads<F, N> {
        let mut values = Array::<Vector<F, N>>::new(comptime!(READS as usize));
        #[unroll]
        for i in 0..READS {
            values[i as usize] = row.read(min(at + i * units, end - 1));
        }
        Reads::<F, N> {
            values,
            at,
            end,
            units,
        }
    }

    fn is_read(&self, #[comptime] index: u32) -> bool {
        self.at + index * self.units < self.end
    }
}

#[cube]
impl DrawCube {
    /// Leaves the sum of a segment.
    pub fn weigh<F: Float, N: Size>(
        &mut self,
        row: &SamplingRow<'_, F, N>,
        bounds: &FilterBounds,
        index: u32,
        segment: u32,
        parts: &mut RowParts,
        shape: &SplitShape,
    ) {
        let SampleBlueprint { units, log2_bins } = comptime!(self.blueprint);
        let first = segment * shape.segment_vectors;
        let end = min(first + shape.segment_vectors, shape.row.vectors);
        let mut sum = Wide::new(0u32, 0u32);
        let mut at = first + UNIT_POS;
        while at < end {
            let vectors = Reads::<F, N>::new(row, at, end, comptime!(units.cube));
            #[unroll]
            for read in 0..READS {
                let exponents = bounds.exponents::<F, N>(&vectors.values[read as usize]);
                let is_read = vectors.is_read(read);
                #[unroll]
                for i in 0..N::value() {
                    let exponent = exponents.extract(i);
                    let kept = is_read && exponent <= bounds.last;
                    sum.add(&weight_if(kept, exponent));
                }
            }
            at += comptime!(READS * units.cube);
        }
        let scan = self.scanner.scan(&sum);
        if UNIT_POS == 0 {
            let at = pair_at(index, segment, 0u32, shape.segments, log2_bins);
            let mut pair = BinPair::new(0u32);
            pair.insert(0usize, scan.total.high);
            pair.insert(1usize, scan.total.low);
            parts.masses[at] = pair;
        }
    }

    /// Leaves the sums of a segment by bins, and adds them to those of the row.
    pub fn weigh_bins<F: Float, N: Size>(
        &mut self,
        row: &SamplingRow<'_, F, N>,
        bounds: &FilterBounds,
        place: (u32, u32),
        parts: &mut RowParts,
        totals: &mut [Atomic<u32>],
        shape: &SplitShape,
        counts: bool,
    ) {
        let SampleBlueprint { units, log2_bins } = comptime!(self.blueprint);
        let (index, segment) = place;
        let first = segment * shape.segment_vectors;
        let end = min(first + shape.segment_vectors, shape.row.vectors);
        let mut at = first + UNIT_POS;
        while at < end {
            let vectors = Reads::<F, N>::new(row, at, end, comptime!(units.cube));
            #[unroll]
            for read in 0..READS {
                let exponents = bounds.exponents::<F, N>(&vectors.values[read as usize]);
                let is_read = vectors.is_read(read);
                let mut high = Vector::<u32, N>::new(0u32);
                let mut low = Vector::<u32, N>::new(0u32);
                #[unroll]
                for i in 0..N::value() {
                    let weight = weight_if(true, exponents.extract(i));
                    high.insert(i, weight.high);
                    low.insert(i, weight.low);
                }
                #[unroll]
                for i in 0..N::value() {
                    let exponent = exponents.extract(i);
                    if is_read && exponent <= LIGHTEST {
                        let bin = exponent >> comptime!(bin_shift(log2_bins));
                        let weight = Wide::new(high.extract(i), low.extract(i));
                        self.bins.add_wide(bin, &weight);
                        if counts {
                            self.counts[bin as usize].fetch_add(1u32);
                        }
                    }
                }
            }
            at += comptime!(READS * units.cube);
        }
        sync_cube();
        let bins = comptime!(1u32 << log2_bins);
        #[unroll]
        for i in 0..comptime!(bins / units.cube) {
            let bin = UNIT_POS + i * units.cube;
            let mass = self.bins.bin(bin);
            if !mass.is_zero() {
                let at = index as usize * total_words(log2_bins) + bin as usize;
                let bins = comptime!(bins as usize);
                totals[at].fetch_add(mass.limb(0u32));
                totals[at + bins].fetch_add(mass.limb(1u32));
                totals[at + 2 * bins].fetch_add(mass.limb(2u32));
                if counts {
                    totals[at + 3 * bins].fetch_add(self.counts[bin as usize].load());
                }
            }
        }
        let scan = self.scanner.scan(&self.own_sum());
        let mut sum = scan.before;
        let (first, own) = self.own_bins();
        for i in 0..own / 2 {
            let bin = first + 2 * i;
            let mut pair = BinPair::new(0u32);
            sum.add(&self.bins.bin(bin));
            pair.insert(0usize, sum.high);
            pair.insert(1usize, sum.low);
            sum.add(&self.bins.bin(bin + 1));
            pair.insert(2usize, sum.high);
            pair.insert(3usize, sum.low);
            parts.masses[pair_at(index, segment, bin, shape.segments, log2_bins)] = pair;
        }
        for i in 0..own {
            self.bins.set(first + i, &Wide::new(0u32, 0u32));
            self.counts[(first + i) as usize].store(0u32);
        }
        sync_cube();
    }
}
