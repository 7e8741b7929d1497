//! Pooling of raw rows, both stored and new ones.

use cubecl::prelude::*;

use super::{CompressBlueprint, Compressor};
use crate::attention::kernel::softmax::softmax_weight;

/// Slots whose raw rows are loaded before any of them is used.
const SLOTS_IN_FLIGHT: usize = 8;

/// The channel of a block that a unit pools, and the offsets of the sequence's new projections and
/// raw rows.
#[derive(CubeType, Clone, Copy)]
pub(super) struct PoolSource {
    pub projections: usize,
    pub raw: usize,
    pub channel: u32,
    pub block: u32,
    /// The first new position.
    pub begin: u32,
}

/// Pools one channel of a block over its slots, in their order:
/// [`pool_kernel`](crate::attention::kernel::pool_kernel) over raw rows where they are stored.
#[cube]
pub(super) fn pool<R: Float, W: Float>(
    compressor: &Compressor<R, W>,
    source: &PoolSource,
    #[comptime] blueprint: CompressBlueprint,
) -> f32 {
    let slots = comptime!(blueprint.slots());
    let group = comptime!(SLOTS_IN_FLIGHT.min(slots as usize));
    let groups = comptime!(slots.div_ceil(group as u32));
    let once = comptime!(groups == 1);
    let mut scores = Array::<f32>::new(group);
    let mut values = Array::<f32>::new(group);
    let mut maximum = f32::MIN.runtime();
    for i in 0..groups {
        read_slots(
            compressor,
            source,
            i * comptime!(group as u32),
            comptime!(blueprint.series()),
            &mut scores,
            blueprint,
        );
        if comptime!(once) {
            read_slots(compressor, source, 0u32, 0u32, &mut values, blueprint);
        }
        #[unroll]
        for j in 0..group {
            let slot = i * comptime!(group as u32) + comptime!(j as u32);
            let pooled = is_pooled(slot, source.block, blueprint);
            maximum = select(pooled, max(maximum, scores[j]), maximum);
        }
    }
    let mut total = 0.0f32;
    let mut sum = 0.0f32;
    for i in 0..groups {
        if comptime!(!once) {
            read_slots(
                compressor,
                source,
                i * comptime!(group as u32),
                comptime!(blueprint.series()),
                &mut scores,
                blueprint,
            );
            read_slots(
                compressor,
                source,
                i * comptime!(group as u32),
                0u32,
                &mut values,
                blueprint,
            );
        }
        #[unroll]
        for j in 0..group {
            let slot = i * comptime!(group as u32) + comptime!(j as u32);
            if is_pooled(slot, source.block, blueprint) {
                let weight = softmax_weight(scores[j] - maximum, blueprint.row.target);
                total += weight;
                sum = fma(weight, values[j], sum);
            }
        }
    }
    sum / total
}

/// Whether the block has such a slot. The first block has no block before it to pool.
#[cube]
fn is_pooled(slot: u32, block: u32, #[comptime] blueprint: CompressBlueprint) -> bool {
    let exists = slot < comptime!(blueprint.slots());
    if comptime!(blueprint.overlap) {
        exists && (block > 0 || slot >= comptime!(blueprint.ratio))
    } else {
        exists
    }
}

/// Reads a channel of the raw rows of some slots of a block, from slot `first` on, in the part of
/// their series after `part` others. New raw rows are computed from their projections, earlier ones
/// are read. For slots that are not pooled, the result may be anything.
#[cube]
fn read_slots<R: Float, W: Float>(
    compressor: &Compressor<R, W>,
    source: &PoolSource,
    first: u32,
    #[comptime] part: u32,
    group: &mut Array<f32>,
    #[comptime] blueprint: CompressBlueprint,
) {
    let sizes = &compressor.sizes;
    let ratio = comptime!(blueprint.ratio);
    let count = comptime!(SLOTS_IN_FLIGHT.min(blueprint.slots() as usize));
    let mut biases = Array::<f32>::new(count);
    // Issue all loads before any result is used.
    #[unroll]
    for j in 0..count {
        let slot = first + comptime!(j as u32);
        let slot = select(
            is_pooled(slot, source.block, blueprint),
            slot,
            comptime!(blueprint.slots() - 1),
        );
        let mut own = slot;
        let mut series = part.runtime();
        let mut of = source.block;
        if comptime!(blueprint.overlap) {
            let previous = slot < ratio;
            own = select(previous, slot, slot - ratio);
            series = select(previous, part, comptime!(part + 1));
            of = select(previous, source.block - 1, source.block);
        }
        let position = of * ratio + own;
        let at = (series * blueprint.row.width + source.channel) as usize;
        biases[j] = compressor.bias[own as usize * sizes.bias_slot + at];
        if position >= source.begin {
            let token = (position - source.begin) as usize;
            group[j] =
                compressor.projections[source.projections + token * sizes.projections_token + at];
        } else {
            let slot = (position % sizes.slots) as usize;
            group[j] = compressor.raw[source.raw + slot * sizes.raw_slot + at];
        }
    }
    #[unroll]
    for j in 0..count {
        let slot = first + comptime!(j as u32);
        let slot = select(
            is_pooled(slot, source.block, blueprint),
            slot,
            comptime!(blueprint.slots() - 1),
        );
        let position = source.block * ratio + slot;
        let before = comptime!((blueprint.series() - 1) * ratio);
        let sum = group[j] + biases[j];
        group[j] = select(position >= source.begin + before, sum, group[j]);
    }
}
