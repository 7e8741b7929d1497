//! Weights in the quantisation of the released DeepSeek-V4 models, linear maps by them, and round
//! trips of activations.
//!
//! # Packed weights
//!
//! Weights stay packed in `u32` tensors, little endian: the lowest bits of word `w` hold the lowest
//! column.
//!
//! - FP8: E4M3 codes (1-4-3, bias 7, no infinity, NaN at `0x7f` / `0xff`, largest 448, subnormals
//!   `m * 2^-9`); `ceil(columns / 4)` words in a row of `columns`; one `f32` scale per 128x128
//!   block.
//! - FP4: E2M1 codes (`0, 0.5, 1, 1.5, 2, 3, 4, 6`, bit 3 is the sign); `ceil(columns / 8)` words
//!   in a row; one E8M0 scale byte (`2^(byte - 127)`, 255 is NaN) per row and 32 columns.
//!
//! The last block of a row or column may be partial. FP4 scale bytes are `[rows, ceil(columns /
//! 32)]`, row-major, four to a `u32` word, padded to a whole word. Formats: OCP OFP8 1.0 and OCP MX
//! 1.0; layout: the released `model.safetensors` files. Tensor-core kernels read FP4 faster where
//! each word is [repacked](Fp4Layout::Repacked).
//!
//! # Exactness
//!
//! Every function except [`quant_linear`], [`quant_linear_pair`], [`quant_linear_group`] and
//! [`grouped_linear`] gives the same bits on every device: code values and E8M0 scales come from
//! tables, the scales of round trips are found by comparison with powers of two instead of a
//! logarithm, and no result goes through a division. Nothing is read back to the host. Two things
//! depend on the device:
//!
//! - results and scales below the `f32` normal range (`2^-126`), which a device that flushes
//!   denormals turns into zero; among the E8M0 scales that is byte 0, and byte 1 times the code
//!   0.5;
//! - the sign of a zero and the payload of a NaN.
//!
//! # NaN and infinity
//!
//! A NaN code or a NaN scale decodes to NaN, and only the values that it covers. A product beyond
//! the range of the output dtype is infinite. In a round trip, a NaN or infinite element comes out
//! unchanged and does not affect the scale of its block.

mod backend;
#[cfg(feature = "cube")]
mod launch;
mod reference;
mod weights;

use burn::backend::Dispatch;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Device, FloatDType, Int, Tensor};

use crate::OpError;
use crate::matmul::{self, INVARIANT_ROWS, MAX_GROUP, SmallMOptions, small_m_matmul_group};
use crate::roundtrip::SmallFloat;
use crate::roundtrip::reference::hadamard as transform;
use crate::validation::{expect_device, expect_float, expect_shape, expect_supported, invalid};

pub use crate::gemm::{FP8_BLOCK, Fp4Layout, repack_fp4};
pub(crate) use backend::{PackedWeights, QuantOps};
pub use weights::{Activations, Weights};
use weights::{check_fp4, check_fp8};

/// Columns that share one FP4 weight scale.
pub const FP4_BLOCK: usize = 32;

/// Decodes an FP8 matrix.
///
/// - `words`: `u32` `[rows, ceil(columns / 4)]`
/// - `scales`: `f32` `[ceil(rows / 128), ceil(columns / 128)]`
/// - returns `[rows, columns]` in `dtype`. The product is made in `f32` and cast; with power-of-two
///   scales that is exact for `F32`, and for `BF16` and `F16` inside their normal range.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, and for a `dtype` that the device
/// does not compute in.
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
    let shape = check_fp8(&words, &scales, columns, 1)?;
    if shape.contains(&0) {
        return empty(shape, &words.device(), dtype);
    }
    let weights = Weights::fp8(words.unsqueeze(), scales.unsqueeze(), columns, 1)?;
    Ok(weights.dequantize(dtype)?.squeeze_dim(0))
}

