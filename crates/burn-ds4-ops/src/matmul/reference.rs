use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::FloatDType;

use super::MatmulOps;
use crate::dims::Dims;
use crate::reference::slice;

/// `x · weightᵀ` in f32, cast to `dtype`.
pub(super) fn small_m_matmul<B: MatmulOps>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    dtype: FloatDType,
    invariant_rows: usize,
) -> FloatTensor<B> {
    let [rows, _] = x.dims();
    let x = B::float_cast(x, FloatDType::F32);
    let weight = B::float_transpose(B::float_cast(weight, FloatDType::F32));
    let result = if rows > invariant_rows {
        B::precise_matmul(x, weight)
    } else {
        // A device's own product may order its sums by the number of rows.
        one_by_one::<B>(x, |row| B::precise_matmul(row, weight.clone()))
    };
    B::float_cast(result, dtype)
}

/// Applies `product` to each row of a matrix by itself.
pub(super) fn one_by_one<B: Backend>(
    lhs: FloatTensor<B>,
    product: impl Fn(FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let rows = 0..lhs.shape()[0];
    let products = rows.map(|row| product(slice::<B>(lhs.clone(), 0, row..row + 1)));
    B::float_cat(products.collect(), 0)
}
