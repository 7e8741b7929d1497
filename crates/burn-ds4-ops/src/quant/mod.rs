//! Weight decoding and activation round trips of the released DeepSeek-V4 quantisation.
//!
//! # Packed weights
//!
//! Weights stay packed in `u32` tensors, little endian: the lowest bits of word `w` hold the lowest column.
//!
//! | format | codes | words of a row of `columns` | scales |
//! |---|---|---|---|
//! | FP8 | E4M3 (1-4-3, bias 7, no infinity, NaN at `0x7f` / `0xff`, largest 448, subnormals `m * 2^-9`) | `ceil(columns / 4)` | one `f32` per 128x128 block |
//! | FP4 | E2M1 (`0, 0.5, 1, 1.5, 2, 3, 4, 6`, bit 3 is the sign) | `ceil(columns / 8)` | one E8M0 byte (`2^(byte - 127)`, 255 is NaN) per row and 32 columns |
//!
//! The last block of a row or column may be partial. FP4 scale bytes are `[rows, ceil(columns / 32)]`, row-major, four to a
//! `u32` word, padded to a whole word. Formats: OCP OFP8 1.0 and OCP MX 1.0; layout: the released `model.safetensors` files.
//!
//! # Exactness
//!
//! Every function gives the same bits on every device: code values and E8M0 scales come from tables, scales of the round
//! trips are found by comparison against powers of two instead of a logarithm, and no result goes through a division.
//! Nothing is read back to the host. Two things remain a device's own:
//!
//! - results and scales below the `f32` normal range (`2^-126`), which a device that flushes denormals turns into zero; among
//!   the E8M0 scales that is byte 0, and byte 1 times the code 0.5;
//! - the sign of a zero and the payload of a NaN.
//!
//! # NaN and infinity
//!
//! A NaN code or a NaN scale decodes to NaN, and only the values that it covers. A product beyond the range of the output
//! dtype is infinite. In a round trip, a NaN or infinite element comes out unchanged and has no part in the scale of its block.

mod reference;

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, kind::Basic};

use crate::OpError;

/// Rows and columns that share one FP8 weight scale.
pub const FP8_BLOCK: usize = 128;
/// Columns that share one FP4 weight scale.
pub const FP4_BLOCK: usize = 32;

/// Decodes an FP8 matrix.
///
/// - `words`: `u32` `[rows, ceil(columns / 4)]`
/// - `scales`: `f32` `[ceil(rows / 128), ceil(columns / 128)]`
/// - returns `[rows, columns]` in `dtype`. The product is made in `f32` and cast; with power-of-two scales that is exact for
///   `F32`, and for `BF16` and `F16` inside their normal range.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, and for a `dtype` that the device does not compute in.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
/// use burn_ds4_ops::quant::dequantize_fp8;
///
/// let device = Device::flex();
/// // 0x38 is 1.0, 0xc0 is -2.0, 0x7e is 448.0.
/// let words = TensorData::new(vec![0x007e_c038_u32], [1, 1]);
/// let words = Tensor::<2, Int>::from_data(words, (&device, DType::U32));
/// let scales = Tensor::<2>::from_data([[0.5]], (&device, DType::F32));
/// let weight = dequantize_fp8(words, scales, 3, FloatDType::F32)?;
/// weight.into_data().assert_eq(&TensorData::from([[0.5_f32, -1.0, 224.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn dequantize_fp8(
    words: Tensor<2, Int>,
    scales: Tensor<2>,
    columns: usize,
    dtype: FloatDType,
) -> Result<Tensor<2>, OpError> {
    let shape = check_fp8(&words, &scales, columns, 1, dtype)?;
    if shape.contains(&0) {
        return Ok(Tensor::empty(shape, (&words.device(), dtype.into())));
    }
    let (words, scales) = (words.unsqueeze(), scales.unsqueeze());
    let weight = reference::dequantize_fp8(words, scales, columns, 1);
    Ok(weight.reshape(shape).cast(dtype))
}

/// Decodes a batch of FP8 matrices, one for each expert.
///
/// A matrix may be several parts stacked along its rows (gate above up, say), each with block rows of its own: with `parts`
/// parts, row `r` of a part of `n = rows / parts` rows belongs to block row `part * ceil(n / 128) + floor(r / 128)`.
///
/// - `words`: `u32` `[batch, rows, ceil(columns / 4)]`
/// - `scales`: `f32` `[batch, parts * ceil(rows / parts / 128), ceil(columns / 128)]`
/// - returns `[batch, rows, columns]` in `dtype`
///
/// # Errors
///
/// As [`dequantize_fp8`]; [`OpError::InvalidValue`] where `parts` is zero or does not divide `rows`.
pub fn dequantize_fp8_batched(
    words: Tensor<3, Int>,
    scales: Tensor<3>,
    columns: usize,
    parts: usize,
    dtype: FloatDType,
) -> Result<Tensor<3>, OpError> {
    let shape = check_fp8(&words, &scales, columns, parts, dtype)?;
    if shape.contains(&0) {
        return Ok(Tensor::empty(shape, (&words.device(), dtype.into())));
    }
    Ok(reference::dequantize_fp8(words, scales, columns, parts).cast(dtype))
}

