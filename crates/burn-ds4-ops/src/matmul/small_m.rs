//! Small-M products: products of so few rows that reading the weights is the bound.

use burn::backend::Dispatch;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, FloatDType, Tensor};

use super::MatmulOps;
use super::tensor_list::{MAX_LIST, TensorList};
use crate::OpError;
use crate::gemm::INVARIANT_ROWS;
use crate::validation::{expect_device, expect_float, expect_shape, invalid};

/// Largest [`SmallMOptions::invariant_rows`].
pub const MAX_INVARIANT_ROWS: usize = 64;

/// Options of [`small_m_matmul`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmallMOptions {
    /// Whether the result stays in f32, the dtype of the sums; otherwise it is rounded to the dtype
    /// of `x`.
    pub f32_output: bool,
    /// Rows up to which a row's result has the same bits whatever other rows there are:
    /// [`INVARIANT_ROWS`] to [`MAX_INVARIANT_ROWS`].
    ///
    /// With more rows, the fastest large-M product computes the result, whose sums may be in
    /// another order.
    pub invariant_rows: usize,
}

impl Default for SmallMOptions {
    fn default() -> Self {
        Self {
            f32_output: false,
            invariant_rows: INVARIANT_ROWS,
        }
    }
}

/// `x · weightᵀ` over the last dimension of `x`, for the small number of rows of a decode step: the
/// weight is read once for up to 16 of them.
///
/// Up to [`SmallMOptions::invariant_rows`] rows, row `i` of the result has the same bits as that
/// row alone: a draft of several tokens can be verified in one product without changing a token.
/// With more rows, the fastest large-M product computes the result; on NVIDIA GPUs, with 16-bit
/// weights, that is the same product up to 32 rows.
///
/// # Shapes and dtypes
///
/// - `x`: `[.., in]`, `F32`, `F16` or `BF16`
/// - `weight`: `[out, in]`, `F32`, `F16` or `BF16`, which may differ from that of `x`; neither is
///   rounded
/// - output: `[.., out]` in the dtype of `x`, or in `F32`; sums in f32. Without columns, zeros.
///
/// # Special values
///
/// A NaN or an infinity in `x` affects its own row only; one in a row of the weight, its own column
/// of the output. Where dtypes differ and one has 16 bits, the result may be NaN instead of
/// infinite, and magnitudes near the end of the f32 range may overflow to infinity in between.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, and for `invariant_rows` outside its
/// range.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::matmul::{SmallMOptions, small_m_matmul};
///
/// let device = Device::flex();
/// let x = Tensor::<2>::from_data([[2.0, 4.0], [1.0, 0.0]], &device);
/// let weight = Tensor::<2>::from_data([[1.0, 2.0], [0.0, -1.0]], &device);
/// let y = small_m_matmul(x, weight, SmallMOptions::default())?;
/// y.into_data().assert_eq(&TensorData::from([[10.0_f32, -4.0], [1.0, 0.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "gemv")]
pub fn small_m_matmul<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    options: SmallMOptions,
) -> Result<Tensor<D>, OpError> {
    let mut products = small_m_matmul_group(x, &[weight], options)?;
    Ok(products.remove(0))
}

