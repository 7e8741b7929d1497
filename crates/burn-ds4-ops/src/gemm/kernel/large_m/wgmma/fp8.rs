//! Products of E4M3 codes, of which every 128 columns are scaled and added up in `f32`.

use cubecl::prelude::*;

use super::WgmmaBlueprint;
use super::ring::{StageRange, Stages};
use crate::warpgroup::{
    Ring, add_scaled_dots, arrive, await_products, clear_sums, commit_products, fence_registers,
    multiply_shared,
};

/// What is known of a stage before its products are finished. All rows of a warpgroup have the same
/// scale.
#[derive(CubeType)]
struct ScaledStage {
    scale: f32,
    x_scales: u32,
    /// The barrier to arrive at.
    free: u32,
}

#[cube]
impl ScaledStage {
    /// Starts the products of the next stage: the rows of weights of warpgroup `group` by the rows
    /// of `x`. They replace the accumulators `dots`.
    fn start(
        ring: &mut Ring,
        stages: &Stages,
        group: u32,
        #[comptime] dots: &'static str,
        #[comptime] blueprint: WgmmaBlueprint,
    ) -> ScaledStage {
        ring.wait_full();
        let at = stages.scale(ring.slot) + group * 64;
        let stage = ScaledStage {
            scale: f32::reinterpret(stages.scales[at as usize]),
            x_scales: stages.x_scales(ring.slot),
            free: ring.free(),
        };
        let weights = stages.weights_descriptor(ring.slot, group);
        let x = stages.x_descriptor(ring.slot, 0usize);
        fence_registers();
        #[unroll]
        for part in 0..4u32 {
            let adds = comptime!((part > 0) as u32).runtime();
            let ahead = comptime!(2 * part);
            multiply_shared(
                weights + ahead,
                x + ahead,
                adds,
                comptime!(blueprint.columns),
                dots,
                "e4m3",
            );
        }
        commit_products();
        ring.next();
        stage
    }

    /// Adds its products, which are finished, to the sums.
    fn add(&self, #[comptime] dots: &'static str, #[comptime] blueprint: WgmmaBlueprint) {
        add_scaled_dots(
            self.scale,
            self.x_scales,
            comptime!(blueprint.columns),
            dots,
        );
        arrive(self.free);
    }
}

/// Multiplies the stages of a tile as they become full: the rows of weights of warpgroup `group` by
/// the rows of `x`.
///
/// Tensor cores add products of E4M3 with about 13 digits after the point of the largest of them.
/// So the sums of a stage, 128 columns, are scaled and added to those of `f32`, while the next
/// stage is multiplied where there are registers for both.
#[cube]
pub(super) fn multiply_fp8(
    ring: &mut Ring,
    stages: &Stages,
    width: u32,
    group: u32,
    #[comptime] blueprint: WgmmaBlueprint,
) {
    clear_sums(comptime!(blueprint.columns / 2));
    let range = StageRange::new(width, blueprint);
    let mut left = range.end - range.first;
    if comptime!(blueprint.alternates()) {
        // None may be under way at the end of a turn, or `ptxas` makes them wait for each other.
        while left > 1 {
            let first = ScaledStage::start(ring, stages, group, "dot", blueprint);
            let second = ScaledStage::start(ring, stages, group, "next", blueprint);
            await_products(1u32);
            first.add("dot", blueprint);
            await_products(0u32);
            second.add("next", blueprint);
            left -= 2;
        }
    }
    while left > 0 {
        let stage = ScaledStage::start(ring, stages, group, "dot", blueprint);
        await_products(0u32);
        stage.add("dot", blueprint);
        left -= 1;
    }
}
