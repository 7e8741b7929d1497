//! Rounding to small formats and back, for activations and rows of caches.

#[cfg(feature = "cube")]
pub(crate) mod kernel;
#[cfg(feature = "cube")]
pub(crate) mod launch;
pub(crate) mod reference;

/// A small float format as a target of rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoundtripFormat {
    /// Largest value.
    pub max: f32,
    /// Exponent of the smallest normal value.
    pub min_exponent: i32,
    /// Bits after the binary point of a normal value.
    pub mantissa_bits: i32,
    /// Halvings that bring the largest value into the lowest normal binade, as a descending sum.
    exponent_steps: &'static [i32],
    /// The largest magnitude of a block is taken to be at least this.
    pub amax_floor: f32,
    /// Exponent of the scale that belongs to `amax_floor`.
    min_scale_exponent: i32,
}

/// FP8 with 1e-4 as the smallest block maximum.
pub(crate) const E4M3: RoundtripFormat = RoundtripFormat {
    max: 448.0,
    min_exponent: -6,
    mantissa_bits: 3,
    exponent_steps: &[8, 4, 2, 1],
    amax_floor: 1e-4,
    min_scale_exponent: -22,
};

/// FP4 with the smallest normal scale as the smallest scale.
pub(crate) const E2M1: RoundtripFormat = RoundtripFormat {
    max: 6.0,
    min_exponent: 0,
    mantissa_bits: 1,
    exponent_steps: &[2, 1],
    amax_floor: 6.0 * power_of_two(-126),
    min_scale_exponent: -126,
};

/// `2^exponent` for the exponents of normal `f32` values.
pub(crate) const fn power_of_two(exponent: i32) -> f32 {
    assert!(exponent >= -126 && exponent <= 127);
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// A format that an operator rounds to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SmallFloat {
    /// [`E4M3`].
    Fp8,
    /// [`E2M1`].
    Fp4,
}

impl SmallFloat {
    pub(crate) const fn format(self) -> RoundtripFormat {
        match self {
            Self::Fp8 => E4M3,
            Self::Fp4 => E2M1,
        }
    }
}

/// What the sums of a Walsh-Hadamard transform are multiplied by.
pub(crate) fn hadamard_scale(columns: usize) -> f32 {
    (columns as f64).sqrt().recip() as f32
}