/// Decodes a batch of FP8 matrices, one for each expert, laid out as [`Weights::fp8`] says:
/// `[batch, rows, columns]` in `dtype`.
///
/// # Errors
///
/// As [`dequantize_fp8`]; [`OpError::InvalidValue`] where `parts` is zero or does not divide
/// `rows`.
///
/// # Example
///
/// One matrix of two parts (a gate and an up row), each of which has a scale of its own.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
/// use burn_ds4_ops::quant::dequantize_fp8_batched;
///
/// let device = Device::flex();
/// // 0x38 is 1.0 and 0xc0 is -2.0.
/// let words = TensorData::new(vec![0xc038_u32; 2], [1, 2, 1]);
/// let words = Tensor::<3, Int>::from_data(words, (&device, DType::U32));
/// let scales = Tensor::<3>::from_data([[[0.5], [2.0]]], (&device, DType::F32));
/// let weights = dequantize_fp8_batched(words, scales, 2, 2, FloatDType::F32)?;
/// weights.into_data().assert_eq(&TensorData::from([[[0.5_f32, -1.0], [2.0, -4.0]]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn dequantize_fp8_batched(
    words: Tensor<3, Int>,
    scales: Tensor<3>,
    columns: usize,
    parts: usize,
    dtype: FloatDType,
) -> Result<Tensor<3>, OpError> {
    Weights::fp8(words, scales, columns, parts)?.dequantize(dtype)
}

/// Decodes an FP4 matrix.
///
/// - `words`: `u32` `[rows, ceil(columns / 8)]`
/// - `scales`: `u32` `[ceil(rows * ceil(columns / 32) / 4)]`, the E8M0 bytes `[rows, ceil(columns /
///   32)]` in row-major order
/// - returns `[rows, columns]` in `dtype`. Exact for `F32`, and for `BF16` and `F16` inside their
///   normal range.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, and for a `dtype` that the device
/// does not compute in.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
/// use burn_ds4_ops::quant::dequantize_fp4;
///
/// let device = Device::flex();
/// // 2 is 1.0, 7 is 6.0, 0xa is -1.0; 128 is the scale 2.0.
/// let words = TensorData::new(vec![0xa72_u32], [1, 1]);
/// let words = Tensor::<2, Int>::from_data(words, (&device, DType::U32));
/// let scales = TensorData::new(vec![128_u32], [1]);
/// let scales = Tensor::<1, Int>::from_data(scales, (&device, DType::U32));
/// let weight = dequantize_fp4(words, scales, 3, FloatDType::F32)?;
/// weight.into_data().assert_eq(&TensorData::from([[2.0_f32, 12.0, -2.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn dequantize_fp4(
    words: Tensor<2, Int>,
    scales: Tensor<1, Int>,
    columns: usize,
    dtype: FloatDType,
) -> Result<Tensor<2>, OpError> {
    let shape = check_fp4(&words, &scales, columns)?;
    if shape.contains(&0) {
        return empty(shape, &words.device(), dtype);
    }
    let weights = Weights::fp4(
        words.unsqueeze(),
        scales.unsqueeze(),
        columns,
        Fp4Layout::Plain,
    )?;
    Ok(weights.dequantize(dtype)?.squeeze_dim(0))
}

/// Decodes a batch of FP4 matrices, one for each expert, laid out as [`Weights::fp4`] says:
/// `[batch, rows, columns]` in `dtype`.
///
/// # Errors
///
/// As [`dequantize_fp4`].
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
/// use burn_ds4_ops::quant::dequantize_fp4_batched;
///
/// let device = Device::flex();
/// // Two matrices of one row: 2 is 1.0, 7 is 6.0 and 0xa is -1.0.
/// let words = TensorData::new(vec![0xa72_u32; 2], [2, 1, 1]);
/// let words = Tensor::<3, Int>::from_data(words, (&device, DType::U32));
/// // 127 is the scale 1.0, 128 is 2.0; the other bytes of a word count for nothing.
/// let scales = TensorData::new(vec![127_u32, 128], [2, 1]);
/// let scales = Tensor::<2, Int>::from_data(scales, (&device, DType::U32));
/// let weights = dequantize_fp4_batched(words, scales, 3, FloatDType::F32)?;
/// let expected = TensorData::from([[[1.0_f32, 6.0, -1.0]], [[2.0, 12.0, -2.0]]]);
/// weights.into_data().assert_eq(&expected, true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn dequantize_fp4_batched(
    words: Tensor<3, Int>,
    scales: Tensor<2, Int>,
    columns: usize,
    dtype: FloatDType,
) -> Result<Tensor<3>, OpError> {
    Weights::fp4(words, scales, columns, Fp4Layout::Plain)?.dequantize(dtype)
}

