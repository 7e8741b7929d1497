//! Stacks of matrices, dense or packed.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{FloatDType, Int, Tensor};
use burn_ds4_ops::quant::{Activations, Fp4Layout, Weights};

/// Matrices `[matrices, out, in]` of one shape and format: one for a linear map, or one per expert
/// or group.
#[derive(Module, Debug)]
pub struct WeightStack {
    /// The matrices.
    pub values: StackValues,
    /// What products do to their other operand.
    #[module(skip)]
    pub activations: Activations,
}

/// The matrices of a [`WeightStack`].
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum StackValues {
    /// A float tensor `[matrices, out, in]`.
    Dense(Param<Tensor<3>>),
    /// E4M3 codes with one scale per block of 128x128, or of 32x32.
    Fp8(Fp8Weight),
    /// E2M1 codes with one E8M0 scale per 32 columns of a row.
    Fp4(Fp4Weight),
}

/// FP8 weights of one or more stacked matrices.
#[derive(Module, Debug)]
pub struct Fp8Weight {
    /// Four codes a word, along the columns: u32 `[matrices, out, ceil(in / 4)]`.
    pub words: Param<Tensor<3, Int>>,
    /// Scales of blocks of 128x128, or of 32x32: f32
    /// `[matrices, parts · ceil(out / parts / block), ceil(in / block)]`.
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
    /// How codes are arranged in words. Records of modules do not have it: they are loaded into a
    /// module of the same layout.
    #[module(skip)]
    pub layout: Fp4Layout,
}

impl From<StackValues> for WeightStack {
    /// Products take their other operand as it is.
    fn from(values: StackValues) -> Self {
        Self {
            values,
            activations: Activations::Exact,
        }
    }
}

impl WeightStack {
    /// The matrices as operators take them; copies no weight.
    ///
    /// # Panics
    ///
    /// If words, scales and sizes do not fit each other. Those of a loaded checkpoint always fit.
    pub fn weights(&self) -> Weights {
        let weights = match &self.values {
            StackValues::Dense(values) => Weights::dense(values.val()),
            StackValues::Fp8(fp8) => {
                Weights::fp8(fp8.words.val(), fp8.scales.val(), fp8.columns, fp8.parts)
            }
            StackValues::Fp4(fp4) => {
                Weights::fp4(fp4.words.val(), fp4.scales.val(), fp4.columns, fp4.layout)
            }
        };
        weights
            .expect("shapes and dtype were checked when the weight was loaded")
            .with_activations(self.activations)
    }

    /// The matrices as floats of the given dtype.
    ///
    /// # Panics
    ///
    /// As [`weights`](Self::weights), or if the device does not compute in `dtype`.
    pub fn dense(&self, dtype: FloatDType) -> Tensor<3> {
        match &self.values {
            StackValues::Dense(values) => values.val().cast(dtype),
            StackValues::Fp8(_) | StackValues::Fp4(_) => self
                .weights()
                .dequantize(dtype)
                .expect("a dtype that the device computes in"),
        }
    }
}

/// A parameter of integers.
pub(crate) fn int_parameter<const D: usize>(tensor: Tensor<D, Int>) -> Param<Tensor<D, Int>> {
    Param::initialized(ParamId::new(), tensor)
}
