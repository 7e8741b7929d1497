use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};

use super::args::{Activations, FP4_BLOCK, PackedWeights, fp8_block};
use super::backend::QuantOps;
use crate::OpError;
use crate::gemm::{FP8_BLOCK, Fp4Layout};
use crate::validation::{
    expect_device, expect_dtype, expect_float, expect_shape, expect_supported, invalid,
};

/// A stack of weight matrices `[count, out, in]`, dense or packed, checked once.
///
/// Operators that take it read the codes as they are, wherever a device has a kernel for that. It
/// refers to tensors; making or cloning one copies no weight.
#[derive(Clone, Debug)]
pub struct Weights {
    values: PackedWeights<Dispatch>,
    activations: Activations,
}

impl Weights {
    /// Float matrices: `[count, out, in]`, `F32`, `F16` or `BF16`.
    ///
    /// # Errors
    ///
    /// [`OpError::DtypeMismatch`] for another dtype.
    pub fn dense(values: Tensor<3>) -> Result<Self, OpError> {
        expect_float("values", &values)?;
        Ok(Self {
            values: PackedWeights::Dense {
                values: values.into_dispatch(),
            },
            activations: Activations::Exact,
        })
    }

    /// FP8 matrices.
    ///
    /// A matrix may be several parts stacked along its rows (gate above up, say), each with block
    /// rows of its own: with `parts` parts, row `r` of a part of `n = out / parts` rows belongs to
    /// block row `part * ceil(n / block) + floor(r / block)`.
    ///
    /// - `words`: `u32` `[count, out, ceil(columns / 4)]`
    /// - `scales`: `f32` `[count, parts * ceil(out / parts / block), ceil(columns / block)]` for a
    ///   `block` of 128, or of 32. Kernels for tensor cores take the latter scales in `bf16`, and
    ///   round weights times scales to it: powers of two, which V4.1 has, are exact.
    ///
    /// # Errors
    ///
    /// [`OpError`] for a dtype, shape or device that does not fit; [`OpError::InvalidValue`] where
    /// `parts` is zero or does not divide `out`.
    pub fn fp8(
        words: Tensor<3, Int>,
        scales: Tensor<3>,
        columns: usize,
        parts: usize,
    ) -> Result<Self, OpError> {
        check_fp8(&words, &scales, columns, parts)?;
        Ok(Self {
            values: PackedWeights::Fp8 {
                words: words.into_dispatch(),
                scales: scales.into_dispatch(),
                columns,
                parts,
            },
            activations: Activations::Exact,
        })
    }

    /// FP4 matrices.
    ///
    /// - `words`: `u32` `[count, out, ceil(columns / 8)]`
    /// - `scales`: `u32` `[count, ceil(out * ceil(columns / 32) / 4)]`, the E8M0 bytes `[out,
    ///   ceil(columns / 32)]` of each matrix in row-major order, padded to a whole word
    /// - `layout`: how codes are arranged in `words`; results are the same
    ///
    /// # Errors
    ///
    /// [`OpError`] for a dtype, shape or device that does not fit.
    #[doc(alias = "mxfp4")]
    pub fn fp4(
        words: Tensor<3, Int>,
        scales: Tensor<2, Int>,
        columns: usize,
        layout: Fp4Layout,
    ) -> Result<Self, OpError> {
        check_fp4(&words, &scales, columns)?;
        Ok(Self {
            values: PackedWeights::Fp4 {
                words: words.into_dispatch(),
                scales: scales.into_dispatch(),
                columns,
                layout,
            },
            activations: Activations::Exact,
        })
    }

    /// The same matrices, for products that take their other operand so.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor, TensorData};
    /// use burn_ds4_ops::quant::{Activations, Weights, quant_linear};
    ///
    /// let device = Device::flex();
    /// let weights = Weights::dense(Tensor::<3>::ones([1, 1, 1], &device))?;
    /// let x = Tensor::<2>::from_data([[1.1]], &device);
    /// let exact = quant_linear(x.clone(), &weights)?;
    /// exact.into_data().assert_eq(&TensorData::from([[1.1_f32]]), true);
    /// // The nearest multiple of an eighth.
    /// let rounded = quant_linear(x, &weights.with_activations(Activations::Released))?;
    /// rounded.into_data().assert_eq(&TensorData::from([[1.125_f32]]), true);
    /// # }
    /// # Ok::<(), burn_ds4_ops::OpError>(())
    /// ```
    pub fn with_activations(self, activations: Activations) -> Self {
        Self {
            activations,
            ..self
        }
    }

    /// What products do to their other operand.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// `[count, out, in]`.
    pub fn dims(&self) -> [usize; 3] {
        self.values.dims()
    }

    /// The device of the tensors.
    pub fn device(&self) -> Device {
        match &self.values {
            PackedWeights::Dense { values } => values.device().into(),
            PackedWeights::Fp8 { words, .. } | PackedWeights::Fp4 { words, .. } => {
                words.device().into()
            }
        }
    }

    /// The matrices as floats: `[count, out, in]` in `dtype`. See the [module](super) for what is
    /// exact.
    ///
    /// # Errors
    ///
    /// [`OpError::UnsupportedDtype`] for a `dtype` that the device does not compute in.
    pub fn dequantize(&self, dtype: FloatDType) -> Result<Tensor<3>, OpError> {
        let (shape, device) = (self.dims(), self.device());
        expect_supported(dtype, &device)?;
        if shape.contains(&0) {
            return Ok(Tensor::empty(shape, (&device, dtype.into())));
        }
        let weights = Dispatch::dequantize_weights(self.clone().into(), dtype);
        Ok(Tensor::from_dispatch(weights))
    }
}

impl From<Weights> for PackedWeights<Dispatch> {
    fn from(weights: Weights) -> Self {
        weights.values
    }
}

/// Checks the arguments of [`Weights::fp8`].
fn check_fp8(
    words: &Tensor<3, Int>,
    scales: &Tensor<3>,
    columns: usize,
    parts: usize,
) -> Result<(), OpError> {
    let [count, rows, _] = words.dims();
    expect_words("words", words, [count, rows, columns.div_ceil(4)])?;
    if parts == 0 || !rows.is_multiple_of(parts) {
        return Err(invalid("parts", format!("a divisor of {rows} rows"), parts));
    }
    expect_dtype("scales", "F32", scales, &[DType::F32])?;
    let block = fp8_block(scales.dims(), [rows, columns], parts).unwrap_or(FP8_BLOCK);
    let block_rows = parts * (rows / parts).div_ceil(block);
    let blocks = [count, block_rows, columns.div_ceil(block)];
    expect_shape("scales", scales.dims(), blocks)?;
    expect_device("scales", &scales.device(), "words", &words.device())
}

/// Checks the arguments of [`Weights::fp4`].
fn check_fp4(
    words: &Tensor<3, Int>,
    scales: &Tensor<2, Int>,
    columns: usize,
) -> Result<(), OpError> {
    let [count, rows, _] = words.dims();
    expect_words("words", words, [count, rows, columns.div_ceil(8)])?;
    let scale_words = (rows * columns.div_ceil(FP4_BLOCK)).div_ceil(4);
    expect_words("scales", scales, [count, scale_words])?;
    expect_device("scales", &scales.device(), "words", &words.device())
}

fn expect_words<const D: usize>(
    argument: &'static str,
    tensor: &Tensor<D, Int>,
    shape: [usize; D],
) -> Result<(), OpError> {
    expect_dtype(argument, "U32", tensor, &[DType::U32])?;
    expect_shape(argument, tensor.dims(), shape)
}