/// Multiplies by one dense or packed matrix: `x · weightsᵀ` over the last dimension of `x`.
///
/// # Shapes and dtypes
///
/// - `x`: `[.., in]`, `F32`, `F16` or `BF16`
/// - `weights`: one matrix, `[1, out, in]`; exact in the kernels, and without a kernel rounded to
///   the dtype of `x`
/// - output: `[.., out]` in the dtype of `x`, sums in `f32`. Without columns, zeros.
///
/// [`Weights::with_activations`] says whether `x` is rounded first.
///
/// # Special values
///
/// A NaN or an infinity in `x` affects its own row only; one in a row of the weight, its own column
/// of the output. As for [`expert_ffn`](crate::moe::expert_ffn), magnitudes near the end of the f32
/// range may overflow to infinity in between, and where the hardware decodes FP8, numbers of `x`
/// far below the largest of their block may count as zero.
///
/// # Kernels
///
/// As for [`expert_ffn`](crate::moe::expert_ffn); up to 16 rows, a row's result has the same bits
/// whatever other rows there are.
///
/// # Errors
///
/// [`OpError`] where `x` has another dtype, or `weights` are not one matrix with as many columns as
/// `x`, or are on another device.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::quant::{Weights, quant_linear};
///
/// let device = Device::flex();
/// // A matrix of floats; `Weights::fp8` and `Weights::fp4` take codes and scales.
/// let values = Tensor::<3>::from_data([[[1.0, 2.0], [0.0, -1.0], [0.5, 0.5]]], &device);
/// let x = Tensor::<2>::from_data([[2.0, 4.0]], &device);
/// let y = quant_linear(x, &Weights::dense(values)?)?;
/// y.into_data().assert_eq(&TensorData::from([[10.0_f32, -4.0, 3.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "w8a16")]
#[doc(alias = "w4a16")]
pub fn quant_linear<const D: usize>(x: Tensor<D>, weights: &Weights) -> Result<Tensor<D>, OpError> {
    expect_float("x", &x)?;
    let [count, _, _] = weights.dims();
    if count != 1 {
        return Err(invalid("number of matrices in weights", "1", count));
    }
    multiply::<D, 2>(x, weights, Dispatch::quant_linear)
}

/// Multiplies one `x` by two matrices: the results of [`quant_linear`] for each, with the same
/// bits.
///
/// # Shapes and dtypes
///
/// - `x`: `[.., in]`, `F32`, `F16` or `BF16`
/// - `weights`: one matrix each, `[1, out, in]`, each with its own `out` and format
/// - output: `[.., out]` for each, in the dtype of `x`
///
/// # Kernels
///
/// Up to 16 rows by two FP8 or two FP4 matrices are one launch wherever tensor cores multiply by
/// either: some of its cubes have the rows of one matrix, the rest those of the other. Everything
/// else is [`quant_linear`] twice.
///
/// # Errors
///
/// [`OpError`] where `x` has another dtype, or one of `weights`, named by its index, is not one
/// matrix with as many columns as `x`, or is on another device.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::quant::{Weights, quant_linear_pair};
///
/// let device = Device::flex();
/// let matrix = |rows| Weights::dense(Tensor::<3>::ones([1, rows, 2], &device));
/// let (first, second) = (matrix(1)?, matrix(2)?);
/// let x = Tensor::<2>::from_data([[1.0, 2.0]], &device);
/// let [y, z] = quant_linear_pair(x, [&first, &second])?;
/// y.into_data().assert_eq(&TensorData::from([[3.0_f32]]), true);
/// z.into_data().assert_eq(&TensorData::from([[3.0_f32, 3.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn quant_linear_pair<const D: usize>(
    x: Tensor<D>,
    weights: [&Weights; 2],
) -> Result<[Tensor<D>; 2], OpError> {
    check_pair(&x, weights)?;
    let shape = x.dims();
    let [first, second] = weights;
    if !are_pair(weights) || shape.contains(&0) {
        return Ok([quant_linear(x.clone(), first)?, quant_linear(x, second)?]);
    }
    let products = Dispatch::quant_linear_pair(
        matmul::into_rows(x),
        first.clone().into(),
        second.clone().into(),
        first.activations(),
    );
    let products = <[_; 2]>::from(products);
    Ok(products.map(|product| matmul::of_shape(product, shape)))
}