/// Decodes an FP4 matrix.
///
/// - `words`: `u32` `[rows, ceil(columns / 8)]`
/// - `scales`: `u32` `[ceil(rows * ceil(columns / 32) / 4)]`, the E8M0 bytes `[rows, ceil(columns / 32)]` in row-major order
/// - returns `[rows, columns]` in `dtype`. Exact for `F32`, and for `BF16` and `F16` inside their normal range.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, and for a `dtype` that the device does not compute in.
pub fn dequantize_fp4(
    words: Tensor<2, Int>,
    scales: Tensor<1, Int>,
    columns: usize,
    dtype: FloatDType,
) -> Result<Tensor<2>, OpError> {
    let shape = check_fp4(&words, &scales, columns, dtype)?;
    if shape.contains(&0) {
        return Ok(Tensor::empty(shape, (&words.device(), dtype.into())));
    }
    let (words, scales) = (words.unsqueeze(), scales.unsqueeze());
    let weight = reference::dequantize_fp4(words, scales, columns);
    Ok(weight.reshape(shape).cast(dtype))
}

/// Decodes a batch of FP4 matrices, one for each expert.
///
/// - `words`: `u32` `[batch, rows, ceil(columns / 8)]`
/// - `scales`: `u32` `[batch, ceil(rows * ceil(columns / 32) / 4)]`, each matrix padded to a whole word
/// - returns `[batch, rows, columns]` in `dtype`
///
/// # Errors
///
/// As [`dequantize_fp4`].
pub fn dequantize_fp4_batched(
    words: Tensor<3, Int>,
    scales: Tensor<2, Int>,
    columns: usize,
    dtype: FloatDType,
) -> Result<Tensor<3>, OpError> {
    let shape = check_fp4(&words, &scales, columns, dtype)?;
    if shape.contains(&0) {
        return Ok(Tensor::empty(shape, (&words.device(), dtype.into())));
    }
    Ok(reference::dequantize_fp4(words, scales, columns).cast(dtype))
}

/// Rounds to FP8 and back: what a value becomes in an FP8 cache, or as the input of an FP8 matrix product.
///
/// For each `block` elements of the last dimension (the last block may be partial), `s = 2^ceil(log2(max(amax, 1e-4) / 448))`
/// and `x` becomes `e4m3(x / s) * s`, rounded to the nearest E4M3 value, ties to the even code, subnormals included. The
/// reference uses blocks of 64 for cache rows and 128 for the inputs of matrix products.
///
/// `x` is `F32`, `F16` or `BF16`; the rounding is done in `f32`, the result has the dtype and shape of `x`. Magnitudes above
/// `448 * 2^119` may round to infinity, as in any `f32` arithmetic.
///
/// # Errors
///
/// [`OpError::DtypeMismatch`] for another dtype, [`OpError::InvalidValue`] for a `block` of zero.
pub fn fp8_roundtrip<const D: usize>(x: Tensor<D>, block: usize) -> Result<Tensor<D>, OpError> {
    roundtrip(x, block, &reference::E4M3)
}

/// Rounds to FP4 and back: what an indexer channel becomes in an FP4 cache.
///
/// For each `block` elements of the last dimension (32 in the reference; the last block may be partial),
/// `s = 2^ceil(log2(max(amax, 6 * 2^-126) / 6))` and `x` becomes `e2m1(x / s) * s`, rounded to the nearest E2M1 value, ties to
/// the even code.
///
/// Dtypes and errors as [`fp8_roundtrip`].
pub fn fp4_roundtrip<const D: usize>(x: Tensor<D>, block: usize) -> Result<Tensor<D>, OpError> {
    roundtrip(x, block, &reference::E2M1)
}

/// Walsh-Hadamard transform of the last dimension, in Sylvester order, times `n^-0.5`: orthonormal, and its own inverse.
///
/// `x` is `F32`, `F16` or `BF16`; the sums are made in `f32`, in a fixed order, and the result has the dtype and shape of
/// `x`. A NaN or an infinity spreads over its row.
///
/// # Errors
///
/// [`OpError::DtypeMismatch`] for another dtype, [`OpError::InvalidValue`] where the last dimension is no power of two.
pub fn hadamard<const D: usize>(x: Tensor<D>) -> Result<Tensor<D>, OpError> {
    expect_float(&x)?;
    let (shape, dtype) = (x.dims(), x.dtype());
    let columns = shape[D - 1];
    if !columns.is_power_of_two() {
        return Err(OpError::InvalidValue {
            argument: "last dimension of x",
            expected: "a power of two".into(),
            actual: columns,
        });
    }
    let rows = shape[..D - 1].iter().product();
    if rows == 0 {
        return Ok(x);
    }
    let x = x.cast(FloatDType::F32).reshape([rows, columns]);
    Ok(reference::hadamard(x)
        .reshape(shape)
        .cast(FloatDType::from(dtype)))
}

