//! Rounding to small formats and back: an exhaustive search of the code tables.

use super::tables::{E2M1, E4M3};

/// A small format.
pub struct Oracle {
    /// Non-negative values in the order of their codes.
    codes: &'static [f64],
    amax_floor: f64,
}

pub const FP8: Oracle = Oracle {
    codes: E4M3.split_at(127).0,
    // The reference holds the floor in f32.
    amax_floor: 1e-4_f32 as f64,
};
// 6 * 2^-126
pub const FP4: Oracle = Oracle {
    codes: E2M1.split_at(8).0,
    amax_floor: 6.0 * f32::MIN_POSITIVE as f64,
};

impl Oracle {
    /// A row, in blocks of so many elements.
    pub fn row(&self, x: &[f32], block: usize) -> Vec<f32> {
        x.chunks(block)
            .flat_map(|block| self.block(block))
            .collect()
    }

    /// Rows of so many columns.
    pub fn rows(&self, x: &[f32], columns: usize, block: usize) -> Vec<f32> {
        x.chunks(columns.max(1))
            .flat_map(|row| self.row(row, block))
            .collect()
    }

    fn block(&self, x: &[f32]) -> Vec<f32> {
        let finite = x.iter().filter(|v| v.is_finite());
        let amax = finite.fold(self.amax_floor, |amax, v| amax.max(f64::from(v.abs())));
        let max = self.codes[self.codes.len() - 1];
        // The logarithm is rounded; what comes before it by two is certainly too small.
        let first = (amax / max).log2().ceil() as i32 - 2;
        let exponents = first..first + 5;
        let mut scales = exponents.map(|exponent| 2f64.powi(exponent));
        let scale = scales.find(|scale| amax <= max * scale).unwrap();
        x.iter()
            .map(|&v| {
                if !v.is_finite() {
                    return v;
                }
                let magnitude = self.nearest(f64::from(v.abs()) / scale) * scale;
                magnitude.copysign(f64::from(v)) as f32
            })
            .collect()
    }

    fn nearest(&self, x: f64) -> f64 {
        let above = self.codes.partition_point(|&code| code < x);
        let above = above.min(self.codes.len() - 1);
        let below = above.saturating_sub(1);
        let (down, up) = (x - self.codes[below], self.codes[above] - x);
        let is_below = down < up || (down == up && below.is_multiple_of(2));
        self.codes[if is_below { below } else { above }]
    }
}
