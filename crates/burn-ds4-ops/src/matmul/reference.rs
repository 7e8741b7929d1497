use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};

use super::MatmulOps;
use super::backend::group_layout;
use crate::gemm::INVARIANT_ROWS;
use crate::reference::slice;

/// `x · weightᵀ` in f32, cast to `dtype`.
pub(super) fn small_m_matmul<B: MatmulOps>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    dtype: FloatDType,
    invariant_rows: usize,
) -> FloatTensor<B> {
    let [rows, _] = x.shape().dims();
    let x = B::float_cast(x, FloatDType::F32);
    let weight = B::float_transpose(B::float_cast(weight, FloatDType::F32));
    let product = if rows > invariant_rows {
        B::precise_matmul(x, weight)
    } else {
        // A device's own product may order its sums by the number of rows.
        one_by_one::<B>(x, |row| B::precise_matmul(row, weight.clone()))
    };
    B::float_cast(product, dtype)
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

/// The products with each of the weights, each followed by zeros up to the start of the next.
pub(super) fn small_m_matmul_group<B: MatmulOps>(
    x: FloatTensor<B>,
    weights: Vec<FloatTensor<B>>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let [rows, _] = x.shape().dims();
    let device = x.device();
    let (starts, length) = group_layout(rows, weights.iter().map(|weight| weight.shape()[0]));
    let ends = starts.iter().copied().skip(1).chain([length]);
    let mut parts = Vec::new();
    for ((weight, start), end) in weights.into_iter().zip(&starts).zip(ends) {
        let count = rows * weight.shape()[0];
        let product = B::small_m_matmul(x.clone(), weight, dtype, rows.max(INVARIANT_ROWS));
        parts.push(B::float_reshape(product, Shape::new([count])));
        let rest = end - start - count;
        if rest > 0 {
            parts.push(B::float_zeros(Shape::new([rest]), &device, dtype));
        }
    }
    B::float_cat(parts, 0)
}
