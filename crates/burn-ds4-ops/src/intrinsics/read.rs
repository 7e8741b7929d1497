//! Reads of device memory whose order is that of the code.

use cubecl::prelude::*;

use crate::caps::Target;

/// Element `index` of a slice in device memory. With PTX, reads of 4, 8 and 16 bytes are requested
/// in the order of the code. If what is requested last is used first, all of them are on their way
/// together, while the assembler may put other reads behind the use of earlier ones. Reads are
/// relaxed at the scope of the cube, so that the first-level cache may answer; volatile ones keep
/// their order, too, but go to the second-level cache.
#[cube]
pub(crate) fn read_ordered<E: CubePrimitive>(
    slice: &[E],
    index: usize,
    #[comptime] target: Target,
) -> E {
    let bytes = E::size();
    if comptime!(target.ptx && bytes == 4) {
        E::reinterpret(load::<E, u32>(&slice[index..index + 1], "u32"))
    } else if comptime!(target.ptx && bytes == 8) {
        E::reinterpret(load::<E, u64>(&slice[index..index + 1], "u64"))
    } else if comptime!(target.ptx && bytes == 16) {
        let words = load::<E, Vector<u32, Const<4>>>(&slice[index..index + 1], "v4.u32");
        E::reinterpret(words)
    } else {
        slice[index]
    }
}

/// The first element of a slice, as words of a kind.
#[cube]
fn load<E: CubePrimitive, W: CubePrimitive>(slice: &[E], #[comptime] kind: &'static str) -> W {
    let words: W;
    let from = slice.as_ptr();
    gpu_asm!(
        "ld.relaxed.cta.global.{kind} {words}, [{}];",
        mem_in(_) from, words = out(_) words, kind = const kind, options(explicit_mem)
    );
    words
}
