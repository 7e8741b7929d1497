//! Raw rows, old and new, and what they are pooled to.

use cubecl::prelude::*;

use super::{CompressBlueprint, Compressor};
use crate::attention::kernel::weight;

/// Slots whose raw rows are on their way at the same time.
const CHUNK: usize = 8;

/// Which channel of which block of a sequence it is, and where the sequence's new projections and its raw rows begin.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    pub projections: usize,
    pub raw: usize,
    pub channel: u32,
    pub block: u32,
    /// The first new position.
    pub begin: u32,
}

/// One channel of a block, of all its slots in their order: [`pool_kernel`](crate::attention::kernel::pool_kernel) where the raw rows are.
#[cube]
pub(super) fn pool<R: Float, W: Float>(
    compressor: &Compressor<R, W>,
    place: &Place,
    #[comptime] blueprint: CompressBlueprint,
) -> f32 {
    let slots = comptime!(blueprint.slots());
    let chunk = comptime!(CHUNK.min(slots as usize));
    let chunks = comptime!(slots.div_ceil(chunk as u32));
    let once = comptime!(chunks == 1);
    let mut scores = Array::<f32>::new(chunk);
    let mut values = Array::<f32>::new(chunk);
    let mut maximum = f32::MIN.runtime();
    for i in 0..chunks {
        read_chunk(
            compressor,
            place,
            i * comptime!(chunk as u32),
            comptime!(blueprint.series()),
            &mut scores,
            blueprint,
        );
        if comptime!(once) {
            read_chunk(compressor, place, 0u32, 0u32, &mut values, blueprint);
        }
        #[unroll]
        for j in 0..chunk {
            let slot = i * comptime!(chunk as u32) + comptime!(j as u32);
            let seen = is_pooled(slot, place.block, blueprint);
            maximum = select(seen, max(maximum, scores[j]), maximum);
        }
    }
    let mut total = 0.0f32;
    let mut sum = 0.0f32;
    for i in 0..chunks {
        if comptime!(!once) {
            read_chunk(
                compressor,
                place,
                i * comptime!(chunk as u32),
                comptime!(blueprint.series()),
                &mut scores,
                blueprint,
            );
            read_chunk(
                compressor,
                place,
                i * comptime!(chunk as u32),
                0u32,
                &mut values,
                blueprint,
            );
        }
        #[unroll]
        for j in 0..chunk {
            let slot = i * comptime!(chunk as u32) + comptime!(j as u32);
            if is_pooled(slot, place.block, blueprint) {
                let share = weight(scores[j] - maximum, blueprint.row.target);
                total += share;
                sum = fma(share, values[j], sum);
            }
        }
    }
    sum / total
}

/// Whether there is such a slot: nothing is before the first block.
#[cube]
fn is_pooled(slot: u32, block: u32, #[comptime] blueprint: CompressBlueprint) -> bool {
    let known = slot < comptime!(blueprint.slots());
    if comptime!(blueprint.overlap) {
        known && (block > 0 || slot >= comptime!(blueprint.ratio))
    } else {
        known
    }
}

/// A channel of the raw rows of some slots of a block, from slot `first` on, in the part of their series after `part` others: new
/// ones are put together from their projections, earlier ones are read. Of slots that are not pooled, any.
#[cube]
fn read_chunk<R: Float, W: Float>(
    compressor: &Compressor<R, W>,
    place: &Place,
    first: u32,
    #[comptime] part: u32,
    chunk: &mut Array<f32>,
    #[comptime] blueprint: CompressBlueprint,
) {
    let sizes = &compressor.sizes;
    let ratio = comptime!(blueprint.ratio);
    let count = comptime!(CHUNK.min(blueprint.slots() as usize));
    let mut biases = Array::<f32>::new(count);
    // Everything is on its way before anything is used.
    #[unroll]
    for j in 0..count {
        let slot = first + comptime!(j as u32);
        let slot = select(
            is_pooled(slot, place.block, blueprint),
            slot,
            comptime!(blueprint.slots() - 1),
        );
        let mut own = slot;
        let mut series = part.runtime();
        let mut of = place.block;
        if comptime!(blueprint.overlap) {
            let previous = slot < ratio;
            own = select(previous, slot, slot - ratio);
            series = select(previous, part, comptime!(part + 1));
            of = select(previous, place.block - 1, place.block);
        }
        let position = of * ratio + own;
        let at = (series * blueprint.row.width + place.channel) as usize;
        biases[j] = compressor.bias[own as usize * sizes.bias_slot + at];
        if position >= place.begin {
            let token = (position - place.begin) as usize;
            chunk[j] =
                compressor.projections[place.projections + token * sizes.projections_token + at];
        } else {
            let slot = (position % sizes.slots) as usize;
            chunk[j] = compressor.raw[place.raw + slot * sizes.raw_slot + at];
        }
    }
    #[unroll]
    for j in 0..count {
        let slot = first + comptime!(j as u32);
        let slot = select(
            is_pooled(slot, place.block, blueprint),
            slot,
            comptime!(blueprint.slots() - 1),
        );
        let position = place.block * ratio + slot;
        let before = comptime!((blueprint.series() - 1) * ratio);
        let sum = chunk[j] + biases[j];
        chunk[j] = select(position >= place.begin + before, sum, chunk[j]);
    }
}
