use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};

use super::backend::{PackedWeights, QuantOps};
use super::{FP4_BLOCK, FP8_BLOCK, fp8_roundtrip};
use crate::OpError;
use crate::gemm::Fp4Layout;
use crate::validation::{
    expect_device, expect_dtype, expect_float, expect_shape, expect_supported, invalid,
};

/// What products by weights do to their other operand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activations {
    /// They take it as it is.
    #[default]
    Exact,
    /// They round it to FP8, as the released models do before each product by FP8 or FP4 weights:
    /// [`fp8_roundtrip`] in blocks of [`FP8_BLOCK`] columns. Experts also round what their second
    /// matrix takes.
    ///
    /// Linear maps of many rows of `bf16` by FP8 weights are made by FP8 tensor cores where a
    /// kernel uses them (Hopper): their sums keep about 13 digits of 128 columns before they are
    /// `f32`, and an infinite number counts as NaN.
    ///
    /// Source: DeepSeek-V4 `inference/kernel.py`, `act_quant`, called by `Linear`.
    Released,
}

impl Activations {
    /// `x` as products take it: itself, or rounded. Operators do that by themselves.
    ///
    /// # Errors
    ///
    /// As [`fp8_roundtrip`], where `x` is rounded.
    pub fn input<const D: usize>(self, x: Tensor<D>) -> Result<Tensor<D>, OpError> {
        match self {
            Self::Exact => Ok(x),
            Self::Released => fp8_roundtrip(x, FP8_BLOCK),
        }
    }

    #[cfg(feature = "cube")]
    pub(crate) fn are_rounded(self) -> bool {
        self == Self::Released
    }
}

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
    /// block row `part * ceil(n / 128) + floor(r / 128)`.
    ///
    /// - `words`: `u32` `[count, out, ceil(columns / 4)]`
    /// - `scales`: `f32` `[count, parts * ceil(out / parts / 128), ceil(columns / 128)]`
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
        if shape.contains(&0) {
            return super::empty(shape, &device, dtype);
        }
        expect_supported(dtype, &device)?;
        let weights = Dispatch::dequantize_weights(self.clone().into(), dtype);
        Ok(Tensor::from_dispatch(weights))
    }
}

impl From<Weights> for PackedWeights<Dispatch> {
    fn from(weights: Weights) -> Self {
        weights.values
    }
}

/// Checks the arguments of the FP8 formats, with a stack's dimension or without; the shape of the
/// weight.
pub(super) fn check_fp8<const D: usize>(
    words: &Tensor<D, Int>,
    scales: &Tensor<D>,
    columns: usize,
    parts: usize,
) -> Result<[usize; D], OpError> {
    let shape = words.dims();
    let rows = shape[D - 2];
    let with_rows_and_columns = |rows, columns| {
        let mut shape = shape;
        shape[D - 2..].copy_from_slice(&[rows, columns]);
        shape
    };
    let packed = with_rows_and_columns(rows, columns.div_ceil(4));
    expect_words("words", words, packed)?;
    if parts == 0 || !rows.is_multiple_of(parts) {
        return Err(invalid("parts", format!("a divisor of {rows} rows"), parts));
    }
    expect_dtype("scales", "F32", scales, &[DType::F32])?;
    let block_rows = parts * (rows / parts).div_ceil(FP8_BLOCK);
    let blocks = with_rows_and_columns(block_rows, columns.div_ceil(FP8_BLOCK));
    expect_shape("scales", scales.dims(), blocks)?;
    expect_device("scales", &scales.device(), "words", &words.device())?;
    Ok(with_rows_and_columns(rows, columns))
}

/// As [`check_fp8`], for FP4. `S` is `D - 1`.
pub(super) fn check_fp4<const D: usize, const S: usize>(
    words: &Tensor<D, Int>,
    scales: &Tensor<S, Int>,
    columns: usize,
) -> Result<[usize; D], OpError> {
    let mut shape = words.dims();
    let rows = shape[D - 2];
    shape[D - 1] = columns.div_ceil(8);
    expect_words("words", words, shape)?;
    let mut scale_shape = [0; S];
    scale_shape[..S - 1].copy_from_slice(&shape[..S - 1]);
    scale_shape[S - 1] = (rows * columns.div_ceil(FP4_BLOCK)).div_ceil(4);
    expect_words("scales", scales, scale_shape)?;
    expect_device("scales", &scales.device(), "words", &words.device())?;
    shape[D - 1] = columns;
    Ok(shape)
}

fn expect_words<const D: usize>(
    argument: &'static str,
    tensor: &Tensor<D, Int>,
    shape: [usize; D],
) -> Result<(), OpError> {
    expect_dtype(argument, "U32", tensor, &[DType::U32])?;
    expect_shape(argument, tensor.dims(), shape)
}
