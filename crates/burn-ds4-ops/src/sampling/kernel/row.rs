use cubecl::prelude::*;

use super::super::layout::SEED;
use super::filter::{FilterBounds, Measure, weight_of};
use super::lanes::{LaneFilter, LaneTables};
use super::radix_select::WeightedRadixSelect;
use super::scan::WideScanner;
use super::wide::Wide;
use crate::random::philox_words;
use crate::topk::kernel::key::{LOWEST, float_of, key_of};

/// The token of a row without candidates.
const NONE: i32 = -1;
/// Units that work on the same strip of a row.
const STRIP_UNITS: u32 = 32;

/// How [`sample_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SampleBlueprint {
    /// Units of a cube: a power of two, and at least the units of a strip.
    pub units: u32,
    /// Binary logarithm of the number of bins of a search. There are at least as many bins as
    /// units.
    pub log2_bins: u32,
}

/// The rows of logits.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RowShape {
    pub rows: u32,
    /// Vectors of a row, and from one row to the next.
    pub vectors: u32,
    pub row_vectors: usize,
    /// Rows of a lane.
    pub lane_rows: u32,
}

/// A row of logits.
#[derive(CubeType)]
pub(super) struct SamplingRow<'a, F: Float, N: Size> {
    logits: &'a [Vector<F, N>],
    first: usize,
    pub vectors: u32,
    #[cube(comptime)]
    units: u32,
}

#[cube]
impl<'a, F: Float, N: Size> SamplingRow<'a, F, N> {
    fn new(
        logits: &'a [Vector<F, N>],
        first: usize,
        vectors: u32,
        #[comptime] units: u32,
    ) -> SamplingRow<'a, F, N> {
        SamplingRow::<'a, F, N> {
            logits,
            first,
            vectors,
            units,
        }
    }

    pub fn read(&self, vector: u32) -> Vector<F, N> {
        self.logits[self.first + vector as usize]
    }

    /// Sums what the elements of a vector add.
    fn sum(&self, vector: u32, bounds: &FilterBounds, #[comptime] measure: Measure) -> Wide {
        let values = self.read(vector);
        let mut sum = Wide::new(0u32, 0u32);
        #[unroll]
        for i in 0..N::value() {
            let id = vector * N::value() as u32 + i as u32;
            let amount = bounds.amount(f32::cast_from(values.extract(i)), id, measure);
            sum.add(&amount);
        }
        sum
    }

    /// The key of the highest logit, and its lowest id. Every unit of the cube must call this.
    fn highest(&self, scanner: &mut WideScanner) -> Wide {
        let mut key = 0u32;
        let mut id = u32::MAX.runtime();
        let mut at = UNIT_POS;
        while at < self.vectors {
            let values = self.read(at);
            #[unroll]
            for i in 0..N::value() {
                let own = key_of(f32::cast_from(values.extract(i)));
                // Ids ascend.
                if own > key {
                    key = own;
                    id = at * N::value() as u32 + i as u32;
                }
            }
            at += comptime!(self.units);
        }
        scanner.first_highest(key, id)
    }

    /// Draws a token by `drawn`, a fraction in units of 2^-64, given the highest logit. Every unit
    /// of the cube must call this.
    fn draw(
        &self,
        highest: &Wide,
        filter: &LaneFilter,
        drawn: &Wide,
        scanner: &mut WideScanner,
        #[comptime] blueprint: SampleBlueprint,
    ) -> u32 {
        let mut bounds = FilterBounds::new(
            float_of(highest.high),
            highest.high,
            filter.rate,
            filter.farthest,
            Wide::new(filter.minimum_high, filter.minimum_low),
        );
        let mut found = Shared::<[u32]>::new_slice(4usize);
        let one = Wide::new(0u32, 1u32);
        let mut search = WeightedRadixSelect::new(blueprint.log2_bins, blueprint.units);
        let count = filter.top_k;
        if count > 0 {
            let last = search.find::<F, N>(self, &bounds, scanner, count, 0u32, Measure::Logits);
            if last.exists {
                bounds.key = last.rank;
                if last.needed.is_below(&last.equal) {
                    let target = last.needed.minus(&one);
                    bounds.key_id = self.locate(
                        &target,
                        &bounds,
                        scanner,
                        &mut found,
                        false,
                        Measure::EqualLogits,
                    );
                }
            }
        }
        let fraction = filter.top_p;
        if fraction > 0 {
            let last =
                search.find::<F, N>(self, &bounds, scanner, 0u32, fraction, Measure::Weights);
            bounds.exponent = !last.rank;
            // If the equal ones without the last are not enough, all of them are kept.
            let others = last.equal.minus(&weight_of(!last.rank));
            if !others.is_below(&last.needed) {
                let target = last.needed.minus(&one);
                bounds.exponent_id = self.locate(
                    &target,
                    &bounds,
                    scanner,
                    &mut found,
                    false,
                    Measure::EqualWeights,
                );
            }
        }
        self.locate(
            drawn,
            &bounds,
            scanner,
            &mut found,
            true,
            Measure::KeptWeights,
        )
    }

    /// The first id at which the running sum exceeds `target`. With `is_fraction`, `target` is a
    /// fraction of the total in units of 2^-64. Every unit of the cube must call this, and the
    /// total must exceed the target.
    fn locate(
        &self,
        target: &Wide,
        bounds: &FilterBounds,
        scanner: &mut WideScanner,
        found: &mut Shared<[u32]>,
        #[comptime] is_fraction: bool,
        #[comptime] measure: Measure,
    ) -> u32 {
        let strips = comptime!(self.units / STRIP_UNITS);
        let lane = UNIT_POS % STRIP_UNITS;
        let strip = UNIT_POS / STRIP_UNITS;
        let length = self.vectors.div_ceil(strips);
        let end = min((strip + 1) * length, self.vectors);
        let mut sum = Wide::new(0u32, 0u32);
        let mut at = strip * length + lane;
        while at < end {
            let own = self.sum(at, bounds, measure);
            sum.add(&own);
            at += STRIP_UNITS;
        }
        let scan = scanner.scan(&sum);
        let mut left = Wide::new(0u32, 0u32);
        if comptime!(is_fraction) {
            left.add(&target.high_product(&scan.total));
        } else {
            left.add(target);
        }
        if lane == comptime!(STRIP_UNITS - 1) {
            let mut before = Wide::new(0u32, 0u32);
            if strip > 0 {
                before.add(&scanner.sum_at(strip * STRIP_UNITS - 1));
            }
            let after = scanner.sum_at(UNIT_POS);
            if !left.is_below(&before) && left.is_below(&after) {
                let rest = left.minus(&before);
                found[0usize] = strip;
                found[1usize] = rest.high;
                found[2usize] = rest.low;
            }
        }
        sync_cube();

        let first = found[0usize] * length;
        let target = Wide::new(found[1usize], found[2usize]);
        let end = min(first + length, self.vectors);
        let own = length.div_ceil(comptime!(self.units));
        let first = min(first + UNIT_POS * own, end);
        let end = min(first + own, end);
        let mut sum = Wide::new(0u32, 0u32);
        for at in first..end {
            let own = self.sum(at, bounds, measure);
            sum.add(&own);
        }
        let scan = scanner.scan(&sum);
        let mut before = Wide::new(0u32, 0u32);
        before.add(&scan.before);
        let mut after = Wide::new(0u32, 0u32);
        after.add(&scan.before);
        after.add(&sum);
        if !target.is_below(&before) && target.is_below(&after) {
            for at in first..end {
                let values = self.read(at);
                #[unroll]
                for i in 0..N::value() {
                    let id = at * N::value() as u32 + i as u32;
                    let amount = bounds.amount(f32::cast_from(values.extract(i)), id, measure);
                    let is_before = target.is_below(&before);
                    before.add(&amount);
                    if !is_before && target.is_below(&before) {
                        found[3usize] = id;
                    }
                }
            }
        }
        sync_cube();
        found[3usize]
    }
}

