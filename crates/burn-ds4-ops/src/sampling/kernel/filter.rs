//! Which elements of a row the filters keep, and their weights.

use cubecl::prelude::*;

use super::super::weight::{COEFFICIENTS, EXPONENT_BITS, FARTHEST, LIGHTEST, MANTISSA_BITS, SHIFT};
use super::lanes::LaneFilter;
use super::wide::Wide;
use crate::select::key::{HIGHEST, INFINITY, LOWEST, MAGNITUDE, float_of, key_of};

/// What is summed or searched for over the elements of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Measure {
    /// One for each candidate, in the order of the logits.
    Logits,
    /// One for each element with the lowest logit that top-k keeps.
    EqualLogits,
    /// The weights of the elements that top-k keeps, in the order of weights.
    Weights,
    /// The weights of elements with the lowest weight that top-p keeps.
    EqualWeights,
    /// The weights of all elements that are kept.
    KeptWeights,
}

/// More than all that is rounded of the distance of two logits, as a share of their sum.
const ROUNDING: f32 = 2e-6;
/// A number whose double is finite.
const HUGE: f32 = 1e38;

/// An exponent that no element has.
pub(super) const NO_EXPONENT: u32 = u32::MAX;

/// The bounds of the elements that are kept: the lowest logit and the lowest weight, and for
/// elements that are equal to it the last id; and the last exponent of min-p.
#[derive(CubeType)]
pub(super) struct FilterBounds {
    pub highest: f32,
    pub highest_key: u32,
    pub rate: f32,
    pub farthest: f32,
    pub key: u32,
    pub key_id: u32,
    pub exponent: u32,
    pub exponent_id: u32,
    pub last: u32,
}

#[cube]
impl FilterBounds {
    /// The bounds that keep all candidates, given the highest logit.
    pub fn new(highest_key: u32, filter: &LaneFilter) -> FilterBounds {
        FilterBounds {
            highest: float_of(highest_key),
            highest_key,
            rate: filter.rate,
            farthest: filter.farthest,
            key: select(highest_key == HIGHEST, HIGHEST, comptime!(LOWEST + 1)),
            key_id: u32::MAX.runtime(),
            exponent: u32::MAX.runtime(),
            exponent_id: u32::MAX.runtime(),
            last: filter.last,
        }
    }

    fn among_logits(&self, key: u32, id: u32) -> bool {
        key > self.key || (key == self.key && id <= self.key_id)
    }

    /// The exponent of an element that top-k keeps and whose weight is not 0, else
    /// [`NO_EXPONENT`].
    pub fn weighed_exponent(&self, x: f32, id: u32) -> u32 {
        let key = key_of(x);
        let exponent = self.exponent_of(x, key);
        let is_weighed = self.among_logits(key, id) && exponent <= LIGHTEST;
        select(is_weighed, exponent, NO_EXPONENT)
    }

    /// The exponents of some elements where all candidates are kept; above [`LIGHTEST`] for those
    /// that are none.
    pub fn exponents<F: Float, N: Size>(&self, values: &Vector<F, N>) -> Vector<u32, N> {
        let mut exponents = Vector::<u32, N>::new(0u32);
        #[unroll]
        for i in 0..N::value() {
            let x = f32::cast_from(values.extract(i));
            let bits = u32::reinterpret(x);
            let exponent = self.exponent_between(x, (bits & MAGNITUDE) <= INFINITY);
            let is_highest = bits == u32::reinterpret(self.highest);
            exponents.insert(i, select(is_highest, 0u32, exponent));
        }
        exponents
    }

    /// Two logits between which are all whose exponents are in `first..end`. There may be others,
    /// too: these bounds only spare most elements a closer look.
    pub fn range(&self, first: u32, end: u32) -> (f32, f32) {
        let unit = comptime!(1.0 / (1u32 << EXPONENT_BITS) as f32);
        let nearest = min(f32::cast_from(first) * unit / self.rate, HUGE);
        let farthest = f32::cast_from(end) * unit / self.rate;
        let magnitude = max(self.highest, 0.0f32 - self.highest);
        let margin = (magnitude + farthest) * ROUNDING + comptime!(8.0 * f32::MIN_POSITIVE);
        let low = self.highest - 2.0f32 * farthest - margin;
        // The difference of infinities would be NaN.
        let is_bounded = farthest < HUGE && self.highest_key != HIGHEST;
        let low = select(is_bounded, low, f32::MIN);
        (low, self.highest - 2.0f32 * nearest + margin)
    }

