//! Products of two operands in shared memory.

use cubecl::prelude::*;

use super::WgmmaBlueprint;
use super::ring::{StageRange, Stages};
use crate::warpgroup::{
    Ring, add_scaled_dots, arrive, await_products, clear_sums, commit_products, fence_registers,
    multiply_shared,
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

/// [`multiply_dense`] for E4M3 codes, whose sums of 128 columns are scaled. `row` is the lower one
/// of the rows of this lane's sums.
///
/// Tensor cores add products of E4M3 with about 13 digits after the point of the largest of them.
/// So the sums of a stage, 128 columns, are scaled and added to those of `f32`.
#[cube]
pub(super) fn multiply_fp8(
    ring: &mut Ring,
    stages: &Stages,
    width: u32,
    group: u32,
    row: u32,
    #[comptime] blueprint: WgmmaBlueprint,
) {
    let columns = comptime!(blueprint.columns);
    clear_sums(comptime!(columns / 2));
    let range = StageRange::new(width, blueprint);
    for _ in range.first..range.end {
        ring.wait_full();
        let at = (stages.scale(ring.slot) + row) as usize;
        let low = f32::reinterpret(stages.scales[at]);
        let high = f32::reinterpret(stages.scales[at + 8]);
        let weights = stages.weights_descriptor(ring.slot, group);
        let x = stages.x_descriptor(ring.slot, 0usize);
        fence_registers();
        #[unroll]
        for part in 0..4u32 {
            let adds = comptime!((part > 0) as u32).runtime();
            let ahead = comptime!(2 * part);
            multiply_shared(weights + ahead, x + ahead, adds, columns, "dot", "e4m3");
        }
        commit_products();
        await_products(0u32);
        add_scaled_dots(low, high, stages.x_scales(ring.slot), columns);
        arrive(ring.free());
        ring.next();
    }
}