/// [`small_m_matmul`] of one `x` by several weights: a result for each, with the same bits.
///
/// Up to [`SmallMOptions::invariant_rows`] rows, up to five weights of one dtype are one launch.
///
/// # Errors
///
/// As [`small_m_matmul`], for any of the weights.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::matmul::{SmallMOptions, small_m_matmul_group};
///
/// let device = Device::flex();
/// let x = Tensor::<2>::from_data([[2.0, 4.0]], &device);
/// let first = Tensor::<2>::from_data([[1.0, 2.0], [0.0, -1.0]], &device);
/// let second = Tensor::<2>::from_data([[0.5, 0.5]], &device);
/// let all = small_m_matmul_group(x, &[first, second], SmallMOptions::default())?;
/// all[0].to_data().assert_eq(&TensorData::from([[10.0_f32, -4.0]]), true);
/// all[1].to_data().assert_eq(&TensorData::from([[3.0_f32]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn small_m_matmul_group<const D: usize>(
    x: Tensor<D>,
    weights: &[Tensor<2>],
    options: SmallMOptions,
) -> Result<Vec<Tensor<D>>, OpError> {
    check(&x, ("weight", weights), options)?;
    let dtype = output_dtype(&x, options);
    let mut shape = x.dims();
    let columns = shape[D - 1];
    let empty = weights.iter().map(|weight| {
        shape[D - 1] = weight.dims()[0];
        let nothing = columns == 0 || shape.contains(&0);
        nothing.then(|| Tensor::zeros(shape, (&x.device(), dtype)))
    });
    let mut products: Vec<Option<Tensor<D>>> = empty.collect();
    for of in [DType::F32, DType::F16, DType::BF16] {
        let is_one = |at: &usize| products[*at].is_none() && weights[*at].dtype() == of;
        let all: Vec<usize> = (0..weights.len()).filter(is_one).collect();
        for some in all.chunks(MAX_LIST) {
            let list: Vec<_> = some.iter().map(|at| weights[*at].clone()).collect();
            let of_list = Dispatch::small_m_matmul(
                into_rows(x.clone()),
                tensor_list(&list),
                dtype.into(),
                options.invariant_rows,
            );
            for (at, product) in some.iter().zip(list_products(of_list, x.dims())) {
                products[*at] = Some(product);
            }
        }
    }
    Ok(products.into_iter().flatten().collect())
}

/// `x · weightᵀ` in `dtype` for the rows `[rows, in]` of `x`.
pub(crate) fn multiply_one<B: MatmulOps>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let weight = TensorList::new(vec![weight]);
    let products = B::small_m_matmul(x, weight, dtype, INVARIANT_ROWS);
    products.into_vec().remove(0)
}

/// Weights, at most [`MAX_LIST`], as backends take them.
pub(crate) fn tensor_list(weights: &[Tensor<2>]) -> TensorList<Dispatch> {
    let weights = weights.iter().cloned().map(Tensor::into_dispatch);
    TensorList::new(weights.collect())
}

/// The products with a group for an `x` of shape `shape`.
pub(crate) fn list_products<const D: usize>(
    products: TensorList<Dispatch>,
    shape: [usize; D],
) -> Vec<Tensor<D>> {
    let products = products.into_vec().into_iter();
    products.map(|product| of_shape(product, shape)).collect()
}

/// A product `[rows, out]` for an `x` of shape `shape`.
pub(crate) fn of_shape<const D: usize>(
    product: FloatTensor<Dispatch>,
    mut shape: [usize; D],
) -> Tensor<D> {
    let product = Tensor::<2>::from_dispatch(product);
    shape[D - 1] = product.dims()[1];
    product.reshape(shape)
}

/// The rows of `x`, as backends take them.
pub(crate) fn into_rows<const D: usize>(x: Tensor<D>) -> FloatTensor<Dispatch> {
    let shape = x.dims();
    let rows = shape[..D - 1].iter().product();
    x.reshape([rows, shape[D - 1]]).into_dispatch()
}

pub(crate) fn output_dtype<const D: usize>(x: &Tensor<D>, options: SmallMOptions) -> DType {
    if options.f32_output {
        DType::F32
    } else {
        x.dtype()
    }
}

pub(crate) fn check<const D: usize>(
    x: &Tensor<D>,
    (argument, weights): (&'static str, &[Tensor<2>]),
    options: SmallMOptions,
) -> Result<(), OpError> {
    expect_float("x", x)?;
    if !(INVARIANT_ROWS..=MAX_INVARIANT_ROWS).contains(&options.invariant_rows) {
        return Err(invalid(
            "invariant_rows",
            format!("{INVARIANT_ROWS} to {MAX_INVARIANT_ROWS}"),
            options.invariant_rows,
        ));
    }
    for weight in weights {
        expect_float(argument, weight)?;
        let [out, _] = weight.dims();
        expect_shape(argument, weight.dims(), [out, x.dims()[D - 1]])?;
        expect_device(argument, &weight.device(), "x", &x.device())?;
    }
    Ok(())
}
