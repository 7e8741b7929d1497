//! Attention over a cache with Hopper's warpgroup products, for many queries.

mod blueprint;
mod heads;
mod rows;

use cubecl::prelude::*;

use super::cached::CachedInputs;
use crate::intrinsics::{plane_value, shared_address, sync_planes};
use crate::warpgroup::{
    Ring, RingBlueprint, WARPGROUP, declare_dots, declare_sums, fence_shared, set_registers,
};
use blueprint::{COLUMN_WORDS, COLUMNS, GROUPS};
pub(crate) use blueprint::{CachedWgmmaBlueprint, WARPGROUP_HEADS};
use heads::TileHeads;
use rows::{RowSource, prefetch_queries};

/// Registers of a unit that copies, and of one that multiplies. All of a cube's together are no
/// more than the 168 for each of 384 units that it starts with.
const REGISTERS: [u32; 2] = [56, 224];

/// Computes [`cached_kernel`](super::cached_kernel) for rows of 16-bit floats and many queries.
///
/// `output` is `[batch, count, heads, vectors]`. Queries are rounded to 16 bits once they are
/// normalised and rotated. The weights of columns, which are relative to the largest logit so far,
/// are rounded to 16 bits; the divisor is the sum of the rounded weights.
///
/// Cubes take [`WARPGROUP_HEADS`] heads of one query after another. The first warpgroup copies the
/// rows of its columns to a ring of stages, those of the window and then compressed rows. The
/// others each multiply all of the queries by a stage, and its weights by half of its channels: to
/// exchange weights, they would have to wait for each other in every stage.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn cached_wgmma_kernel<F: Float, I: Int, P: Int>(
    inputs: &CachedInputs<F, I, P, Const<8>>,
    output: &mut [Vector<F, Const<8>>],
    queries: u32,
    #[comptime] blueprint: CachedWgmmaBlueprint,
    #[define(F, I, P)] _dtypes: [ElemType; 3],
) {
    let target = comptime!(blueprint.target);
    declare_sums(comptime!(blueprint.channels() / 2));
    declare_dots(comptime!(COLUMNS / 2), "dot");
    let words = comptime!(blueprint.stages * blueprint.stage_bytes() / 4);
    let query_tiles = Shared::<[u32]>::new_aligned_slice(
        comptime!(blueprint.stage_bytes() as usize / 4),
        1024usize,
    );
    let row_tiles = Shared::<[u32]>::new_aligned_slice(words as usize, 1024usize);
    let mut hidden =
        Shared::<[u32]>::new_slice(comptime!((blueprint.stages * COLUMN_WORDS) as usize));
    let barriers = Shared::<[u64]>::new_slice(comptime!(3 * blueprint.stages as usize));
    let mut ring = Ring::new(
        &barriers,
        comptime!(RingBlueprint {
            stages: blueprint.stages,
            landings: WARPGROUP + WARPGROUP / 32,
            planes: GROUPS * WARPGROUP / 32,
            fenced: true,
        }),
    );
    let query_tiles = shared_address(&query_tiles);
    let row_tiles = shared_address(&row_tiles);
    let head_tiles = inputs.attention.shape.heads.div_ceil(WARPGROUP_HEADS);
    let tiles = queries * head_tiles;
    let [copying, multiplying] = comptime!(REGISTERS);
    let group = plane_value(UNIT_POS / WARPGROUP, 0u32, target);
    if group == 0 {
        set_registers(copying, false);
        for tile in range_stepped(CUBE_POS_X, tiles, CUBE_COUNT_X) {
            let source = RowSource::new(inputs, tile / head_tiles, blueprint);
            let next = tile + CUBE_COUNT_X;
            if next < tiles {
                prefetch_queries(inputs, next / head_tiles, next % head_tiles, blueprint);
            }
            for block in 0..source.blocks() {
                source.copy(inputs, block, &mut ring, row_tiles, &mut hidden);
            }
        }
        ring.finish();
    } else {
        set_registers(multiplying, true);
        for tile in range_stepped(CUBE_POS_X, tiles, CUBE_COUNT_X) {
            let token = tile / head_tiles;
            let source = RowSource::new(inputs, token, blueprint);
            let first_head = tile % head_tiles * WARPGROUP_HEADS;
            let own = TileHeads {
                token,
                first_head,
                group: group - 1,
                blueprint,
            };
            // No one reads the queries of the tile before any more.
            sync_planes(0u32, comptime!(GROUPS * WARPGROUP / 32));
            own.store_queries(inputs, &source.visibility, query_tiles);
            fence_shared();
            sync_planes(0u32, comptime!(GROUPS * WARPGROUP / 32));
            own.attend(
                inputs,
                &source,
                &mut ring,
                query_tiles,
                row_tiles,
                &hidden,
                output,
            );
        }
    }
}
