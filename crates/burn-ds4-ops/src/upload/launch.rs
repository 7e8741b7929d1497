use super::Encoding;
use super::kernel::{any_not_finite_kernel, repack_fp4_kernel};
use crate::launching::prelude::*;

/// Units of a cube, at most.
const UNITS: u32 = 256;

/// A unit for each word.
fn dims(words: &CubeTensor) -> (CubeCount, CubeDim) {
    let units = UNITS.min(Caps::of(&words.client).cube_units);
    let cubes = words.shape().num_elements().div_ceil(units as usize);
    (cube_count(&words.client, cubes), CubeDim::new_1d(units))
}

pub(super) fn repack_fp4_words(words: CubeTensor) -> CubeTensor {
    let words = writable(into_contiguous(words));
    let (cubes, dim) = dims(&words);
    // SAFETY: units past the last word do nothing.
    unsafe {
        repack_fp4_kernel::launch_unchecked(
            &words.client,
            cubes,
            dim,
            address_type([&words]),
            words.clone().into_buffer_arg(),
            words.shape().num_elements(),
        );
    }
    words
}

pub(super) fn any_not_finite(words: CubeTensor, encoding: Encoding) -> CubeTensor {
    let words = into_contiguous(words);
    let (cubes, dim) = dims(&words);
    let count = words.shape().num_elements();
    let (bits, mask) = encoding.mask();
    let client = words.client.clone();
    let found = CubeTensor::new_contiguous(
        client.clone(),
        words.device.clone(),
        Shape::new([1]),
        client.create_from_slice(&[0; size_of::<i32>()]),
        DType::I32,
    );
    // SAFETY: units past the last word do nothing, and `found` has an element.
    unsafe {
        any_not_finite_kernel::launch_unchecked(
            &client,
            cubes,
            dim,
            address_type([&words]),
            words.into_buffer_arg(),
            count,
            found.clone().into_buffer_arg(),
            bits,
            mask,
        );
    }
    found
}
