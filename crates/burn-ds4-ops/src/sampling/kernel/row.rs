use cubecl::prelude::*;

use super::filter::{Kept, Measure, weight_of};
use super::scan::Scanner;
use super::search::Search;
use super::wide::Wide;
use crate::random::philox_words;
use crate::topk::kernel::key::{LOWEST, float_of, key_of};

/// Of a row without candidates.
const NONE: i32 = -1;
/// Units that share a strip of a row.
const STRIP_UNITS: u32 = 32;

/// How [`sample_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SampleBlueprint {
    /// Takes the highest logit.
    pub greedy: bool,
    /// Keeps some logits only.
    pub top_k: bool,
    /// Keeps some of the weight only.
    pub top_p: bool,
    /// Units of a cube: a power of two, and no fewer than share a strip.
    pub units: u32,
    /// Binary logarithm of the number of bins of a search, which are no fewer than the units.
    pub log2_bins: u32,
}

/// Which logits are kept, in the units of weights.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Filter {
    pub rate: f32,
    pub farthest: f32,
    pub top_k: u32,
    /// In units of 2^-32.
    pub top_p: u32,
    pub minimum_high: u32,
    pub minimum_low: u32,
}

/// A row of logits.
#[derive(CubeType)]
pub(super) struct Row<'a, F: Float, N: Size> {
    logits: &'a [Vector<F, N>],
    first: usize,
    pub vectors: u32,
    #[cube(comptime)]
    units: u32,
}

#[cube]
impl<'a, F: Float, N: Size> Row<'a, F, N> {
    fn new(
        logits: &'a [Vector<F, N>],
        first: usize,
        vectors: u32,
        #[comptime] units: u32,
    ) -> Row<'a, F, N> {
        Row::<'a, F, N> {
            logits,
            first,
            vectors,
            units,
        }
    }

    pub fn read(&self, vector: u32) -> Vector<F, N> {
        self.logits[self.first + vector as usize]
    }

    /// What the elements of a vector add to a sum.
    fn sum(&self, vector: u32, kept: &Kept, #[comptime] measure: Measure) -> Wide {
        let values = self.read(vector);
        let mut sum = Wide::new(0u32, 0u32);
        #[unroll]
        for i in 0..N::value() {
            let id = vector * N::value() as u32 + i as u32;
            let amount = kept.amount(f32::cast_from(values.extract(i)), id, measure);
            sum.add(&amount);
        }
        sum
    }

    /// The key of the highest logit, and its lowest id. All of the cube must be here.
    fn highest(&self, scanner: &mut Scanner) -> Wide {
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

    /// The first id up to which the sum is above `target`; where `is_share`, above that share of the whole, in units of 2^-64. All of
    /// the cube must be here, and the sum must be above it.
    fn locate(
        &self,
        target: &Wide,
        kept: &Kept,
        scanner: &mut Scanner,
        found: &mut Shared<[u32]>,
        #[comptime] is_share: bool,
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
            let own = self.sum(at, kept, measure);
            sum.add(&own);
            at += STRIP_UNITS;
        }
        let scan = scanner.scan(&sum);
        let mut left = Wide::new(0u32, 0u32);
        if comptime!(is_share) {
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
            let own = self.sum(at, kept, measure);
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
                    let amount = kept.amount(f32::cast_from(values.extract(i)), id, measure);
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

/// Chooses a token for each row.
///
/// - `logits`: rows of `vectors` vectors, `row_vectors` apart
/// - `seeds`, `positions`: of each sequence, which has `of_sequence` rows
/// - `tokens`: `[rows]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn sample_kernel<F: Float, I: Int, J: Int, N: Size>(
    logits: &[Vector<F, N>],
    seeds: &[I],
    positions: &[J],
    tokens: &mut [i32],
    rows: u32,
    vectors: u32,
    row_vectors: usize,
    of_sequence: u32,
    filter: Filter,
    #[comptime] blueprint: SampleBlueprint,
    #[define(F, I, J)] _dtypes: [ElemType; 3],
) {
    // Cubes too many repeat others' work.
    let index = min(CUBE_POS as u32, rows - 1);
    let row = Row::<F, N>::new(
        logits,
        index as usize * row_vectors,
        vectors,
        blueprint.units,
    );
    let mut scanner = Scanner::new(blueprint.units);
    let highest = row.highest(&mut scanner);
    let mut token = NONE.runtime();
    if highest.high > LOWEST {
        if comptime!(blueprint.greedy) {
            token = highest.low as i32;
        } else {
            let mut kept = Kept::new(
                float_of(highest.high),
                highest.high,
                filter.rate,
                filter.farthest,
                Wide::new(filter.minimum_high, filter.minimum_low),
            );
            let mut found = Shared::<[u32]>::new_slice(4usize);
            let one = Wide::new(0u32, 1u32);
            if comptime!(blueprint.top_k || blueprint.top_p) {
                let mut search = Search::new(blueprint.log2_bins, blueprint.units);
                if comptime!(blueprint.top_k) {
                    let last = search.find::<F, N>(
                        &row,
                        &kept,
                        &mut scanner,
                        filter.top_k,
                        0u32,
                        Measure::Logits,
                    );
                    if last.exists {
                        kept.key = last.rank;
                        if last.needed.is_below(&last.equal) {
                            let target = last.needed.minus(&one);
                            kept.key_id = row.locate(
                                &target,
                                &kept,
                                &mut scanner,
                                &mut found,
                                false,
                                Measure::EqualLogits,
                            );
                        }
                    }
                }
                if comptime!(blueprint.top_p) {
                    let last = search.find::<F, N>(
                        &row,
                        &kept,
                        &mut scanner,
                        0u32,
                        filter.top_p,
                        Measure::Weights,
                    );
                    kept.exponent = !last.rank;
                    // Without the last of the equal ones, the others are not enough.
                    let others = last.equal.minus(&weight_of(!last.rank));
                    if !others.is_below(&last.needed) {
                        let target = last.needed.minus(&one);
                        kept.exponent_id = row.locate(
                            &target,
                            &kept,
                            &mut scanner,
                            &mut found,
                            false,
                            Measure::EqualWeights,
                        );
                    }
                }
            }
            let sequence = (index / of_sequence) as usize;
            let position = u32::cast_from(positions[sequence]) + index % of_sequence;
            let seed = (
                u32::cast_from(seeds[2 * sequence]),
                u32::cast_from(seeds[2 * sequence + 1]),
            );
            let words = philox_words(position, seed);
            let drawn = Wide::new(words.1, words.0);
            token = row.locate(&drawn, &kept, &mut scanner, &mut found, true, Measure::Kept) as i32;
        }
    }
    if UNIT_POS == 0 {
        tokens[index as usize] = token;
    }
}
