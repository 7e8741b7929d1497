//! Scores of the lightning indexer, on tensor cores.

use cubecl::prelude::*;

use super::index::{INDEX_PLANES, IndexInputs, store_score, visible_rows};
use crate::caps::Target;
use crate::intrinsics::{multiply_tiles, shuffle_xor};

/// Rows of a cube, and heads that they are multiplied by at a time.
pub(crate) const INDEX_TILE_ROWS: u32 = 16;
const INDEX_TILE_HEADS: u32 = 8;

/// Computes [`index_kernel`](super::index_kernel) for rows of 16-bit floats whose channels are a
/// multiple of 32. Every plane multiplies all rows of the cube by tiles of heads, in a strided
/// loop. The results are added up within a lane, then over the four lanes of a row, then over
/// planes. No score depends on how many others there are.
///
/// `f16_input` says that rows are `f16` rather than `bf16`. Four lanes read 64 neighbouring bytes
/// of a row, and use them as the channels that the layout of the tile asks for. That permutes the
/// channels in the same way for rows and heads.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn index_tiles_kernel<F: Float, P: Int>(
    inputs: &IndexInputs<F, P, Const<8>>,
    scores: &mut [f32],
    #[comptime] steps: u32,
    #[comptime] f16_input: bool,
    #[comptime] target: Target,
    #[define(F, P)] _dtypes: [ElemType; 2],
) {
    let dtype = comptime!(if f16_input { "f16" } else { "bf16" });
    let mut partials =
        Shared::<[f32]>::new_slice(comptime!((INDEX_PLANES * INDEX_TILE_ROWS) as usize));
    let sizes = &inputs.sizes;
    let (row, group_lane) = (UNIT_POS_X / 4, UNIT_POS_X % 4);
    let first = CUBE_POS_X * INDEX_TILE_ROWS;
    let token = CUBE_POS_Y;
    let visible = visible_rows::<P>(&inputs.start, sizes, token);
    // If none of the cube's rows is visible, none is read.
    let any_visible = first < visible;
    let mut low_score = 0.0f32;
    let mut high_score = 0.0f32;
    if any_visible {
        let mut rows = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * steps as usize));
        let keys_start = sizes.keys(token) + group_lane as usize;
        let low = keys_start + min(first + row, sizes.rows - 1) as usize * sizes.keys_row;
        let high = keys_start + min(first + row + 8, sizes.rows - 1) as usize * sizes.keys_row;
        #[unroll]
        for step in 0..steps {
            let ahead = comptime!((4 * step) as usize);
            rows[comptime!((2 * step) as usize)] =
                Vector::<u32, Const<4>>::reinterpret(inputs.keys[low + ahead]);
            rows[comptime!((2 * step + 1) as usize)] =
                Vector::<u32, Const<4>>::reinterpret(inputs.keys[high + ahead]);
        }
        let query = sizes.query(token) + group_lane as usize;
        let mut head = UNIT_POS_Y * INDEX_TILE_HEADS;
        while head < sizes.heads {
            let query_head = query + min(head + row, sizes.heads - 1) as usize * sizes.queries_head;
            // Two sums, so that neighbouring products do not depend on each other.
            let mut sums = Array::<Vector<f32, Const<4>>>::new(2usize);
            sums[0] = Vector::new(0.0f32);
            sums[1] = Vector::new(0.0f32);
            #[unroll]
            for step in 0..steps {
                let ahead = comptime!((4 * step) as usize);
                let own = Vector::<u32, Const<4>>::reinterpret(inputs.queries[query_head + ahead]);
                let low = rows[comptime!((2 * step) as usize)];
                let high = rows[comptime!((2 * step + 1) as usize)];
                #[unroll]
                for half in 0..2usize {
                    let (i, j) = comptime!((2 * half, 2 * half + 1));
                    sums[half] = multiply_tiles(
                        low.extract(i),
                        high.extract(i),
                        low.extract(j),
                        high.extract(j),
                        own.extract(i),
                        own.extract(j),
                        sums[half],
                        dtype,
                    );
                }
            }
            let dots = sums[0] + sums[1];
            #[unroll]
            for column in 0..2u32 {
                let own = head + group_lane * 2 + column;
                if own < sizes.heads {
                    let weight = inputs.weights[(token * sizes.heads + own) as usize];
                    let low = dots.extract(comptime!(column as usize));
                    let high = dots.extract(comptime!(column as usize + 2));
                    low_score += weight * select(low < 0.0f32, 0.0f32, low);
                    high_score += weight * select(high < 0.0f32, 0.0f32, high);
                }
            }
            head += comptime!(INDEX_PLANES * INDEX_TILE_HEADS);
        }
    }
    #[unroll]
    for step in 0..2u32 {
        low_score += shuffle_xor(low_score, comptime!(1u32 << step), target);
        high_score += shuffle_xor(high_score, comptime!(1u32 << step), target);
    }
    if group_lane == 0 {
        let at = (UNIT_POS_Y * INDEX_TILE_ROWS + row) as usize;
        partials[at] = low_score;
        partials[at + 8] = high_score;
    }
    sync_cube();
    let own = first + UNIT_POS;
    if UNIT_POS < INDEX_TILE_ROWS && own < sizes.rows {
        store_score(
            &partials[..],
            UNIT_POS,
            scores,
            token,
            own,
            visible,
            sizes,
            INDEX_TILE_ROWS,
        );
    }
}
