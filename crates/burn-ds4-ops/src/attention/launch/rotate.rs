//! Launches of the rotary position embedding, by given angles or by angles that the kernel looks
//! up.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::angle_table;
use crate::attention::kernel::{SlotStridesLaunch, rotate_at_kernel, rotate_kernel};
use crate::launching::{
    address_type, cube_count, is_float, is_wide_int, output, with_contiguous_rows, with_vectors,
};

/// Vectors of a cube.
const ROTATE_UNITS: u32 = 128;

/// The number of elements of the widest vector, of two at least, that divides both the channels
/// that are rotated and the others.
fn vector(x: &CubeTensor, rotated: usize) -> Option<usize> {
    let width = x.shape()[3];
    let sizes = x.client.io_optimized_vector_sizes(x.elem_size());
    let divides = |size: &usize| width.is_multiple_of(*size) && rotated.is_multiple_of(*size);
    sizes.filter(divides).max().filter(|&size| size > 1)
}

fn can_rotate_rows(x: &CubeTensor, rotated: usize) -> bool {
    is_float(x.dtype)
        && u32::try_from(x.shape().num_elements()).is_ok()
        && vector(x, rotated).is_some()
}

pub(in crate::attention) fn can_rotate(x: &CubeTensor, cos: &CubeTensor) -> bool {
    can_rotate_rows(x, cos.shape()[2])
}

pub(in crate::attention) fn can_rotate_at(
    x: &CubeTensor,
    angles: &CubeTensor,
    start: &CubeTensor,
) -> bool {
    let [known, rotated] = angles.shape().dims();
    can_rotate_rows(x, rotated) && i32::try_from(known).is_ok() && is_wide_int(start.dtype)
}

/// Rows as both kernels read and write them.
struct RotationRows {
    x: CubeTensor,
    result: CubeTensor,
    /// Elements of a vector, vectors of a row, and the number of those in front that are not
    /// rotated.
    size: usize,
    vectors: usize,
    unrotated: usize,
}

impl RotationRows {
    fn new(x: CubeTensor, rotated: usize) -> Self {
        let size = vector(&x, rotated).expect("checked by can_rotate");
        let x = with_vectors(x, size);
        let shape: [usize; 4] = x.shape().dims();
        let width = shape[3];
        Self {
            result: output(&x, shape, x.dtype),
            x,
            size,
            vectors: width / size,
            unrotated: (width - rotated) / size,
        }
    }

    fn outputs(&self) -> usize {
        let [batch, positions, heads, _] = self.x.shape().dims();
        batch * positions * heads * self.vectors
    }

    fn cubes(&self) -> CubeCount {
        cube_count(
            &self.x.client,
            self.outputs().div_ceil(ROTATE_UNITS as usize),
        )
    }

    fn strides(&self) -> SlotStridesLaunch {
        let strides = self.x.meta.strides();
        let [sequence, position, head] = [0, 1, 2].map(|axis| strides[axis] / self.size);
        SlotStridesLaunch::new(sequence, position, head)
    }
}

pub(in crate::attention) fn rotate(x: CubeTensor, cos: CubeTensor, sin: CubeTensor) -> CubeTensor {
    let [_, positions, heads, _] = x.shape().dims();
    let rows = RotationRows::new(x, cos.shape()[2]);
    let (cubes, outputs, strides) = (rows.cubes(), rows.outputs(), rows.strides());
    let client = rows.x.client.clone();
    let dtype = dtype_to_storage_type(rows.x.dtype);
    // SAFETY: units past the last vector read and write nothing.
    unsafe {
        rotate_kernel::launch_unchecked(
            &client,
            cubes,
            CubeDim::new_1d(ROTATE_UNITS),
            address_type([&rows.x, &rows.result]),
            rows.size,
            rows.x.into_buffer_arg(),
            into_contiguous(cos).into_buffer_arg(),
            into_contiguous(sin).into_buffer_arg(),
            rows.result.clone().into_buffer_arg(),
            outputs,
            positions,
            heads,
            rows.vectors,
            rows.unrotated,
            strides,
            dtype,
        );
    }
    rows.result
}

pub(in crate::attention) fn rotate_at(
    x: CubeTensor,
    angles: CubeTensor,
    start: CubeTensor,
    inverse: bool,
) -> CubeTensor {
    let [_, positions, heads, _] = x.shape().dims();
    let [_, rotated] = angles.shape().dims();
    // A table that has grown may have gaps between its rows, and is too large to copy.
    let angles = with_contiguous_rows(angles);
    let rows = RotationRows::new(x, rotated);
    let (cubes, outputs, strides) = (rows.cubes(), rows.outputs(), rows.strides());
    let client = rows.x.client.clone();
    let table = angle_table(&angles);
    let dtypes = [rows.x.dtype, start.dtype].map(dtype_to_storage_type);
    // SAFETY: units past the last vector read and write nothing; positions past the table are read
    // as its last.
    unsafe {
        rotate_at_kernel::launch_unchecked(
            &client,
            cubes,
            CubeDim::new_1d(ROTATE_UNITS),
            address_type([&rows.x, &rows.result, &angles]),
            rows.size,
            rows.x.into_buffer_arg(),
            angles.into_buffer_arg(),
            into_contiguous(start).into_buffer_arg(),
            rows.result.clone().into_buffer_arg(),
            outputs,
            positions,
            heads,
            rows.vectors,
            rows.unrotated,
            strides,
            table,
            inverse,
            dtypes,
        );
    }
    rows.result
}
