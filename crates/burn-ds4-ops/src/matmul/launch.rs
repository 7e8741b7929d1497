//! The host side: which kernel, and how the work is divided.

use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use super::TensorList;
use crate::dims::Dims;
use crate::gemm::launch::dense::{ListOutput, MatrixList};
use crate::gemm::launch::library::linear;
use crate::launching::output;

/// Rows of an f32 weight up to which the kernel for few rows of `x` is faster for any number of
/// them. The library's kernel for f32 does not split K: with few outputs, most of a GPU is idle.
const NARROW_HEIGHT: usize = 64;
/// Rows of `x` for which that kernel has cubes.
const MAX_NARROW_ROWS: usize = 1 << 19;

/// `x · weightᵀ` in `dtype` for each of some weights of one dtype, row-invariant up to
/// `invariant_rows`.
pub(super) fn small_m_matmul(
    x: CubeTensor,
    weights: TensorList<CubeBackend>,
    dtype: DType,
    invariant_rows: usize,
) -> TensorList<CubeBackend> {
    let [rows, _] = x.dims();
    let list = weights.clone().into_vec();
    if list.len() < 2 || rows > invariant_rows {
        return weights.map(|weight| product(x.clone(), weight, dtype, invariant_rows));
    }
    let results = ListOutput::new(&x, &list, dtype);
    results.list(&list).launch(x, &results.all);
    results.into_products(&list)
}

fn product(x: CubeTensor, weight: CubeTensor, dtype: DType, invariant_rows: usize) -> CubeTensor {
    let ([rows, _], [height, _]) = (x.dims(), weight.dims());
    let list = MatrixList::of(&weight);
    let narrow = weight.dtype == DType::F32 && height <= NARROW_HEIGHT && rows <= MAX_NARROW_ROWS;
    if rows > invariant_rows && !narrow && !list.streams(&x) {
        return linear(x, weight, dtype);
    }
    let result = output(&x, [rows, height], dtype);
    list.launch(x, &result);
    result
}