/// [`quant_linear_pair`] and, by the same `x`, [`small_m_matmul_group`]: the results of both, with
/// the same bits. A decode step multiplies the input of a layer's attention by the two packed
/// matrices of queries and keys and by the dense ones of its compressors.
///
/// # Shapes and dtypes
///
/// - `x`: `[.., in]`, `F32`, `F16` or `BF16`
/// - `weights`: one matrix each, `[1, out, in]`, each with its own `out` and format
/// - `dense`: any number of `[out, in]`, `F32`, `F16` or `BF16`, each with its own `out`; `options`
///   are those of the products with them
/// - output: `[.., out]` for each of `weights`, in the dtype of `x`, and for each of `dense`, in
///   the dtype of `x` or in `F32`
///
/// Rounded [`Activations`] concern the products with `weights` alone.
///
/// # Kernels
///
/// Up to 8 rows by two FP8 or two FP4 matrices of one layout and up to five dense ones of one
/// 16-bit dtype are one launch, wherever tensor cores multiply by both kinds, shared memory is
/// large enough, and both need cubes of as many planes: those of 4096 columns do, those of 7168 do
/// not. Some of its cubes have the pair, the rest have the dense matrices. Everything else, and
/// rounded activations, are the two functions one after the other.
///
/// # Errors
///
/// As [`quant_linear_pair`] for `x` and `weights`, and as [`small_m_matmul_group`] for `dense` and
/// `options`.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::matmul::SmallMOptions;
/// use burn_ds4_ops::quant::{Weights, quant_linear_group};
///
/// let device = Device::flex();
/// let matrix = |rows| Weights::dense(Tensor::<3>::ones([1, rows, 2], &device));
/// let (first, second) = (matrix(1)?, matrix(2)?);
/// let dense = [Tensor::<2>::from_data([[0.5, 0.0]], &device)];
/// let x = Tensor::<2>::from_data([[1.0, 2.0]], &device);
/// let options = SmallMOptions::default();
/// let ([y, _], products) = quant_linear_group(x, [&first, &second], &dense, options)?;
/// y.into_data().assert_eq(&TensorData::from([[3.0_f32]]), true);
/// products[0].to_data().assert_eq(&TensorData::from([[0.5_f32]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn quant_linear_group<const D: usize>(
    x: Tensor<D>,
    weights: [&Weights; 2],
    dense: &[Tensor<2>],
    options: SmallMOptions,
) -> Result<([Tensor<D>; 2], Vec<Tensor<D>>), OpError> {
    check_pair(&x, weights)?;
    matmul::check(&x, ("dense", dense), options)?;
    let shape = x.dims();
    let rows: usize = shape[..D - 1].iter().product();
    let are_group = (1..=MAX_GROUP).contains(&dense.len())
        && dense.iter().all(|weight| weight.dims()[0] > 0)
        && dense
            .iter()
            .all(|weight| weight.dtype() == dense[0].dtype());
    if !are_pair(weights) || !are_group || shape.contains(&0) || rows > INVARIANT_ROWS {
        let products = small_m_matmul_group(x.clone(), dense, options)?;
        return Ok((quant_linear_pair(x, weights)?, products));
    }
    let [first, second] = weights;
    let dtype = matmul::output_dtype(&x, options);
    let products = Dispatch::quant_linear_group(
        matmul::into_rows(x),
        first.clone().into(),
        second.clone().into(),
        matmul::tensor_group(dense),
        first.activations(),
        dtype.into(),
    );
    let pair = [products.first, products.second];
    let pair = pair.map(|product| matmul::of_shape(product, shape));
    Ok((pair, matmul::group_products(products.dense, shape)))
}

fn check_pair<const D: usize>(x: &Tensor<D>, weights: [&Weights; 2]) -> Result<(), OpError> {
    expect_float("x", x)?;
    for (argument, weights) in ["weights[0]", "weights[1]"].into_iter().zip(weights) {
        let [_, out, _] = weights.dims();
        expect_shape(argument, weights.dims(), [1, out, x.dims()[D - 1]])?;
        expect_device(argument, &weights.device(), "x", &x.device())?;
    }
    Ok(())
}

