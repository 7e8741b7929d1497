//! Pooling of the slots of a block.

use cubecl::prelude::*;

use super::softmax::softmax_weight;
use crate::caps::Target;

/// Strides in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct SlotStrides {
    pub sequence: usize,
    pub block: usize,
    pub slot: usize,
}

/// Sizes of [`pool_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct PoolSizes {
    /// Channels of all blocks.
    pub outputs: usize,
    pub blocks: usize,
    pub slots: u32,
    pub width: usize,
    pub values: SlotStrides,
    pub scores: SlotStrides,
}

/// Pools the slots of blocks. Every unit has a channel of a block, and goes through the slots in
/// their order.
///
/// - `output`: `[batch, blocks, width]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn pool_kernel<F: Float>(
    values: &[F],
    scores: &[F],
    output: &mut [F],
    sizes: PoolSizes,
    #[comptime] target: Target,
    #[define(F)] _dtype: ElemType,
) {
    let own = CUBE_POS * CUBE_DIM as usize + UNIT_POS as usize;
    if own < sizes.outputs {
        let channel = own % sizes.width;
        let block = own / sizes.width % sizes.blocks;
        let sequence = own / sizes.width / sizes.blocks;
        let value = sequence * sizes.values.sequence + block * sizes.values.block + channel;
        let score = sequence * sizes.scores.sequence + block * sizes.scores.block + channel;
        let mut maximum = f32::cast_from(scores[score]);
        for slot in 1..sizes.slots {
            let at = score + slot as usize * sizes.scores.slot;
            maximum = max(maximum, f32::cast_from(scores[at]));
        }
        let mut total = 0.0f32;
        let mut sum = 0.0f32;
        for slot in 0..sizes.slots {
            let at = score + slot as usize * sizes.scores.slot;
            let weight = softmax_weight(f32::cast_from(scores[at]) - maximum, target);
            let at = value + slot as usize * sizes.values.slot;
            total += weight;
            sum = fma(weight, f32::cast_from(values[at]), sum);
        }
        output[own] = F::cast_from(sum / total);
    }
}
