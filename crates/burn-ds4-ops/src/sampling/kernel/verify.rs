use cubecl::prelude::*;

/// How many of a sequence's tokens are its drafts, and its tokens up to the first that is not; a unit to a sequence.
///
/// - `tokens`, `verified`: `[sequences, count + 1]`
/// - `drafts`: `[sequences, count]`
/// - `accepted`: `[sequences]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn verify_kernel<I: Int>(
    tokens: &[i32],
    drafts: &[I],
    verified: &mut [i32],
    accepted: &mut [i32],
    sequences: u32,
    count: u32,
    #[define(I)] _dtype: ElemType,
) {
    let sequence = CUBE_POS as u32 * CUBE_DIM + UNIT_POS;
    if sequence < sequences {
        let mut stand = 0u32;
        let first = sequence * (count + 1);
        for i in 0..count + 1 {
            let at = (first + i) as usize;
            let token = tokens[at];
            verified[at] = select(stand == i, token, -1i32);
            if stand == i && i < count && token >= 0 {
                // Wider integers may be out of range of a token.
                let draft = drafts[(sequence * count + i) as usize];
                if draft == I::cast_from(token) {
                    stand += 1;
                }
            }
        }
        accepted[sequence as usize] = i32::cast_from(stand);
    }
}
