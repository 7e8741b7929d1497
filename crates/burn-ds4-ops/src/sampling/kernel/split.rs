//! Rows that many cubes work on. The first launch finds the highest logit of each segment of a row.
//! In the second, each cube weighs its segments, by bins of exponents where there is a filter, and
//! the last-arriving cube of a row chooses the token: the bins tell where the bounds of the filters
//! are, and in which segment the token is, so that it reads a few elements only.

use cubecl::prelude::*;

use super::super::params::MAX_COLUMNS;
use super::super::weight::LIGHTEST;
use super::candidates::Candidates;
use super::filter::{FilterBounds, Measure, weight_if, weight_of};
use super::lanes::{LaneFilter, Lanes};
use super::radix_select::{Found, WeightedRadixSelect};
use super::row::{NONE, RowShape, SampleBlueprint, SamplingRow};
use super::scan::WideScanner;
use super::wide::Wide;
use crate::intrinsics::arrival_order;
use crate::topk::kernel::key::{LOWEST, float_of};

/// Words of a bin in the sums of a segment: its sum.
pub(crate) const MASS_WORDS: usize = 2;
/// Words of a bin in the sums of a row: the limbs of its sum, and its count. All bins have one of
/// them before the next one, so that units write to neighbouring words.
pub(crate) const TOTAL_WORDS: usize = 4;
/// Words of a row behind its bins: the number of cubes that have arrived.
pub(crate) const COUNTERS: usize = 1;

/// What a launch of [`draw_kernel`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DrawStages {
    /// Weighs segments.
    Weigh,
    /// Chooses the tokens, with one cube for each row.
    Choose,
    /// Weighs segments, and the last-arriving cube of a row chooses its token.
    Both,
}

/// How [`draw_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SplitBlueprint {
    pub sample: SampleBlueprint,
    /// Elements of a bin for each unit of a cube that sorts them, at most: a power of two.
    pub unit_candidates: u32,
    pub stages: DrawStages,
}

/// The rows of logits, and how they are divided.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct SplitShape {
    pub row: RowShape,
    /// Segments of a row, of as many vectors each: no more than a cube has units.
    pub segments: u32,
    pub segment_vectors: u32,
    /// Segments of a cube.
    pub cube_segments: u32,
}

/// The sums of two bins.
type BinPair = Vector<u32, Const<4>>;

/// What the cubes of a row leave for each other.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RowParts {
    /// The key of the highest logit of each segment, and its lowest id: `[rows, segments, 2]`.
    highest: Box<[u32]>,
    /// Weights of each segment, summed up to and including each bin: `[rows, segments, bins, 2]`,
    /// high words first. Without a filter, the first bin has all.
    masses: Box<[BinPair]>,
}

/// Vectors that a unit reads at once.
const READS: u32 = 2;
/// Bits of an id.
const ID_BITS: u32 = MAX_COLUMNS.ilog2();

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

/// A row, and what its cubes have left.
#[derive(CubeType)]
pub(super) struct SplitRow<'a, F: Float, N: Size> {
    pub row: SamplingRow<'a, F, N>,
    parts: &'a RowParts,
    index: u32,
    shape: &'a SplitShape,
    #[cube(comptime)]
    log2_bins: u32,
}

#[cube]
impl<'a, F: Float, N: Size> SplitRow<'a, F, N> {
    fn new(
        row: SamplingRow<'a, F, N>,
        parts: &'a RowParts,
        index: u32,
        shape: &'a SplitShape,
        #[comptime] log2_bins: u32,
    ) -> SplitRow<'a, F, N> {
        SplitRow::<'a, F, N> {
            row,
            parts,
            index,
            shape,
            log2_bins,
        }
    }

    pub fn segments(&self) -> u32 {
        self.shape.segments
    }

    pub fn segment_vectors(&self) -> u32 {
        self.shape.segment_vectors
    }

    fn segment_of(&self, id: u32) -> u32 {
        id / N::value() as u32 / self.shape.segment_vectors
    }

    /// Bins in the order of exponents, of a power of one half divided by a power of two each.
    /// [`NO_EXPONENT`] is in none.
    pub fn bin_of(&self, exponent: u32) -> u32 {
        exponent >> comptime!(bin_shift(self.log2_bins))
    }

    /// Two logits between which are all of a bin.
    pub fn range_of(&self, bin: u32, bounds: &FilterBounds) -> (f32, f32) {
        let shift = comptime!(bin_shift(self.log2_bins));
        bounds.range(bin << shift, (bin + 1) << shift)
    }

    /// The sum of weights of a segment in the bins before one.
    pub fn mass(&self, segment: u32, bin: u32) -> Wide {
        let mut mass = Wide::new(0u32, 0u32);
        if bin > 0 {
            let own = bin - 1;
            let log2_bins = comptime!(self.log2_bins);
            let pair =
                self.parts.masses[pair_at(self.index, segment, own, self.segments(), log2_bins)];
            let is_second = own & 1 == 1;
            mass.high = select(is_second, pair.extract(2usize), pair.extract(0usize));
            mass.low = select(is_second, pair.extract(3usize), pair.extract(1usize));
        }
        mass
    }
}