fn roundtrip<const D: usize>(
    x: Tensor<D>,
    block: usize,
    format: &reference::Format,
) -> Result<Tensor<D>, OpError> {
    expect_float(&x)?;
    if block == 0 {
        return Err(OpError::InvalidValue {
            argument: "block",
            expected: "at least 1".into(),
            actual: block,
        });
    }
    let (shape, dtype) = (x.dims(), x.dtype());
    if shape.contains(&0) {
        return Ok(x);
    }
    let columns = shape[D - 1];
    let rows = shape[..D - 1].iter().product();
    let x = x.cast(FloatDType::F32).reshape([rows, columns]);
    Ok(reference::roundtrip(x, block.min(columns), format)
        .reshape(shape)
        .cast(FloatDType::from(dtype)))
}

/// Checks the arguments of the FP8 decoders; the shape of the weight.
fn check_fp8<const D: usize>(
    words: &Tensor<D, Int>,
    scales: &Tensor<D>,
    columns: usize,
    parts: usize,
    dtype: FloatDType,
) -> Result<[usize; D], OpError> {
    let device = words.device();
    let rows = words.dims()[D - 2];
    let with_rows_and_columns = |rows, columns| {
        let mut shape = words.dims();
        shape[D - 2..].copy_from_slice(&[rows, columns]);
        shape
    };
    let packed = with_rows_and_columns(rows, columns.div_ceil(4));
    expect_words("words", words, packed)?;
    if parts == 0 || !rows.is_multiple_of(parts) {
        return Err(OpError::InvalidValue {
            argument: "parts",
            expected: format!("a divisor of {rows} rows"),
            actual: parts,
        });
    }
    expect_dtype("scales", "F32", scales, &[DType::F32])?;
    let block_rows = parts * (rows / parts).div_ceil(FP8_BLOCK);
    let blocks = with_rows_and_columns(block_rows, columns.div_ceil(FP8_BLOCK));
    expect_shape("scales", scales, blocks)?;
    expect_device("scales", &scales.device(), "words", &device)?;
    expect_supported(dtype, &device)?;
    Ok(with_rows_and_columns(rows, columns))
}

/// Checks the arguments of the FP4 decoders; the shape of the weight. `S` is `D - 1`.
fn check_fp4<const D: usize, const S: usize>(
    words: &Tensor<D, Int>,
    scales: &Tensor<S, Int>,
    columns: usize,
    dtype: FloatDType,
) -> Result<[usize; D], OpError> {
    let device = words.device();
    let mut shape = words.dims();
    let rows = shape[D - 2];
    shape[D - 1] = columns.div_ceil(8);
    expect_words("words", words, shape)?;
    let mut scale_shape = [0; S];
    scale_shape[..S - 1].copy_from_slice(&shape[..S - 1]);
    scale_shape[S - 1] = (rows * columns.div_ceil(FP4_BLOCK)).div_ceil(4);
    expect_words("scales", scales, scale_shape)?;
    expect_device("scales", &scales.device(), "words", &device)?;
    expect_supported(dtype, &device)?;
    shape[D - 1] = columns;
    Ok(shape)
}

fn expect_float<const D: usize>(x: &Tensor<D>) -> Result<(), OpError> {
    let accepted = [DType::F32, DType::F16, DType::BF16];
    expect_dtype("x", "F32, F16 or BF16", x, &accepted)
}

fn expect_words<const D: usize>(
    argument: &'static str,
    tensor: &Tensor<D, Int>,
    shape: [usize; D],
) -> Result<(), OpError> {
    expect_dtype(argument, "U32", tensor, &[DType::U32])?;
    expect_shape(argument, tensor, shape)
}

fn expect_dtype<const D: usize, K: Basic>(
    argument: &'static str,
    expected: &'static str,
    tensor: &Tensor<D, K>,
    accepted: &[DType],
) -> Result<(), OpError> {
    let actual = tensor.dtype();
    if accepted.contains(&actual) {
        return Ok(());
    }
    Err(OpError::DtypeMismatch {
        argument,
        expected,
        actual,
    })
}

fn expect_shape<const D: usize, K: Basic>(
    argument: &'static str,
    tensor: &Tensor<D, K>,
    shape: [usize; D],
) -> Result<(), OpError> {
    if tensor.dims() == shape {
        return Ok(());
    }
    Err(OpError::ShapeMismatch {
        argument,
        expected: shape.into(),
        actual: tensor.dims().into(),
    })
}

fn expect_device(
    argument: &'static str,
    actual: &Device,
    other: &'static str,
    expected: &Device,
) -> Result<(), OpError> {
    if actual == expected {
        return Ok(());
    }
    Err(OpError::DeviceMismatch {
        argument,
        other,
        expected: format!("{expected:?}"),
        actual: format!("{actual:?}"),
    })
}

fn expect_supported(dtype: FloatDType, device: &Device) -> Result<(), OpError> {
    if device.supports_dtype(dtype) {
        return Ok(());
    }
    Err(OpError::UnsupportedDtype {
        argument: "dtype",
        dtype: dtype.into(),
        device: format!("{device:?}"),
    })
}
