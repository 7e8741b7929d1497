//! Linear maps and stacks of them, whose weights may stay packed as FP8 or FP4.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Distribution, FloatDType, Int, Tensor};
use burn_ds4_ops::matmul::matmul;
use burn_ds4_ops::moe::Experts;
use burn_ds4_ops::quant;

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
        PackedLinear {
            weight: LinearWeight::Dense(random([self.d_output, self.d_input], device)),
        }
    }
}

/// Random parameter of the given shape, its variance being one over the last dimension.
pub(crate) fn random<const D: usize>(shape: [usize; D], device: &Device) -> Param<Tensor<D>> {
    let deviation = (shape[D - 1] as f64).powf(-0.5);
    Param::from_tensor(Tensor::random(
        shape,
        Distribution::Normal(0.0, deviation),
        device,
    ))
}

/// `x · weightᵀ` over the last dimension of `x`, `weight` being `[out, in]`.
///
/// All other dimensions become rows of one matrix product: `burn::tensor::module::linear` may instead add dimensions to the
/// transposed weight, and thereby copy it.
pub(crate) fn project<const D: usize>(x: Tensor<D>, weight: Tensor<2>) -> Tensor<D> {
    let [out, inp] = weight.dims();
    let mut shape = x.dims();
    let rows = shape[..D - 1].iter().product();
    shape[D - 1] = out;
    matmul(x.reshape([rows, inp]), weight.transpose()).reshape(shape)
}

/// `y = x · Wᵀ` without a bias, its weight dense or packed.
#[derive(Module, Debug)]
pub struct PackedLinear {
    /// The weight `[d_output, d_input]`.
    pub weight: LinearWeight,
}

/// Weight of a [`PackedLinear`].
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum LinearWeight {
    /// A float tensor `[out, in]`.
    Dense(Param<Tensor<2>>),
    /// E4M3 codes with one scale per 128x128 block.
    Fp8(Fp8Weight),
    /// E2M1 codes with one E8M0 scale per 32 columns of a row.
    Fp4(Fp4Weight),
}

/// FP8 weights of one or more stacked matrices.
#[derive(Module, Debug)]
pub struct Fp8Weight {
    /// Four codes a word, along the columns: u32 `[matrices, out, ceil(in / 4)]`.
    pub words: Param<Tensor<3, Int>>,
    /// Scales of the 128x128 blocks: f32 `[matrices, parts · ceil(out / parts / 128), ceil(in / 128)]`.
    pub scales: Param<Tensor<3>>,
    /// Number of row groups whose scale blocks start anew (2 for a gate and an up matrix, stacked).
    pub parts: usize,
    /// Number of columns.
    pub columns: usize,
}

/// FP4 weights of one or more stacked matrices.
#[derive(Module, Debug)]
pub struct Fp4Weight {
    /// Eight codes a word, along the columns: u32 `[matrices, out, ceil(in / 8)]`.
    pub words: Param<Tensor<3, Int>>,
    /// E8M0 bytes of `[out, ceil(in / 32)]`, four a word: u32 `[matrices, words]`.
    pub scales: Param<Tensor<2, Int>>,
    /// Number of columns.
    pub columns: usize,
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
        let weight = self.dense(x.dtype().into());
        project(x, weight)
    }

    /// The weight `[d_output, d_input]` as floats of the given dtype.
    pub fn dense(&self, dtype: FloatDType) -> Tensor<2> {
        match &self.weight {
            LinearWeight::Dense(weight) => weight.val().cast(dtype),
            LinearWeight::Fp8(weight) => weight.dense(dtype).squeeze_dim(0),
            LinearWeight::Fp4(weight) => weight.dense(dtype).squeeze_dim(0),
        }
    }
}

impl Fp8Weight {
    fn dense(&self, dtype: FloatDType) -> Tensor<3> {
        self.decode(self.words.val(), self.scales.val(), dtype)
    }

    fn decode(&self, words: Tensor<3, Int>, scales: Tensor<3>, dtype: FloatDType) -> Tensor<3> {
        quant::dequantize_fp8_batched(words, scales, self.columns, self.parts, dtype)
            .expect("shapes and dtype were checked when the weight was loaded")
    }
}

impl Fp4Weight {
    fn dense(&self, dtype: FloatDType) -> Tensor<3> {
        self.decode(self.words.val(), self.scales.val(), dtype)
    }

    fn decode(
        &self,
        words: Tensor<3, Int>,
        scales: Tensor<2, Int>,
        dtype: FloatDType,
    ) -> Tensor<3> {
        quant::dequantize_fp4_batched(words, scales, self.columns, dtype)
            .expect("shapes and dtype were checked when the weight was loaded")
    }
}

/// The same matrix of every routed expert: `[experts, out, in]`.
#[derive(Module, Debug)]
pub struct ExpertStack {
    /// The weights.
    pub weight: ExpertWeight,
}

/// Weights of an [`ExpertStack`].
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum ExpertWeight {
    /// A float tensor `[experts, out, in]`.
    Dense(Param<Tensor<3>>),
    /// E4M3 codes with one scale per 128x128 block.
    Fp8(Fp8Weight),
    /// E2M1 codes with one E8M0 scale per 32 columns of a row.
    Fp4(Fp4Weight),
}

impl ExpertStack {
    /// All matrices as floats of the given dtype.
    pub fn dense(&self, dtype: FloatDType) -> Tensor<3> {
        match &self.weight {
            ExpertWeight::Dense(weight) => weight.val().cast(dtype),
            ExpertWeight::Fp8(weight) => weight.dense(dtype),
            ExpertWeight::Fp4(weight) => weight.dense(dtype),
        }
    }
}

impl Experts for ExpertStack {
    fn count(&self) -> usize {
        match &self.weight {
            ExpertWeight::Dense(weight) => weight.dims()[0],
            ExpertWeight::Fp8(weight) => weight.words.dims()[0],
            ExpertWeight::Fp4(weight) => weight.words.dims()[0],
        }
    }

    fn gather(&self, ids: Tensor<1, Int>, dtype: FloatDType) -> Tensor<3> {
        match &self.weight {
            ExpertWeight::Dense(weight) => weight.val().select(0, ids).cast(dtype),
            ExpertWeight::Fp8(weight) => {
                let words = weight.words.val().select(0, ids.clone());
                weight.decode(words, weight.scales.val().select(0, ids), dtype)
            }
            ExpertWeight::Fp4(weight) => {
                let words = weight.words.val().select(0, ids.clone());
                weight.decode(words, weight.scales.val().select(0, ids), dtype)
            }
        }
    }

    fn one(&self, expert: usize, dtype: FloatDType) -> Tensor<2> {
        let range = expert..expert + 1;
        let matrix = match &self.weight {
            ExpertWeight::Dense(weight) => weight.val().slice_dim(0, range).cast(dtype),
            ExpertWeight::Fp8(weight) => {
                let words = weight.words.val().slice_dim(0, range.clone());
                weight.decode(words, weight.scales.val().slice_dim(0, range), dtype)
            }
            ExpertWeight::Fp4(weight) => {
                let words = weight.words.val().slice_dim(0, range.clone());
                weight.decode(words, weight.scales.val().slice_dim(0, range), dtype)
            }
        };
        matrix.squeeze_dim(0)
    }
}
