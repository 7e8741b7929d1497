//! Sums of products in f64, and how far from them a device may come that sums in f32.

use burn::tensor::FloatDType;

/// Of the sum of the magnitudes: what thousands of roundings to f32 make, in any order, on tensor
/// cores too. An element that is left out makes far more.
const SUMMED: f64 = 1.0 / (1 << 18) as f64;

/// Half of the distance between neighbours, relative to a value.
pub fn unit(dtype: FloatDType) -> f64 {
    match dtype {
        FloatDType::BF16 => 1.0 / (1 << 8) as f64,
        FloatDType::F16 => 1.0 / (1 << 11) as f64,
        _ => 1.0 / (1 << 24) as f64,
    }
}

/// Half of the distance between the smallest neighbours, with a device in mind that flushes what is
/// below the range of f32.
pub fn smallest(dtype: FloatDType) -> f64 {
    match dtype {
        FloatDType::F16 => 1.0 / (1 << 25) as f64,
        _ => f64::from(f32::MIN_POSITIVE),
    }
}

/// A sum of products.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    pub value: f64,
    /// Sum of the magnitudes.
    pub magnitude: f64,
    /// Sum of the squares.
    squares: f64,
}

impl Sum {
    pub fn of(products: impl Iterator<Item = f64>) -> Self {
        products.fold(Self::default(), |sum, product| Self {
            value: sum.value + product,
            magnitude: sum.magnitude + product.abs(),
            squares: sum.squares + product * product,
        })
    }

    pub fn products(a: &[f64], b: &[f64]) -> Self {
        assert_eq!(a.len(), b.len());
        Self::of(a.iter().zip(b).map(|(a, b)| a * b))
    }

    /// How far f32 sums may be off, if every term is off by as much as `rounding` of itself.
    pub fn error(&self, rounding: f64) -> f64 {
        SUMMED * self.magnitude + rounding * self.spread()
    }

    /// How far tensor cores may be off that multiply E4M3, in blocks of 128 columns.
    ///
    /// One instruction adds 32 products and the sum so far, each cut off at `2^-13` of the largest
    /// of these. With a sum of two standard deviations as the largest, the errors of the 132 terms
    /// of a block have a deviation of 1/615 of that of the sum, and so have those of all blocks:
    /// this is nearly five of them.
    pub fn error_of_fp8(&self) -> f64 {
        self.squares.sqrt() / 128.0
    }

    /// What independent errors of the terms add up to: six times their standard deviation, or all
    /// in one direction.
    pub fn spread(&self) -> f64 {
        self.magnitude.min(4.0 * self.squares.sqrt())
    }
}
