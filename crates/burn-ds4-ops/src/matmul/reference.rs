use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::FloatDType;

use super::MatmulOps;
use super::small_m::INVARIANT_ROWS;

/// `x · weightᵀ` in f32, cast to `dtype`.
pub(super) fn small_m_matmul<B: MatmulOps>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    dtype: FloatDType,
    invariant_rows: usize,
) -> FloatTensor<B> {
    let [rows, columns] = x.shape().dims();
    let x = B::float_cast(x, FloatDType::F32);
    let weight = B::float_transpose(B::float_cast(weight, FloatDType::F32));
    let product = if rows <= INVARIANT_ROWS || rows > invariant_rows {
        B::precise_matmul(x, weight)
    } else {
        let firsts = (0..rows).step_by(INVARIANT_ROWS);
        let products = firsts.map(|first| {
            let last = rows.min(first + INVARIANT_ROWS);
            let some = [(first..last).into(), (0..columns).into()];
            B::precise_matmul(B::float_slice(x.clone(), &some), weight.clone())
        });
        B::float_cat(products.collect(), 0)
    };
    B::float_cast(product, dtype)
}