/// Whether backends take both at once.
fn are_pair([first, second]: [&Weights; 2]) -> bool {
    let have_rows = |weights: &Weights| weights.dims()[1] > 0;
    first.activations() == second.activations() && have_rows(first) && have_rows(second)
}

/// Multiplies several groups of channels, each by its own matrix: `y[.., g, :] = x[.., g, :] ·
/// weights[g]ᵀ`.
///
/// # Shapes and dtypes
///
/// - `x`: `[.., groups, in]`, `F32`, `F16` or `BF16`; at least two dimensions
/// - `weights`: `[groups, out, in]`
/// - output: `[.., groups, out]` in the dtype of `x`, sums in `f32`. Without columns, zeros.
///
/// Special values and kernels are those of [`quant_linear`]: up to 16 tokens, a token's result has
/// the same bits whatever other tokens there are.
///
/// # Errors
///
/// [`OpError`] where `x` has another dtype, or `weights` are not as many matrices as there are
/// groups, with as many columns as `x`, or are on another device.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::quant::{Weights, grouped_linear};
///
/// let device = Device::flex();
/// let matrices = Tensor::<3>::from_data([[[1.0, 1.0]], [[1.0, -1.0]]], &device);
/// let x = Tensor::<3>::from_data([[[1.0, 2.0], [3.0, 4.0]]], &device);
/// let y = grouped_linear(x, &Weights::dense(matrices)?)?;
/// y.into_data().assert_eq(&TensorData::from([[[3.0_f32], [-1.0]]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn grouped_linear<const D: usize>(
    x: Tensor<D>,
    weights: &Weights,
) -> Result<Tensor<D>, OpError> {
    const { assert!(D >= 2, "x must have a dimension of groups") };
    expect_float("x", &x)?;
    multiply::<D, 3>(x, weights, Dispatch::grouped_linear)
}

/// Multiplies by a linear map of backends, whose `x` is `[rows, in]` or `[tokens, groups, in]`.
fn multiply<const D: usize, const N: usize>(
    x: Tensor<D>,
    weights: &Weights,
    map: fn(FloatTensor<Dispatch>, PackedWeights<Dispatch>, Activations) -> FloatTensor<Dispatch>,
) -> Result<Tensor<D>, OpError> {
    let [groups, out, columns] = weights.dims();
    let mut shape = x.dims();
    if N == 3 {
        shape[D - 2] = groups;
    }
    shape[D - 1] = columns;
    expect_shape("x", x.dims(), shape)?;
    expect_device("weights", &weights.device(), "x", &x.device())?;
    let mut rows = [columns; N];
    let (outer, inner) = shape.split_at(D + 1 - N);
    rows[0] = outer.iter().product();
    rows[1..].copy_from_slice(inner);
    shape[D - 1] = out;
    if columns == 0 || shape.contains(&0) {
        return Ok(Tensor::zeros(shape, (&x.device(), x.dtype())));
    }
    let x: Tensor<N> = x.reshape(rows);
    let y = map(
        x.into_dispatch(),
        weights.clone().into(),
        weights.activations(),
    );
    Ok(Tensor::<N>::from_dispatch(y).reshape(shape))
}

/// Rounds to FP8 and back: what a value becomes in an FP8 cache, or as the input of an FP8 matrix
/// product.
///
/// For each `block` elements of the last dimension (the last block may be partial), `s =
/// 2^ceil(log2(max(amax, 1e-4) / 448))` and `x` becomes `e4m3(x / s) * s`, rounded to the nearest
/// E4M3 value, ties to the even code, subnormals included. The reference uses blocks of 64 for
/// cache rows and 128 for the inputs of matrix products.
///
/// `x` is `F32`, `F16` or `BF16`; the rounding is done in `f32`, the result has the dtype and shape
/// of `x`. Magnitudes above `448 * 2^119` may round to infinity, as in any `f32` arithmetic.
///
/// # Errors
///
/// [`OpError::DtypeMismatch`] for another dtype, [`OpError::InvalidValue`] for a `block` of zero.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::quant::fp8_roundtrip;
///
/// let x = Tensor::<2>::from_data([[1.0, 1.06, 0.5]], &Device::flex());
/// let rounded = fp8_roundtrip(x, 64)?;
/// rounded.into_data().assert_eq(&TensorData::from([[1.0_f32, 1.0, 0.5]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn fp8_roundtrip<const D: usize>(x: Tensor<D>, block: usize) -> Result<Tensor<D>, OpError> {
    roundtrip_blocks(x, block, SmallFloat::Fp8)
}

