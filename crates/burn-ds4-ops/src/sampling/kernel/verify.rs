use cubecl::prelude::*;

/// Counts the tokens of each sequence that match its drafts and writes its tokens up to the first
/// that does not, with one unit for each sequence.
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
        let mut matched = 0u32;
        let first = sequence * (count + 1);
        for i in 0..count + 1 {
            let at = (first + i) as usize;
            let token = tokens[at];
            verified[at] = select(matched == i, token, -1i32);
            if matched == i && i < count && token >= 0 {
                // Compared in the dtype of the drafts, as a wider integer may be out of the range
                // of a token.
                let draft = drafts[(sequence * count + i) as usize];
                if draft == I::cast_from(token) {
                    matched += 1;
                }
            }
        }
        accepted[sequence as usize] = i32::cast_from(matched);
    }
}