/// How far exponents are shifted to be bins: all below 2 to the power of 31 have one.
fn bin_shift(log2_bins: u32) -> u32 {
    31 - log2_bins
}

/// Where the sums of a bin and its neighbour are.
#[cube]
fn pair_at(row: u32, segment: u32, bin: u32, segments: u32, #[comptime] log2_bins: u32) -> usize {
    let bins = comptime!(1usize << log2_bins);
    let segment = row as usize * segments as usize + segment as usize;
    (segment * bins + bin as usize) / 2
}

/// Words of the sums of a row.
#[cube]
fn total_words(#[comptime] log2_bins: u32) -> usize {
    comptime!((1usize << log2_bins) * TOTAL_WORDS + COUNTERS).runtime()
}

/// A cube that weighs segments or chooses a token.
#[derive(CubeType)]
struct DrawCube {
    scanner: WideScanner,
    /// Weights by bins.
    bins: WeightedRadixSelect,
    /// Elements by bins.
    counts: Shared<[Atomic<u32>]>,
    found: Shared<[u32]>,
    candidates: Candidates,
    #[cube(comptime)]
    blueprint: SampleBlueprint,
}

#[cube]
impl DrawCube {
    fn new(scanner: WideScanner, #[comptime] blueprint: SplitBlueprint) -> DrawCube {
        let SampleBlueprint { units, log2_bins } = comptime!(blueprint.sample);
        let units = comptime!(units.cube);
        let bins = comptime!(1u32 << log2_bins);
        let counts = Shared::<[Atomic<u32>]>::new_slice(comptime!(bins as usize));
        #[unroll]
        for i in 0..comptime!(bins / units) {
            counts[(UNIT_POS + i * units) as usize].store(0u32);
        }
        DrawCube {
            scanner,
            bins: WeightedRadixSelect::new(log2_bins, units),
            counts,
            found: Shared::new_slice(5usize),
            candidates: Candidates::new(comptime!(units * blueprint.unit_candidates), units),
            blueprint: blueprint.sample,
        }
    }

    /// The first of the unit's own bins, which follow each other, and how many there are.
    fn own_bins(&self) -> (u32, u32) {
        let SampleBlueprint { units, log2_bins } = comptime!(self.blueprint);
        let own = comptime!((1u32 << log2_bins) / units.cube);
        (UNIT_POS * own, own.runtime())
    }

    /// Clears the sums of all bins. Every unit of the cube must call this.
    fn clear_bins(&mut self) {
        let (first, own) = self.own_bins();
        for i in 0..own {
            self.bins.set(first + i, &Wide::new(0u32, 0u32));
        }
        sync_cube();
    }

    /// Sums the unit's own bins.
    fn own_sum(&self) -> Wide {
        let (first, own) = self.own_bins();
        let mut sum = Wide::new(0u32, 0u32);
        for i in 0..own {
            sum.add(&self.bins.bin(first + i));
        }
        sum
    }

