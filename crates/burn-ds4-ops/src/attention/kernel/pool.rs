//! Pooling of the slots of a block.

use cubecl::prelude::*;

use super::softmax_weight;
use crate::intrinsics::Target;

/// Strides in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct SlotStrides {
    pub sequence: usize,
    pub block: usize,
    pub slot: usize,
}

/// Pools the slots of blocks. Every unit has a channel of a block, and goes through the slots in
/// their order.
///
/// - `output`: `[batch, blocks, width]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn pool_kernel<F: Float>(
    values: &[F],
    scores: &[F],
    output: &mut [F],
    outputs: usize,
    blocks: usize,
    slots: u32,
    width: usize,
    value_strides: SlotStrides,
    score_strides: SlotStrides,
    #[comptime] target: Target,
    #[define(F)] _dtype: ElemType,
) {
    let own = CUBE_POS * CUBE_DIM as usize + UNIT_POS as usize;
    if own < outputs {
        let channel = own % width;
        let block = own / width % blocks;
        let sequence = own / width / blocks;
        let value = sequence * value_strides.sequence + block * value_strides.block + channel;
        let score = sequence * score_strides.sequence + block * score_strides.block + channel;
        let mut maximum = f32::cast_from(scores[score]);
        for slot in 1..slots {
            let at = score + slot as usize * score_strides.slot;
            maximum = max(maximum, f32::cast_from(scores[at]));
        }
        let mut total = 0.0f32;
        let mut sum = 0.0f32;
        for slot in 0..slots {
            let at = score + slot as usize * score_strides.slot;
            let weight = softmax_weight(f32::cast_from(scores[at]) - maximum, target);
            let at = value + slot as usize * value_strides.slot;
            total += weight;
            sum = fma(weight, f32::cast_from(values[at]), sum);
        }
        output[own] = F::cast_from(sum / total);
    }
}
