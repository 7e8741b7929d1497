//! How likely a token is, as an integer: sums of integers are the same in any order, and so is what is chosen by them.

use super::Sampling;

/// Binary digits of an exponent after the point.
pub(super) const EXPONENT_BITS: u32 = 25;
/// From this exponent on, a weight is 0.
pub(super) const FARTHEST: f32 = 43.5;
/// The weight of the most likely token is two to this power, so that those of [`MAX_COLUMNS`](super::MAX_COLUMNS) fit in 63 bits.
pub(super) const WEIGHT_BITS: u32 = 43;
/// Bits of a power of two that is computed, and how far it is shifted up to be a weight.
pub(super) const MANTISSA_BITS: u32 = 31;
pub(super) const SHIFT: u32 = WEIGHT_BITS - MANTISSA_BITS;
/// `(1 - 2^-t) / t` as a polynomial in `-t` for `t` in 0..1, constant first, in units of 2^-32: error 6e-9 (Chebyshev interpolation).
pub(super) const COEFFICIENTS: [u32; 6] = [
    2_977_044_447,
    1_031_763_206,
    238_367_376,
    41_218_952,
    5_547_538,
    493_577,
];

/// [`Sampling`] in the units of weights. The temperature is not 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Filter {
    /// What half the distance to the highest logit is multiplied by.
    pub rate: f32,
    /// Half the distance beyond which a weight is 0.
    pub farthest: f32,
    /// Tokens that are kept, or 0 for all.
    pub top_k: usize,
    /// The share to be reached, times 2^32; 2^32 keeps all.
    pub top_p: u64,
    /// The lowest weight.
    pub minimum: u64,
}

impl Filter {
    pub fn of(sampling: &Sampling, columns: usize) -> Self {
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
            minimum: (minimum.ceil() as u64).max(1),
        }
    }

    /// The power of one half that a logit's weight is, in units of 2^-25.
    pub fn exponent(&self, logit: f32, highest: f32) -> u32 {
        if logit == highest {
            return 0;
        }
        // Of halves, so that the difference is finite.
        let half = highest * 0.5 - logit * 0.5;
        let exponent = if half <= self.farthest {
            (half * self.rate).min(FARTHEST)
        } else {
            FARTHEST
        };
        (exponent * (1 << EXPONENT_BITS) as f32) as u32
    }
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
        let mut last = u64::MAX;
        for exponent in (0..44 << EXPONENT_BITS).step_by(997) {
            assert!(weight(exponent) <= last, "{exponent}");
            last = weight(exponent);
        }
    }
}