    /// Whether an element is kept that top-k keeps.
    pub fn keeps(&self, exponent: u32, id: u32) -> bool {
        let among_weights =
            exponent < self.exponent || (exponent == self.exponent && id <= self.exponent_id);
        among_weights && exponent <= self.last
    }

    pub fn exponent_of(&self, x: f32, key: u32) -> u32 {
        let exponent = self.exponent_between(x, true);
        select(key == self.highest_key, 0u32, exponent)
    }

    /// The exponent of a number by its distance to the highest logit, which must not be 0 if that
    /// is infinite. `is_number` says whether it is one.
    fn exponent_between(&self, x: f32, is_number: bool) -> u32 {
        // Subtracts half of each, so that the difference is finite.
        let half = self.highest * 0.5f32 - x * 0.5f32;
        let near = min(half * self.rate, FARTHEST);
        let exponent = select(is_number && half <= self.farthest, near, FARTHEST);
        u32::cast_from(exponent * comptime!((1u32 << EXPONENT_BITS) as f32))
    }

    /// The key by which an element is searched for: larger for elements that are kept first.
    pub fn rank(&self, x: f32, #[comptime] measure: Measure) -> u32 {
        let key = key_of(x);
        if comptime!(measure == Measure::Logits) {
            key
        } else {
            !self.exponent_of(x, key)
        }
    }

    /// Whether an element takes part in a search.
    pub fn is_searched(&self, x: f32, id: u32) -> bool {
        self.among_logits(key_of(x), id)
    }

    /// The amount that an element adds to a sum.
    pub fn amount(&self, x: f32, id: u32, #[comptime] measure: Measure) -> Wide {
        let key = key_of(x);
        if comptime!(measure == Measure::EqualLogits) {
            Wide::new(0u32, select(key == self.key, 1u32, 0u32))
        } else {
            let mut amount = Wide::new(0u32, 0u32);
            if self.among_logits(key, id) {
                let exponent = self.exponent_of(x, key);
                let mut taken = exponent == self.exponent;
                if comptime!(measure == Measure::KeptWeights) {
                    taken = self.keeps(exponent, id);
                }
                if taken {
                    amount.add(&weight_of(exponent));
                }
            }
            amount
        }
    }
}

/// The weight of an exponent, or 0. Without a branch, so that those of several elements do not wait
/// for each other.
#[cube]
pub(super) fn weight_if(kept: bool, exponent: u32) -> Wide {
    let weight = weight_of(min(exponent, LIGHTEST));
    Wide {
        high: select(kept, weight.high, 0u32),
        low: select(kept, weight.low, 0u32),
    }
}

/// The weight of an exponent.
#[cube]
pub(super) fn weight_of(exponent: u32) -> Wide {
    let fraction = exponent << comptime!(32 - EXPONENT_BITS);
    let mut quotient = comptime!(COEFFICIENTS[COEFFICIENTS.len() - 1]).runtime();
    #[unroll]
    for i in 1..comptime!(COEFFICIENTS.len()) {
        let coefficient = comptime!(COEFFICIENTS[COEFFICIENTS.len() - 1 - i]);
        quotient = coefficient - quotient.mul_hi(fraction);
    }
    let mantissa = comptime!(1u32 << MANTISSA_BITS) - (quotient.mul_hi(fraction) >> 1);
    let whole = exponent >> EXPONENT_BITS;
    let left = SHIFT - min(whole, SHIFT);
    let right = max(whole, SHIFT) - SHIFT;
    Wide {
        // No shift is by 32, which would be undefined.
        high: (mantissa >> 1) >> (31 - left),
        low: (mantissa << left) >> right,
    }
}
