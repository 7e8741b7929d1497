//! The host side: which kernel, and how the work is divided.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use crate::gemm::launch::dense::{ListOutput, MatrixList};
use crate::gemm::launch::library::linear;
use crate::launching::output;

/// Rows of an f32 weight up to which the kernel for few rows of `x` is faster for any number of
/// them. The library's kernel for f32 does not split K: with few outputs, most of a GPU is idle.
const NARROW_HEIGHT: usize = 64;
/// Rows of `x` for which that kernel has cubes.
const MAX_NARROW_ROWS: usize = 1 << 19;

/// `x · weightᵀ` in `dtype`, row-invariant up to `invariant_rows`.
pub(super) fn small_m_matmul(
    x: CubeTensor,
    weight: CubeTensor,
    dtype: DType,
    invariant_rows: usize,
) -> CubeTensor {
    let [rows, _] = x.shape().dims();
    let [height, _] = weight.shape().dims();
    let group = MatrixList::of(&weight);
    let narrow = weight.dtype == DType::F32 && height <= NARROW_HEIGHT && rows <= MAX_NARROW_ROWS;
    if rows > invariant_rows && !narrow && !group.streams(&x) {
        return linear(x, weight, dtype);
    }
    let result = output(&x, [rows, height], dtype);
    group.launch(x, &result);
    result
}

/// The products of `x` with each of some weights of one dtype.
pub(super) fn small_m_matmul_group(
    x: CubeTensor,
    weights: &[CubeTensor],
    dtype: DType,
) -> Vec<CubeTensor> {
    let results = ListOutput::new(&x, weights, dtype);
    let group = MatrixList {
        weights,
        starts: &results.starts,
        picks: None,
    };
    group.launch(x, &results.all);
    results.into_products(weights)
}
