//! Linear maps and stacks of them, whose weights may stay packed as FP8 or FP4.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::matmul::{INVARIANT_ROWS, SmallMOptions, small_m_matmul, small_m_matmul_group};
use burn_ds4_ops::quant::{quant_linear, quant_linear_group};

use crate::weights::{self, WeightSource};
pub use crate::weights::{Fp4Weight, Fp8Weight, StackValues, WeightStack};

/// Configuration of [`PackedLinear`].
#[derive(Config, Debug)]
pub struct PackedLinearConfig {
    /// Number of input channels.
    pub d_input: usize,
    /// Number of output channels.
    pub d_output: usize,
}

impl PackedLinearConfig {
    /// Initializes a dense map with random weights of standard deviation `d_input^-0.5`.
    pub fn init(&self, device: &Device) -> PackedLinear {
        weights::dense(device, |source| self.build(source, ""))
    }

    /// The map of the weight `{prefix}`.
    pub(crate) fn build(
        &self,
        source: &mut impl WeightSource,
        prefix: &str,
    ) -> Option<PackedLinear> {
        let weight = source.stack(prefix, None, &[""], [self.d_output, self.d_input])?;
        Some(PackedLinear { weight })
    }
}

/// Options that keep sums in f32, the type in which they are computed.
const F32_OUTPUT: SmallMOptions = SmallMOptions {
    f32_output: true,
    invariant_rows: INVARIANT_ROWS,
};

/// `x · weightᵀ` in f32, over the last dimension of `x`; `weight` is `[out, in]`. Each operand is
/// read in its own dtype.
pub(crate) fn project_f32<const D: usize>(x: Tensor<D>, weight: Tensor<2>) -> Tensor<D> {
    small_m_matmul(x, weight, F32_OUTPUT).expect("a weight as wide as the input")
}

/// `y = x · Wᵀ` without a bias, its weight dense or packed.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use ds4_model::linear::PackedLinearConfig;
///
/// let device = Device::flex();
/// let linear = PackedLinearConfig::new(2, 3).init(&device);
/// let identity = Tensor::<2>::eye(2, &device);
/// let weight = linear.dense(FloatDType::F32);
/// linear.forward(identity).into_data().assert_eq(&weight.transpose().into_data(), true);
/// # }
/// ```
#[derive(Module, Debug)]
pub struct PackedLinear {
    /// The weight: one matrix `[d_output, d_input]`.
    pub weight: WeightStack,
}

impl PackedLinear {
    /// Applies the map to the last dimension of `x`.
    ///
    /// # Shapes
    ///
    /// - `x`: `[.., d_input]`
    /// - output: `[.., d_output]`, in the dtype of `x`
    ///
    /// # Panics
    ///
    /// If the last dimension of `x` is not `d_input`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match &self.weight.values {
            StackValues::Dense(weight) => self.weight.activations.input(x).and_then(|x| {
                small_m_matmul(x, weight.val().squeeze_dim(0), SmallMOptions::default())
            }),
            StackValues::Fp8(_) | StackValues::Fp4(_) => quant_linear(x, &self.weight.weights()),
        }
        .expect("an input that fits the weight")
    }

    /// [`forward`](Self::forward) of two maps on one input; a single operator if both are packed.
    pub(crate) fn forward_both<const D: usize>(x: Tensor<D>, maps: [&Self; 2]) -> [Tensor<D>; 2] {
        Self::forward_both_and_project(x, maps, Vec::new()).0
    }

    /// [`forward_both`](Self::forward_both), and [`project_f32`] of the same input by several
    /// weights; a single operator if both maps are packed.
    pub(crate) fn forward_both_and_project<const D: usize>(
        x: Tensor<D>,
        maps: [&Self; 2],
        weights: Vec<Tensor<2>>,
    ) -> ([Tensor<D>; 2], Vec<Tensor<D>>) {
        let is_dense = |map: &&Self| matches!(map.weight.values, StackValues::Dense(_));
        if maps.iter().any(is_dense) {
            let products = maps.map(|map| map.forward(x.clone()));
            let projections = small_m_matmul_group(x, &weights, F32_OUTPUT);
            return (products, projections.expect("weights as wide as the input"));
        }
        let [first, second] = maps.map(|map| map.weight.weights());
        quant_linear_group(x, [&first, &second], &weights, F32_OUTPUT)
            .expect("an input that fits all weights")
    }

    /// The weight `[d_output, d_input]` as floats of the given dtype.
    pub fn dense(&self, dtype: FloatDType) -> Tensor<2> {
        self.weight.dense(dtype).squeeze_dim(0)
    }
}
