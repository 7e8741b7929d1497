//! The order of the columns of `x` that is multiplied by FP4 weights: a lane's 16 neighbouring
//! columns of every 64 are where fragments expect that lane's.

use cubecl::prelude::*;

use crate::gemm::kernel::input::bf16_pair;
use crate::gemm::kernel::weights::WeightFormat;

/// The column at a position.
///
/// Of a block of 64 columns, lane `q` of four has 16, two words of codes. Pair `i` of a word has
/// codes `i` and `i + 4`.
#[cube]
pub(super) fn column_at(position: u32, #[comptime] format: WeightFormat) -> u32 {
    match comptime!(format) {
        WeightFormat::Fp4 => {
            let (word, pair) = (position / 32 % 2, position / 8 % 4);
            let (lane, upper) = (position / 2 % 4, position % 2);
            position / 64 * 64 + lane * 16 + word * 8 + upper * 4 + pair
        }
        _ => position,
    }
}

/// Puts the columns of rows of `bf16` into that order, and zeros behind them up to a multiple of
/// 64.
///
/// - `x`: `[rows, columns]` in vectors of eight, `stride` from one row to the next
/// - `output`: `[rows, columns with padding]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn permute_kernel(
    x: &[Vector<u32, Const<4>>],
    stride: usize,
    vectors: u32,
    rows: u32,
    output: &mut [Vector<u32, Const<4>>],
) {
    // A unit has one word of codes of each lane, 32 columns.
    let row_units = (vectors + 7) / 8 * 2;
    let row = ABSOLUTE_POS / row_units as usize;
    let half = (ABSOLUTE_POS % row_units as usize) as u32;
    if row < rows as usize {
        let first = half / 2 * 8 + half % 2;
        let mut columns = Array::<u32>::new(16usize);
        #[unroll]
        for lane in 0..4u32 {
            let vector = first + 2 * lane;
            let inside = vector < vectors;
            let words = x[row * stride + select(inside, vector, 0u32) as usize];
            #[unroll]
            for w in 0..4usize {
                columns[comptime!(4 * lane as usize + w)] = select(inside, words.extract(w), 0u32);
            }
        }
        #[unroll]
        for pair in 0..4usize {
            let mut vector = Vector::<u32, Const<4>>::new(0u32);
            #[unroll]
            for lane in 0..4usize {
                let low = columns[comptime!(4 * lane + pair / 2)];
                let high = columns[comptime!(4 * lane + 2 + pair / 2)];
                let (low, high) = if comptime!(pair % 2 == 0) {
                    (low << 16, high << 16)
                } else {
                    (low, high)
                };
                vector.insert(lane, bf16_pair(low, high));
            }
            output[row * (row_units * 4) as usize + (half * 4) as usize + pair] = vector;
        }
    }
}
