//! Reads of device memory whose order is that of the code.

use cubecl::prelude::*;

use crate::caps::Target;

/// Element `index` of a slice in device memory. With PTX, such reads are requested in the order of
/// the code. If what is requested last is used first, all of them are on their way together, while
/// the assembler may put other reads behind the use of earlier ones. Elements have 4 or 8 bytes.
/// Reads are relaxed at the scope of the cube, so that the first-level cache may answer; volatile
/// ones keep their order, too, but go to the second-level cache.
#[cube]
pub(crate) fn read_ordered<E: CubePrimitive>(
    slice: &[E],
    index: usize,
    #[comptime] target: Target,
) -> E {
    let bytes = E::size();
    if comptime!(target.ptx && bytes == 4) {
        let value: u32;
        let from = slice[index..index + 1].as_ptr();
        gpu_asm!(
            "ld.relaxed.cta.global.u32 {value}, [{}];",
            mem_in(_) from, value = out(_) value, options(explicit_mem)
        );
        E::reinterpret(value)
    } else if comptime!(target.ptx && bytes == 8) {
        let value: u64;
        let from = slice[index..index + 1].as_ptr();
        gpu_asm!(
            "ld.relaxed.cta.global.u64 {value}, [{}];",
            mem_in(_) from, value = out(_) value, options(explicit_mem)
        );
        E::reinterpret(value)
    } else {
        slice[index]
    }
}

/// [`read_ordered`] of a vector, where it has 16 bytes.
#[cube]
pub(crate) fn read_ordered_vector<F: Float, N: Size>(
    slice: &[Vector<F, N>],
    index: usize,
    #[comptime] target: Target,
) -> Vector<F, N> {
    let bytes = Vector::<F, N>::size();
    if comptime!(target.ptx && bytes == 16) {
        let words: Vector<u32, Const<4>>;
        let from = slice[index..index + 1].as_ptr();
        gpu_asm!(
            "ld.relaxed.cta.global.v4.u32 {words}, [{}];",
            mem_in(_) from, words = out(_) words, options(explicit_mem)
        );
        Vector::<F, N>::reinterpret(words)
    } else {
        slice[index]
    }
}
