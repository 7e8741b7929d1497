//! Linear maps by dense and packed weights.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::backend::QuantOps;
use super::weights::Weights;
use crate::OpError;
use crate::matmul::{self, INVARIANT_ROWS, MAX_LIST, SmallMOptions, small_m_matmul_group};
use crate::validation::{expect_device, expect_float, expect_shape, invalid};

/// Multiplies by one dense or packed matrix: `x · weightsᵀ` over the last dimension of `x`.
///
/// # Shapes and dtypes
///
/// - `x`: `[.., in]`, `F32`, `F16` or `BF16`
/// - `weights`: one matrix, `[1, out, in]`; exact in the kernels. Without a kernel, packed weights
///   are rounded to the dtype of `x`, and so are dense ones for more than 16 rows, but not on Flex.
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
    let shape = x.dims();
    multiply(x, weights, shape)
}

/// [`quant_linear_group`] without dense matrices: the results of [`quant_linear`] for each of two
/// matrices, with the same bits.
///
/// - `x`: `[.., in]`, `F32`, `F16` or `BF16`
/// - `weights`: one matrix each, `[1, out, in]`, each with its own `out` and format
/// - output: `[.., out]` for each, in the dtype of `x`
///
/// # Errors
///
/// As [`quant_linear_group`].
pub fn quant_linear_pair<const D: usize>(
    x: Tensor<D>,
    weights: [&Weights; 2],
) -> Result<[Tensor<D>; 2], OpError> {
    let (products, _) = quant_linear_group(x, weights, &[], SmallMOptions::default())?;
    Ok(products)
}

/// Multiplies one `x` by two matrices and any number of dense ones: the results of
/// [`quant_linear`] for each of the two and of [`small_m_matmul_group`], with the same bits. A
/// decode step multiplies the input of a layer's attention by the two packed matrices of queries
/// and keys and by the dense ones of its compressors.
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
/// Rounded [`Activations`](super::Activations) concern the products with `weights` alone.
///
/// # Kernels
///
/// Up to 16 rows by two FP8 or two FP4 matrices of one layout are one launch wherever tensor cores
/// multiply by either: some of its cubes have the rows of one matrix, the rest those of the other.
///
/// Up to 8 rows by both and up to five dense ones of one 16-bit dtype are one launch as well, if
/// shared memory is large enough, and both kinds need cubes of as many planes: those of 4096
/// columns do, those of 7168 do not. With rounded activations, and everywhere else, the pair and
/// the dense ones are launches of their own.
///
/// # Errors
///
/// [`OpError`] where `x` has another dtype, or one of `weights`, named by its index, is not one
/// matrix with as many columns as `x`, or is on another device; as [`small_m_matmul_group`] for
/// `dense` and `options`.
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
    expect_float("x", &x)?;
    let shape = x.dims();
    for (argument, weights) in ["weights[0]", "weights[1]"].into_iter().zip(weights) {
        let [_, out, _] = weights.dims();
        expect_shape(argument, weights.dims(), [1, out, shape[D - 1]])?;
        expect_device(argument, &weights.device(), "x", &x.device())?;
    }
    matmul::check(&x, ("dense", dense), options)?;
    let [first, second] = weights;
    let have_rows = weights.iter().all(|weights| weights.dims()[1] > 0);
    if first.activations() != second.activations() || !have_rows || shape.contains(&0) {
        let products = [
            quant_linear(x.clone(), first)?,
            quant_linear(x.clone(), second)?,
        ];
        return Ok((products, small_m_matmul_group(x, dense, options)?));
    }
    let fits = |weight: &Tensor<2>| weight.dims()[0] > 0 && weight.dtype() == dense[0].dtype();
    let rows: usize = shape[..D - 1].iter().product();
    let together = if dense.len() > MAX_LIST || rows > INVARIANT_ROWS || !dense.iter().all(fits) {
        &[]
    } else {
        dense
    };
    let apart = &dense[together.len()..];
    let products = Dispatch::quant_linear_group(
        matmul::into_rows(x.clone()),
        first.clone().into(),
        second.clone().into(),
        matmul::tensor_list(together),
        first.activations(),
        matmul::output_dtype(&x, options).into(),
    );
    let pair = [products.first, products.second];
    let pair = pair.map(|product| matmul::of_shape(product, shape));
    let mut of_dense = matmul::list_products(products.dense, shape);
    of_dense.extend(small_m_matmul_group(x, apart, options)?);
    Ok((pair, of_dense))
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
    let mut shape = x.dims();
    [shape[D - 2], _, _] = weights.dims();
    multiply(x, weights, shape)
}

/// Multiplies by the linear maps of groups, where all but the last number of `shape` are those that
/// `x` should have.
fn multiply<const D: usize>(
    x: Tensor<D>,
    weights: &Weights,
    mut shape: [usize; D],
) -> Result<Tensor<D>, OpError> {
    let [groups, out, columns] = weights.dims();
    shape[D - 1] = columns;
    expect_shape("x", x.dims(), shape)?;
    expect_device("weights", &weights.device(), "x", &x.device())?;
    let all: usize = shape.iter().product();
    shape[D - 1] = out;
    if all == 0 || out == 0 {
        return Ok(Tensor::zeros(shape, (&x.device(), x.dtype())));
    }
    let x: Tensor<3> = x.reshape([all / (groups * columns), groups, columns]);
    let y = Dispatch::grouped_linear(
        x.into_dispatch(),
        weights.clone().into(),
        weights.activations(),
    );
    Ok(Tensor::<3>::from_dispatch(y).reshape(shape))
}