/// Rounds to FP4 and back: what an indexer channel becomes in an FP4 cache.
///
/// For each `block` elements of the last dimension (32 in the reference; the last block may be
/// partial), `s = 2^ceil(log2(max(amax, 6 * 2^-126) / 6))` and `x` becomes `e2m1(x / s) * s`,
/// rounded to the nearest E2M1 value, ties to the even code.
///
/// Dtypes and errors as [`fp8_roundtrip`].
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::quant::fp4_roundtrip;
///
/// // The scale is 1: 6 is the largest value, and 2.5 is a tie between 2 and 3.
/// let x = Tensor::<2>::from_data([[6.0, 2.5, 0.7, -5.5]], &Device::flex());
/// let rounded = fp4_roundtrip(x, 32)?;
/// rounded.into_data().assert_eq(&TensorData::from([[6.0_f32, 2.0, 0.5, -6.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn fp4_roundtrip<const D: usize>(x: Tensor<D>, block: usize) -> Result<Tensor<D>, OpError> {
    roundtrip_blocks(x, block, SmallFloat::Fp4)
}

/// Walsh-Hadamard transform of the last dimension, in Sylvester order, times `n^-0.5`: orthonormal,
/// and its own inverse.
///
/// `x` is `F32`, `F16` or `BF16`; the sums are made in `f32`, in a fixed order, and the result has
/// the dtype and shape of `x`. A NaN or an infinity spreads over its row.
///
/// # Errors
///
/// [`OpError::DtypeMismatch`] for another dtype, [`OpError::InvalidValue`] where the last dimension
/// is no power of two.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::quant::hadamard;
///
/// let x = Tensor::<2>::from_data([[0.0, 2.0, 0.0, 0.0]], &Device::flex());
/// let y = hadamard(x)?;
/// y.into_data().assert_eq(&TensorData::from([[1.0_f32, -1.0, 1.0, -1.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn hadamard<const D: usize>(x: Tensor<D>) -> Result<Tensor<D>, OpError> {
    expect_float("x", &x)?;
    let (shape, dtype) = (x.dims(), x.dtype());
    let columns = shape[D - 1];
    if !columns.is_power_of_two() {
        return Err(invalid("last dimension of x", "a power of two", columns));
    }
    let rows = shape[..D - 1].iter().product();
    if rows == 0 {
        return Ok(x);
    }
    let x: Tensor<2> = x.cast(FloatDType::F32).reshape([rows, columns]);
    let transformed = transform::<Dispatch>(x.into_dispatch());
    Ok(Tensor::<2>::from_dispatch(transformed)
        .reshape(shape)
        .cast(FloatDType::from(dtype)))
}

/// An empty tensor, for shapes to which no dimension can be added: Burn takes a size of zero in a
/// new shape to mean the previous size.
fn empty<const D: usize>(
    shape: [usize; D],
    device: &Device,
    dtype: FloatDType,
) -> Result<Tensor<D>, OpError> {
    expect_supported(dtype, device)?;
    Ok(Tensor::empty(shape, (device, dtype.into())))
}

fn roundtrip_blocks<const D: usize>(
    x: Tensor<D>,
    block: usize,
    to: SmallFloat,
) -> Result<Tensor<D>, OpError> {
    expect_float("x", &x)?;
    if block == 0 {
        return Err(invalid("block", "at least 1", block));
    }
    let shape = x.dims();
    if shape.contains(&0) {
        return Ok(x);
    }
    let columns = shape[D - 1];
    let rows = shape[..D - 1].iter().product();
    let x: Tensor<2> = x.reshape([rows, columns]);
    let rounded = Dispatch::roundtrip(x.into_dispatch(), block, to);
    Ok(Tensor::<2>::from_dispatch(rounded).reshape(shape))
}
