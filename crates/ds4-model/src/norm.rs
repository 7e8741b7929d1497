//! RMS normalisation, computed in f32 and rounded once.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_ds4_ops::norm::rms_norm;

use crate::weights::{self, Initial, WeightSource};

/// Configuration of [`RmsNorm`].
#[derive(Config, Debug)]
pub struct RmsNormConfig {
    /// Number of channels.
    pub d_model: usize,
    /// Added to the mean square.
    #[config(default = 1e-6)]
    pub epsilon: f64,
}

impl RmsNormConfig {
    /// Initializes the norm with unit weights.
    pub fn init(&self, device: &Device) -> RmsNorm {
        weights::dense(device, |source| self.build(source, ""))
    }

    /// The norm of the weight `{prefix}.weight`.
    pub(crate) fn build(&self, source: &mut impl WeightSource, prefix: &str) -> Option<RmsNorm> {
        let weight = source.float(&format!("{prefix}.weight"), [self.d_model], Initial::Ones)?;
        Some(RmsNorm {
            weight,
            epsilon: self.epsilon,
        })
    }
}

/// `weight · x / sqrt(mean(x²) + epsilon)` over the last dimension.
///
/// Unlike `burn::nn::RmsNorm`, it keeps the quotient in f32 until the weight is applied, as the
/// released model does. In bf16 the difference is visible.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData, Tolerance};
/// use ds4_model::norm::RmsNormConfig;
///
/// let device = Device::flex();
/// let norm = RmsNormConfig::new(2).init(&device);
/// let y = norm.forward(Tensor::<2>::from_data([[3.0, -3.0]], &device));
/// let expected = TensorData::from([[1.0_f32, -1.0]]);
/// y.into_data().assert_approx_eq::<f32>(&expected, Tolerance::default());
/// # }
/// ```
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// Weight of each channel: `[d_model]`.
    pub weight: Param<Tensor<1>>,
    /// Added to the mean square.
    pub epsilon: f64,
}

impl RmsNorm {
    /// Normalises the last dimension of `x`; the result has the dtype of `x`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        rms_norm(x, Some(self.weight.val()), self.epsilon)
            .expect("floats as wide as the weight, on its device")
    }
}

/// `x / sqrt(mean(x²) + epsilon)` over the last dimension, rounded once to the dtype of `x`.
pub(crate) fn normalize<const D: usize>(x: Tensor<D>, epsilon: f64) -> Tensor<D> {
    rms_norm(x, None, epsilon).expect("floats, and an epsilon that is not negative")
}
