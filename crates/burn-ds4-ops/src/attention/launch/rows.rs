//! Launches of what is done to rows: the rotary embedding, by given angles or by angles that the
//! kernel looks up, and pooling.

use super::tensors::{Positions, slot_strides};
use crate::attention::kernel::{
    GivenAnglesLaunch, PoolSizesLaunch, RotationSizesLaunch, RowAnglesLaunch, pool_kernel,
    rotate_kernel,
};
use crate::launching::prelude::*;

/// Vectors of a cube.
const ROTATE_UNITS: u32 = 128;
/// Channels of a cube that pools.
const POOL_UNITS: u32 = 64;

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
    let [known, rotated] = angles.dims();
    can_rotate_rows(x, rotated) && i32::try_from(known).is_ok() && is_wide_int(start.dtype)
}

/// Where the kernel finds angles.
pub(in crate::attention) enum Angles {
    /// Cosines and sines for each position.
    Given([CubeTensor; 2]),
    /// By position, in the table.
    At(Positions),
}

impl Angles {
    pub(in crate::attention) fn given(cos: CubeTensor, sin: CubeTensor) -> Self {
        Self::Given([cos, sin].map(into_contiguous))
    }

    pub(in crate::attention) fn at(table: CubeTensor, start: CubeTensor) -> Self {
        Self::At(Positions::new(table, start))
    }

    fn arg<I: Int>(self) -> RowAnglesLaunch<I> {
        match self {
            Self::Given([cos, sin]) => {
                let given = GivenAnglesLaunch::new(cos.into_buffer_arg(), sin.into_buffer_arg());
                RowAnglesLaunch::new(Some(given).into(), None.into())
            }
            Self::At(positions) => RowAnglesLaunch::new(None.into(), Some(positions.arg()).into()),
        }
    }
}

pub(in crate::attention) fn rotate(x: CubeTensor, angles: Angles, inverse: bool) -> CubeTensor {
    let (start_dtype, table, rotated) = match &angles {
        Angles::Given([cos, _]) => (DType::I32, cos, cos.shape()[2]),
        Angles::At(Positions { start, angles }) => (start.dtype, angles, angles.shape()[1]),
    };
    let size = vector(&x, rotated).expect("checked by can_rotate");
    let x = with_vectors(x, size);
    let client = x.client.clone();
    let shape: [usize; 4] = x.dims();
    let [batch, positions, heads, width] = shape;
    let vectors = width / size;
    let outputs = batch * positions * heads * vectors;
    let unrotated = (width - rotated) / size;
    let strides = slot_strides(&x, size);
    let result = output(&x, shape, x.dtype);
    let dtypes = [x.dtype, start_dtype].map(dtype_to_storage_type);
    let address = address_type([&x, &result, table]);
    // SAFETY: units past the last vector read and write nothing; positions past the table are read
    // as its last.
    unsafe {
        rotate_kernel::launch_unchecked(
            &client,
            cube_count(&client, outputs.div_ceil(ROTATE_UNITS as usize)),
            CubeDim::new_1d(ROTATE_UNITS),
            address,
            size,
            x.into_buffer_arg(),
            angles.arg(),
            result.clone().into_buffer_arg(),
            RotationSizesLaunch::new(outputs, positions, heads, vectors, unrotated, strides),
            inverse,
            dtypes,
        );
    }
    result
}

pub(in crate::attention) fn pool(values: CubeTensor, scores: CubeTensor) -> CubeTensor {
    let (values, scores) = (with_contiguous_rows(values), with_contiguous_rows(scores));
    let client = values.client.clone();
    let [batch, blocks, slots, width] = values.dims();
    let result = output(&values, [batch, blocks, width], values.dtype);
    let outputs = batch * blocks * width;
    let sizes = PoolSizesLaunch::new(
        outputs,
        blocks,
        slots as u32,
        width,
        slot_strides(&values, 1),
        slot_strides(&scores, 1),
    );
    let dtype = dtype_to_storage_type(values.dtype);
    // SAFETY: units past the last channel read and write nothing.
    unsafe {
        pool_kernel::launch_unchecked(
            &client,
            cube_count(&client, outputs.div_ceil(POOL_UNITS as usize)),
            CubeDim::new_1d(POOL_UNITS),
            address_type([&values, &scores]),
            values.into_buffer_arg(),
            scores.into_buffer_arg(),
            result.clone().into_buffer_arg(),
            sizes,
            Caps::of(&client).target,
            dtype,
        );
    }
    result
}
