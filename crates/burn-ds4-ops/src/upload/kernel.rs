use cubecl::prelude::*;

/// The word turned left.
#[cube]
fn turned(word: u32, #[comptime] by: u32) -> u32 {
    (word << by) | (word >> comptime!(32 - by))
}

/// Codes `shift / 4` and four after it, as the repacked layout has them.
#[cube]
fn pair(word: u32, #[comptime] shift: u32) -> u32 {
    let codes = word >> shift;
    ((codes & 0x0007_0007u32) << 6u32) | ((codes & 0x0008_0008u32) << 12u32)
}

/// [`repack_fp4`](crate::quant::repack_fp4) of `count` words, a unit each. A kernel sees a buffer's
/// length as that of its memory, which may be more.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn repack_fp4_kernel(words: &mut [u32], count: usize) {
    if ABSOLUTE_POS < count {
        let word = words[ABSOLUTE_POS];
        let known = pair(word, 0u32) | (pair(word, 4u32) >> 4u32);
        let by_2 = turned(pair(word, 8u32), 8u32);
        let by_6 = turned(pair(word, 12u32), 8u32);
        let q_14 = (by_6 ^ turned(known, 6u32)) & 0x4000_4000u32;
        let q_16 = (by_2 ^ turned(q_14, 2u32)) & 0x0001_0001u32;
        let upper = (known & 0x8080_8080u32) | q_14 | q_16;
        let others = turned(by_2 ^ upper, 30u32) | turned(by_6 ^ upper, 26u32);
        words[ABSOLUTE_POS] = known | upper | others;
    }
}

/// Writes 1 to `found` if one of `count` words has an element of so many bits with all of a mask. A
/// unit has a word, and all that write write the same. Encodings have one kernel: it takes longer
/// to compile it than to check a layer.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn any_not_finite_kernel(
    words: &[u32],
    count: usize,
    found: &mut [i32],
    bits: u32,
    mask: u32,
) {
    if ABSOLUTE_POS < count {
        let word = words[ABSOLUTE_POS];
        let mut any = false;
        for element in 0..32u32 / bits {
            any = any || ((word >> (element * bits)) & mask) == mask;
        }
        if any {
            found[0] = 1i32;
        }
    }
}