    /// Leaves the sum of a segment.
    fn weigh<F: Float, N: Size>(
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
    fn weigh_bins<F: Float, N: Size>(
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

    /// Chooses a token by `drawn`, a fraction in units of 2^-64, once all segments are weighed.
    /// Every unit of the cube must call this.
    fn choose<F: Float, N: Size>(
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

/// The last exponent of a bin.
#[cube]
fn last_of_bin(bin: u32, #[comptime] log2_bins: u32) -> u32 {
    let shift = comptime!(bin_shift(log2_bins));
    ((bin + 1) << shift) - 1
}

/// Finds the highest logit of each segment, and clears the sums of rows.
///
/// - `highest`: `[rows, segments, 2]`
/// - `totals`: for each row its bins and its counter
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn highest_kernel<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    highest: &mut [u32],
    totals: &mut [Atomic<u32>],
    shape: SplitShape,
    #[comptime] blueprint: SampleBlueprint,
    #[define(F)] _dtype: ElemType,
) {
    let SampleBlueprint { units, log2_bins } = comptime!(blueprint);
    let row = SamplingRow::<F, N>::new(
        logits,
        CUBE_POS_Y as usize * shape.row.row_vectors,
        shape.row.vectors,
        units.cube,
    );
    let words = total_words(log2_bins);
    let mut at = (CUBE_POS_X * comptime!(units.cube) + UNIT_POS) as usize;
    while at < words {
        totals[CUBE_POS_Y as usize * words + at].store(0u32);
        at += (shape.segments * comptime!(units.cube)) as usize;
    }
    let mut scanner = WideScanner::new(units);
    let first = CUBE_POS_X * shape.segment_vectors;
    let end = min(first + shape.segment_vectors, shape.row.vectors);
    let own = row.highest(first, end, &mut scanner);
    if UNIT_POS == 0 {
        let at = (CUBE_POS_Y as usize * shape.segments as usize + CUBE_POS_X as usize) * 2;
        highest[at] = own.high;
        highest[at + 1] = own.low;
    }
}

/// Chooses a token for each row, whose cubes are those with its index in the second dimension.
///
/// - `tokens`: `[rows]`
/// - `parts`, `totals`: what [`highest_kernel`] has left, and scratch
#[cube(launch_unchecked, address_type = "dynamic")]
// CubeCL tells the condition on the blueprint from the one on the cube by their nesting.
#[allow(clippy::collapsible_if)]
pub(crate) fn draw_kernel<F: Float, I: Int, N: Size>(
    logits: &[Vector<F, N>],
    lanes: &Lanes<I>,
    tokens: &mut [i32],
    parts: &mut RowParts,
    totals: &mut [Atomic<u32>],
    shape: SplitShape,
    #[comptime] blueprint: SplitBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let SampleBlueprint { units, log2_bins } = comptime!(blueprint.sample);
    let stages = comptime!(blueprint.stages);
    let index = CUBE_POS_Y;
    let filter = lanes.tables.filter(index / shape.row.lane_rows);
    let mut scanner = WideScanner::new(units);
    let mut key = 0u32;
    let mut id = u32::MAX.runtime();
    if UNIT_POS < shape.segments {
        let at = (index as usize * shape.segments as usize + UNIT_POS as usize) * 2;
        key = parts.highest[at];
        id = parts.highest[at + 1];
    }
    let highest = scanner.first_highest(key, id);
    if highest.high > LOWEST && filter.rate > 0.0f32 {
        let row = SamplingRow::<F, N>::new(
            logits,
            index as usize * shape.row.row_vectors,
            shape.row.vectors,
            units.cube,
        );
        let mut cube = DrawCube::new(scanner, blueprint);
        let bounds = FilterBounds::new(highest.high, &filter);
        if comptime!(stages != DrawStages::Choose) {
            let first = CUBE_POS_X * shape.cube_segments;
            let end = min(first + shape.cube_segments, shape.segments);
            for segment in first..end {
                if filter.top_k > 0 || filter.top_p > 0 {
                    cube.weigh_bins::<F, N>(
                        &row,
                        &bounds,
                        (index, segment),
                        parts,
                        totals,
                        &shape,
                        filter.top_k > 0,
                    );
                } else {
                    cube.weigh::<F, N>(&row, &bounds, index, segment, parts, &shape);
                }
            }
        }
        let mut chooses = true.runtime();
        if comptime!(stages == DrawStages::Both) {
            let counter = (index as usize + 1) * total_words(log2_bins) - COUNTERS;
            chooses = arrival_order(totals, counter, units.target) == CUBE_COUNT_X - 1;
        }
        if comptime!(stages != DrawStages::Weigh) {
            if chooses {
                let row = SplitRow::<F, N>::new(row, &*parts, index, &shape, log2_bins);
                let drawn = lanes.random_number(index, shape.row.lane_rows);
                let token = cube.choose::<F, N>(&row, &*totals, &highest, &filter, &drawn);
                if UNIT_POS == 0 {
                    tokens[index as usize] = token as i32;
                }
            }
        }
    } else if CUBE_POS_X == 0 && UNIT_POS == 0 {
        tokens[index as usize] = select(highest.high > LOWEST, highest.low as i32, NONE);
    }
}
