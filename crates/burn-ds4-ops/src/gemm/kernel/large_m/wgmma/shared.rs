//! Products of 16-bit weights, which are in shared memory as `x` is.

use cubecl::prelude::*;

use super::blueprint::WgmmaBlueprint;
use super::ring::{StageRange, Stages};
use crate::warpgroup::{
    Ring, arrive, await_products, commit_products, fence_registers, multiply_shared,
};

/// Multiplies the stages of a tile as they become full: the rows of weights of warpgroup `group` by
/// the rows of `x`.
#[cube]
pub(super) fn multiply_dense(
    ring: &mut Ring,
    stages: &Stages,
    width: u32,
    group: u32,
    #[comptime] blueprint: WgmmaBlueprint,
) {
    let (columns, dtype) = comptime!((blueprint.columns, blueprint.dtype()));
    let mut last = ring.free();
    let range = StageRange::new(width, blueprint);
    for step in range.first..range.end {
        ring.wait_full();
        let weights = stages.weights_descriptor(ring.slot, group);
        let x = stages.x_descriptor(ring.slot, 0usize);
        fence_registers();
        #[unroll]
        for part in 0..comptime!(blueprint.operands.k_block() / 16) {
            let adds = if comptime!(part == 0) {
                step - range.first
            } else {
                1u32.runtime()
            };
            let ahead = comptime!(part * 2);
            multiply_shared(weights + ahead, x + ahead, adds, columns, "sum", dtype);
        }
        commit_products();
        // Those of the stage before are finished.
        await_products(1u32);
        if step > range.first {
            arrive(last);
        }
        last = ring.free();
        ring.next();
    }
    await_products(0u32);
    arrive(last);
}
