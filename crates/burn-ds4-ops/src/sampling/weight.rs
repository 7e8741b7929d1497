//! The weights of tokens as integers. Sums of integers are the same in any order, and so are the
//! tokens chosen by them.

use super::layout::{FARTHEST as FARTHEST_COLUMN, LAST, RATE, TOP_K, TOP_P};
use super::params::SamplingParams;

/// Fractional bits of an exponent.
pub(super) const EXPONENT_BITS: u32 = 25;
/// Exponent from which on a weight is 0.
pub(super) const FARTHEST: f32 = 43.5;
/// The most likely token has the weight two to this power, so that the sum over
/// [`MAX_COLUMNS`](super::params::MAX_COLUMNS) tokens fits in 63 bits.
pub(super) const WEIGHT_BITS: u32 = 43;
/// The last exponent whose weight is not 0.
pub(super) const LIGHTEST: u32 = WEIGHT_BITS << EXPONENT_BITS;
/// Bits of the mantissa of a weight, and how far it is shifted up.
pub(super) const MANTISSA_BITS: u32 = 31;
pub(super) const SHIFT: u32 = WEIGHT_BITS - MANTISSA_BITS;
/// Coefficients of a polynomial in `-t` for `(1 - 2^-t) / t` with `t` in 0..1, constant first, in
/// units of 2^-32: error 6e-9 (Chebyshev interpolation).
pub(super) const COEFFICIENTS: [u32; 6] = [
    2_977_044_447,
    1_031_763_206,
    238_367_376,
    41_218_952,
    5_547_538,
    493_577,
];

/// [`SamplingParams`] in the units of weights. The temperature is not 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct WeightFilter {
    /// Factor for half the distance to the highest logit.
    pub rate: f32,
    /// Half the distance from which on a weight is 0.
    pub farthest: f32,
    /// Tokens that top-k keeps, or 0 for all.
    pub top_k: usize,
    /// The fraction of the weight that top-p keeps, times 2^32; 2^32 keeps all.
    pub top_p: u64,
    /// The last exponent that min-p keeps, whose weight is at least 1.
    pub last: u32,
}

impl WeightFilter {
    pub fn of(sampling: &SamplingParams, columns: usize) -> Self {
        let rate = 2.0 * std::f64::consts::LOG2_E / f64::from(sampling.temperature);
        let rate = (rate as f32).clamp(f32::MIN_POSITIVE, f32::MAX);
        let minimum = f64::from(sampling.min_p) * (1u64 << WEIGHT_BITS) as f64;
        Self {
            rate,
            farthest: (FARTHEST / rate).min(f32::MAX),
            top_k: if sampling.top_k < columns {
                sampling.top_k
            } else {
                0
            },
            top_p: (f64::from(sampling.top_p) * (1u64 << 32) as f64).ceil() as u64,
            last: last_exponent((minimum.ceil() as u64).max(1)),
        }
    }

    /// The filter of a lane by its rows of both tables; none if its temperature is 0.
    pub fn of_lane(floats: &[f32], words: &[u32]) -> Option<Self> {
        if floats[RATE] == 0.0 {
            return None;
        }
        let top_p = match words[TOP_P] {
            0 => 1 << 32,
            part => u64::from(part),
        };
        Some(Self {
            rate: floats[RATE],
            farthest: floats[FARTHEST_COLUMN],
            top_k: words[TOP_K] as usize,
            top_p,
            last: words[LAST],
        })
    }

    /// Whether top-p may drop tokens.
    pub fn has_top_p(&self) -> bool {
        self.top_p < 1 << 32
    }

    /// The power of one half that gives a logit's weight, in units of 2^-25.
    pub fn exponent(&self, logit: f32, highest: f32) -> u32 {
        if logit == highest {
            return 0;
        }
        // Subtracts half of each, so that the difference is finite.
        let half = highest * 0.5 - logit * 0.5;
        let exponent = if half <= self.farthest {
            (half * self.rate).min(FARTHEST)
        } else {
            FARTHEST
        };
        (exponent * (1 << EXPONENT_BITS) as f32) as u32
    }
}

/// The last exponent whose weight is at least `minimum`, which is at most that of exponent 0.
fn last_exponent(minimum: u64) -> u32 {
    let (mut last, mut after) = (0, LIGHTEST + 1);
    while after - last > 1 {
        let middle = last + (after - last) / 2;
        if weight(middle) >= minimum {
            last = middle;
        } else {
            after = middle;
        }
    }
    last
}

/// The weight of an exponent.
pub(super) fn weight(exponent: u32) -> u64 {
    let fraction = u64::from(exponent << (32 - EXPONENT_BITS));
    let times_fraction = |x: u32| ((u64::from(x) * fraction) >> 32) as u32;
    let (last, lower) = COEFFICIENTS.split_last().expect("six");
    let quotient = lower
        .iter()
        .rev()
        .fold(*last, |sum, coefficient| coefficient - times_fraction(sum));
    let mantissa = (1 << MANTISSA_BITS) - (times_fraction(quotient) >> 1);
    (u64::from(mantissa) << SHIFT) >> (exponent >> EXPONENT_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_powers_of_one_half() {
        let unit = f64::from(1u32 << EXPONENT_BITS);
        for step in 0..40_000u32 {
            let exponent = step * 36_481;
            let expected = (f64::from(WEIGHT_BITS) - f64::from(exponent) / unit).exp2();
            let actual = weight(exponent) as f64;
            assert!(
                (actual - expected).abs() <= 1.0 + expected * 1.2e-8,
                "{exponent}: {actual} instead of {expected}"
            );
        }
        assert_eq!(weight(0), 1 << WEIGHT_BITS);
        assert_eq!(weight(1 << EXPONENT_BITS), 1 << (WEIGHT_BITS - 1));
        assert_eq!(weight((FARTHEST * unit as f32) as u32), 0);
    }

    #[test]
    fn no_weight_is_above_that_of_a_lower_exponent() {
        // All mantissas: other exponents have the same ones, shifted.
        let mut last = u64::MAX;
        for exponent in 0..=1 << EXPONENT_BITS {
            let weight = weight(exponent);
            assert!(weight <= last, "{exponent}");
            last = weight;
        }
        for exponent in (0..44 << EXPONENT_BITS).step_by(997) {
            assert!(weight(exponent + 997) <= weight(exponent), "{exponent}");
        }
    }

    #[test]
    fn the_last_exponent_is_the_last_that_is_heavy_enough() {
        let [lightest, heaviest] = [1, 1 << WEIGHT_BITS];
        assert_eq!(last_exponent(lightest), LIGHTEST);
        assert_eq!(last_exponent(heaviest), 0);
        assert_eq!(weight(LIGHTEST + 1), 0);
        for minimum in [
            2,
            3,
            1000,
            1 << 20,
            (1 << 31) + 1,
            heaviest / 20,
            heaviest - 1,
        ] {
            let last = last_exponent(minimum);
            assert!(
                weight(last) >= minimum && weight(last + 1) < minimum,
                "{minimum}"
            );
        }
    }
}