/// The random number of a position, in units of 2^-64.
#[cube]
fn random_number(position: u32, seed_low: u32, seed_high: u32) -> Wide {
    let words = philox_words(position, (seed_low, seed_high));
    Wide::new(words.1, words.0)
}

/// Chooses a token for each row by the parameters of its lane.
///
/// - `logits`: rows of vectors
/// - `positions`: for each lane
/// - `tokens`: `[rows]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sample_kernel<F: Float, I: Int, N: Size>(
    logits: &[Vector<F, N>],
    tables: LaneTables,
    positions: &[I],
    tokens: &mut [i32],
    shape: RowShape,
    #[comptime] blueprint: SampleBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    // Cubes beyond the rows repeat the work of the last one.
    let index = min(CUBE_POS as u32, shape.rows - 1);
    let row = SamplingRow::<F, N>::new(
        logits,
        index as usize * shape.row_vectors,
        shape.vectors,
        blueprint.units,
    );
    let mut scanner = WideScanner::new(blueprint.units);
    let highest = row.highest(&mut scanner);
    let mut token = NONE.runtime();
    if highest.high > LOWEST {
        token = highest.low as i32;
        let lane = index / shape.lane_rows;
        let filter = tables.filter(lane);
        if filter.rate > 0.0f32 {
            let position = u32::cast_from(positions[lane as usize]) + index % shape.lane_rows;
            let drawn = random_number(
                position,
                tables.word(lane, comptime!(SEED[0])),
                tables.word(lane, comptime!(SEED[1])),
            );
            token = row.draw(&highest, &filter, &drawn, &mut scanner, blueprint) as i32;
        }
    }
    if UNIT_POS == 0 {
        tokens[index as usize] = token;
    }
}
