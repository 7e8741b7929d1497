//! Rows that one cube works on.

use cubecl::prelude::*;

use super::filter::{FilterBounds, Measure, weight_of};
use super::lanes::{LaneFilter, Lanes};
use super::radix_select::WeightedRadixSelect;
use super::row::{NONE, RowShape, SampleBlueprint, SamplingRow, SamplingRowExpand};
use super::scan::WideScanner;
use super::wide::Wide;
use crate::select::key::{LOWEST, key_of};

/// Units that work on the same strip of a row.
const STRIP_UNITS: u32 = 32;

#[cube]
impl<'a, F: Float, N: Size> SamplingRow<'a, F, N> {
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

    /// The key of the highest logit of some vectors, and its lowest id. Every unit of the cube must
    /// call this.
    pub fn highest(&self, first: u32, end: u32, scanner: &mut WideScanner) -> Wide {
        let mut key = 0u32;
        let mut id = u32::MAX.runtime();
        let mut at = first + UNIT_POS;
        while at < end {
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
    /// of the cube must call this. The bins of the search are empty.
    pub fn draw(
        &self,
        highest: &Wide,
        filter: &LaneFilter,
        drawn: &Wide,
        scanner: &mut WideScanner,
        search: &mut WeightedRadixSelect,
        found: &mut Shared<[u32]>,
    ) -> u32 {
        let mut bounds = FilterBounds::new(highest.high, filter);
        let one = Wide::new(0u32, 1u32);
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
                        found,
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
                    found,
                    false,
                    Measure::EqualWeights,
                );
            }
        }
        self.locate(drawn, &bounds, scanner, found, true, Measure::KeptWeights)
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
        self.locate_between(first, end, &target, bounds, scanner, found, measure)
    }

    /// The first id of some vectors at which their running sum exceeds `target`. Every unit of the
    /// cube must call this, and the total must exceed the target.
    pub fn locate_between(
        &self,
        first: u32,
        end: u32,
        target: &Wide,
        bounds: &FilterBounds,
        scanner: &mut WideScanner,
        found: &mut Shared<[u32]>,
        #[comptime] measure: Measure,
    ) -> u32 {
        let own = (end - first).div_ceil(comptime!(self.units));
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

/// Chooses a token for each row by the parameters of its lane.
///
/// - `logits`: rows of vectors
/// - `tokens`: `[rows]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sample_kernel<F: Float, I: Int, N: Size>(
    logits: &[Vector<F, N>],
    lanes: &Lanes<I>,
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
        blueprint.units.cube,
    );
    let mut scanner = WideScanner::new(blueprint.units);
    let highest = row.highest(0u32, shape.vectors, &mut scanner);
    let mut token = NONE.runtime();
    if highest.high > LOWEST {
        token = highest.low as i32;
        let filter = lanes.tables.filter(index / shape.lane_rows);
        if filter.rate > 0.0f32 {
            let drawn = lanes.random_number(index, shape.lane_rows);
            let mut found = Shared::<[u32]>::new_slice(4usize);
            let mut search = WeightedRadixSelect::new(blueprint.log2_bins, blueprint.units.cube);
            token = row.draw(
                &highest,
                &filter,
                &drawn,
                &mut scanner,
                &mut search,
                &mut found,
            ) as i32;
        }
    }
    if UNIT_POS == 0 {
        tokens[index as usize] = token;
    }
}
