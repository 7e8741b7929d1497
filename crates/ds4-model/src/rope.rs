//! Rotary position embedding: frequencies, and tables of their angles.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_ds4_ops::attention::{self, Positions};

use crate::config::YarnConfig;

/// Parameters of one rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryConfig {
    /// Number of rotated channels, twice the number of frequencies.
    pub dim: usize,
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Frequency scaling for long contexts.
    pub yarn: Option<YarnConfig>,
}

impl RotaryConfig {
    /// The frequencies in radians per position: `dim / 2` of them.
    ///
    /// # Example
    ///
    /// ```
    /// use ds4_model::rope::RotaryConfig;
    ///
    /// let rotary = RotaryConfig { dim: 4, theta: 10000.0, yarn: None };
    /// assert_eq!(rotary.frequencies(), [1.0, 0.01]);
    /// ```
    pub fn frequencies(&self) -> Vec<f32> {
        let dim = self.dim as f64;
        let plain = (0..self.dim / 2).map(|i| self.theta.powf(-2.0 * i as f64 / dim));
        let Some(yarn) = self.yarn else {
            return plain.map(|f| f as f32).collect();
        };
        let context = yarn.original_max_position_embeddings as f64;
        let rotations_at = |rotations: f64| {
            dim * (context / (rotations * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
        };
        let low = rotations_at(yarn.beta_fast).floor().max(0.0);
        let mut high = rotations_at(yarn.beta_slow).ceil().min(dim - 1.0);
        if low == high {
            high += 0.001;
        }
        plain
            .enumerate()
            .map(|(i, f)| {
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                (f * (1.0 - ramp) + f / yarn.factor * ramp) as f32
            })
            .collect()
    }
}

/// Cosines and sines of all angles up to some position.
///
/// The angle is the f32 product of position and frequency, as in the released code: at long range
/// the model was trained with its rounding.
#[derive(Clone, Debug)]
pub(crate) struct RotaryTable {
    /// `[positions, dim]`: cosines of all frequencies, then sines.
    angles: Tensor<2>,
    frequencies: Vec<f32>,
}

impl RotaryTable {
    pub(crate) fn new(config: &RotaryConfig, positions: usize, device: &Device) -> Self {
        let frequencies = config.frequencies();
        Self {
            angles: angles(&frequencies, 0, positions, device),
            frequencies,
        }
    }

    pub(crate) fn grow(&mut self, positions: usize) {
        let known = self.angles.dims()[0];
        if positions > known {
            let device = self.angles.device();
            let more = angles(&self.frequencies, known, positions, &device);
            self.angles = Tensor::cat(vec![self.angles.clone(), more], 0);
        }
    }

    /// The rotation of consecutive positions from `start` (`[batch]`) on, all below the table's
    /// size.
    pub(crate) fn from(&self, start: Tensor<1, Int>) -> Rotation {
        Rotation {
            angles: self.angles.clone(),
            start,
        }
    }
}

fn angles(frequencies: &[f32], from: usize, to: usize, device: &Device) -> Tensor<2> {
    let pairs = frequencies.len();
    let mut values = Vec::with_capacity((to - from) * 2 * pairs);
    for position in from..to {
        let angle = |f: &f32| f64::from(position as f32 * f);
        values.extend(frequencies.iter().map(|f| angle(f).cos() as f32));
        values.extend(frequencies.iter().map(|f| angle(f).sin() as f32));
    }
    Tensor::from_data(
        TensorData::new(values, [to - from, 2 * pairs]),
        (device, DType::F32),
    )
}

/// The rotation of consecutive positions, in every sequence from its own first one.
#[derive(Clone, Debug)]
pub(crate) struct Rotation {
    /// The angles of all positions, as [`burn_ds4_ops::attention::rotate_at`] takes them.
    pub(crate) angles: Tensor<2>,
    /// The first position of each sequence: `[batch]`.
    pub(crate) start: Tensor<1, Int>,
}

impl Rotation {
    /// The positions, as operators take them.
    pub(crate) fn positions(&self) -> Positions {
        Positions {
            angles: self.angles.clone(),
            start: self.start.clone(),
        }
    }

    /// Rotates the trailing channels of `x`: `[batch, count, heads, width]`.
    pub(crate) fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        self.rotate(x, false)
    }

    /// Rotates back.
    pub(crate) fn apply_inverse(&self, x: Tensor<4>) -> Tensor<4> {
        self.rotate(x, true)
    }

    fn rotate(&self, x: Tensor<4>, inverse: bool) -> Tensor<4> {
        attention::rotate_at(x, self.angles.clone(), self.start.clone(), inverse)
            .expect("positions of the table, and no more channels than `x` has")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yarn_keeps_fast_frequencies_and_divides_slow_ones() {
        let config = RotaryConfig {
            dim: 64,
            theta: 160000.0,
            yarn: Some(YarnConfig {
                factor: 16.0,
                original_max_position_embeddings: 65536,
                beta_fast: 32.0,
                beta_slow: 1.0,
            }),
        };
        let plain = RotaryConfig {
            yarn: None,
            ..config.clone()
        };
        let (scaled, plain) = (config.frequencies(), plain.frequencies());
        // The released parameters ramp from channel 15 to channel 25.
        assert_eq!(scaled[..=15], plain[..=15]);
        assert!(scaled[16] < plain[16]);
        for i in 25..32 {
            assert_eq!(scaled[i], plain[i] / 16.0);
        }
        let half = plain[20] * 0.5 + plain[20] / 16.0 * 0.5;
        assert!((scaled[20] / half - 1.0).abs() < 1e-6);
    }
}
