//! Queries of tensors and devices that all families use on the host before they launch a kernel.

use crate::dims::Dims;
use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::{into_contiguous, slice};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::CubeCountSelection;

/// What launches use.
pub(crate) mod prelude {
    pub(crate) use burn::backend::TensorMetadata;
    pub(crate) use burn::backend::cubecl::dtype_to_storage_type;
    pub(crate) use burn::tensor::{DType, FloatDType, Shape};
    pub(crate) use burn_cubecl::CubeBackend;
    pub(crate) use burn_cubecl::kernel::into_contiguous;
    pub(crate) use burn_cubecl::tensor::CubeTensor;
    pub(crate) use cubecl::client::Client;
    pub(crate) use cubecl::prelude::*;

    pub(crate) use super::{
        MAX_CUBES, address_type, cube_count, fits_i32, is_float, is_wide_int, output,
        row_vector_size, vector_size, with_contiguous_rows, with_vectors, writable,
    };
    pub(crate) use crate::caps::Caps;
    pub(crate) use crate::dims::Dims;
}

/// The most cubes in a dimension that every device allows.
pub(crate) const MAX_CUBES: usize = 65_535;

/// Whether kernels read this float dtype.
pub(crate) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Whether this integer dtype holds the number of rows or columns of any tensor. Indices are
/// clamped to that number.
pub(crate) fn is_wide_int(dtype: DType) -> bool {
    matches!(dtype, DType::I32 | DType::I64 | DType::U32 | DType::U64)
}

/// Whether the number exists and fits an `i32`.
pub(crate) fn fits_i32(number: Option<usize>) -> bool {
    number.is_some_and(|number| i32::try_from(number).is_ok())
}

/// Returns a tensor whose rows are contiguous, wherever they start.
pub(crate) fn with_contiguous_rows(tensor: CubeTensor) -> CubeTensor {
    if tensor.meta.is_tiled() || tensor.meta.strides().last() != Some(&1) {
        into_contiguous(tensor)
    } else {
        tensor
    }
}

/// Returns a tensor that a kernel may write to: the tensor itself if nobody else holds it, or else
/// a copy.
pub(crate) fn writable(tensor: CubeTensor) -> CubeTensor {
    if tensor.can_mut() && tensor.is_nonoverlapping() {
        tensor
    } else {
        tensor.copy()
    }
}

/// The widest vector, of at most 16 bytes and `most` elements, that divides the contiguous rows of
/// a tensor and all distances between them.
pub(crate) fn vector_size(tensor: &CubeTensor, most: usize) -> usize {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let columns = shape.last().copied().unwrap_or(1);
    let divides = |size: &usize| {
        let (_, outer) = strides.split_last().expect("a dimension at least");
        columns.is_multiple_of(*size) && outer.iter().all(|stride| stride.is_multiple_of(*size))
    };
    let sizes = tensor.client.io_optimized_vector_sizes(tensor.elem_size());
    let sizes = sizes.filter(|size| *size <= most);
    sizes.filter(divides).max().unwrap_or(1)
}

/// The widest vector, of at most 16 bytes, that divides rows of `columns` columns in all of some
/// tensors, wherever the rows start.
pub(crate) fn row_vector_size<const N: usize>(tensors: [&CubeTensor; N], columns: usize) -> usize {
    let widest = tensors.map(|tensor| {
        let sizes = tensor.client.io_optimized_vector_sizes(tensor.elem_size());
        let sizes = sizes.filter(|size| columns.is_multiple_of(*size));
        sizes.max().unwrap_or(1)
    });
    widest.into_iter().min().unwrap_or(1)
}

/// Returns a tensor whose rows kernels can read in vectors of `size`. Copies it if rows do not
/// start at multiples of such vectors.
pub(crate) fn with_vectors(tensor: CubeTensor, size: usize) -> CubeTensor {
    let tensor = with_contiguous_rows(tensor);
    if vector_size(&tensor, usize::MAX) < size {
        into_contiguous(tensor)
    } else {
        tensor
    }
}

/// Returns a matrix whose rows kernels for tensor cores can read 16 bytes at a time.
pub(crate) fn aligned(matrix: CubeTensor) -> CubeTensor {
    let size = 16 / matrix.elem_size();
    with_vectors(matrix, size)
}

/// Some rows of a matrix.
pub(crate) fn narrow(matrix: &CubeTensor, first: usize, count: usize) -> CubeTensor {
    let [rows, columns] = matrix.dims();
    if count == rows {
        return matrix.clone();
    }
    slice(matrix.clone(), &[first..first + count, 0..columns])
}

/// A view of neighbouring elements of a contiguous tensor, from `first` on. Only for devices that
/// bind any address, which those with tensor cores do.
pub(crate) fn elements_view<const D: usize>(
    tensor: &CubeTensor,
    first: usize,
    shape: [usize; D],
) -> CubeTensor {
    let bytes = |elements: usize| (elements * tensor.elem_size()) as u64;
    let handle = tensor.handle.clone();
    let shape = Shape::from(shape);
    let after = tensor.shape().num_elements() - first - shape.num_elements();
    CubeTensor::new_contiguous(
        tensor.client.clone(),
        tensor.device.clone(),
        shape,
        handle.offset_start(bytes(first)).offset_end(bytes(after)),
        tensor.dtype,
    )
}

/// A new contiguous tensor, as kernels write it. An allocation by Burn itself may have gaps between
/// the rows.
pub(crate) fn output<const D: usize>(
    like: &CubeTensor,
    shape: [usize; D],
    dtype: DType,
) -> CubeTensor {
    empty_device_contiguous_dtype(
        like.client.clone(),
        like.device.clone(),
        Shape::new(shape),
        dtype,
    )
}

/// At least `cubes` cubes, in as many dimensions as needed.
pub(crate) fn cube_count(client: &Client, cubes: usize) -> CubeCount {
    CubeCountSelection::new(client, cubes as u32).cube_count()
}

/// The address type for offsets into the largest of the tensors.
pub(crate) fn address_type<const N: usize>(tensors: [&CubeTensor; N]) -> AddressType {
    let types = tensors.map(CubeTensor::required_address_type);
    types.into_iter().max().unwrap_or_default()
}
