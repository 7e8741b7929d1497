use cubecl::prelude::*;

/// Counts the tokens of each lane that match its drafts and writes its tokens up to the first
/// that does not, with one unit for each lane.
///
/// - `tokens`, `verified`: `[lanes, count + 1]`
/// - `drafts`: `[lanes, count]`
/// - `accepted`: `[lanes]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn verify_kernel<I: Int>(
    tokens: &[i32],
    drafts: &[I],
    verified: &mut [i32],
    accepted: &mut [i32],
    lanes: u32,
    count: u32,
    #[define(I)] _dtype: ElemType,
) {
    let lane = CUBE_POS as u32 * CUBE_DIM + UNIT_POS;
    if lane < lanes {
        let mut matched = 0u32;
        let first = lane * (count + 1);
        for i in 0..count + 1 {
            let at = (first + i) as usize;
            let token = tokens[at];
            verified[at] = select(matched == i, token, -1i32);
            if matched == i && i < count && token >= 0 {
                // Compared in the dtype of the drafts, as a wider integer may be out of the range
                // of a token.
                let draft = drafts[(lane * count + i) as usize];
                if draft == I::cast_from(token) {
                    matched += 1;
                }
            }
        }
        accepted[lane as usize] = i32::cast_from(matched);
    }
}
