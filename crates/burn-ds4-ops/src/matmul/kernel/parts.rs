//! Products of the parts of weights and of `x`.

use cubecl::prelude::*;

use super::tiles::TilesBlueprint;
use crate::intrinsics::{half_differences, halves_to_bf16, multiply_tiles};

/// Adds the products of a lane's 16 bytes of two rows of weights with the same columns of a row of `x` to the sums of tile `t`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn add_products(
    low: &Array<Vector<u32, Const<4>>>,
    high: &Array<Vector<u32, Const<4>>>,
    columns: &Array<Vector<u32, Const<4>>>,
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] t: u32,
    #[comptime] turn: u32,
    #[comptime] blueprint: TilesBlueprint,
) {
    #[unroll]
    for part in 0..comptime!(blueprint.source.parts as usize) {
        #[unroll]
        for weight_part in 0..comptime!(blueprint.weight_parts as usize) {
            let sum = comptime!(if part == 0 && weight_part == 0 {
                turn
            } else {
                2
            });
            let to = comptime!((t * blueprint.sums() + sum) as usize);
            #[unroll]
            for m in 0..2usize {
                sums[to] = multiply_tiles(
                    low[weight_part].extract(comptime!(2 * m)),
                    high[weight_part].extract(comptime!(2 * m)),
                    low[weight_part].extract(comptime!(2 * m + 1)),
                    high[weight_part].extract(comptime!(2 * m + 1)),
                    columns[part].extract(comptime!(2 * m)),
                    columns[part].extract(comptime!(2 * m + 1)),
                    sums[to],
                    comptime!(blueprint.dtype()),
                );
            }
        }
    }
}

/// The parts of a lane's 16 bytes of weights.
#[cube]
pub(super) fn weights_of(
    words: Vector<u32, Const<4>>,
    #[comptime] blueprint: TilesBlueprint,
) -> Array<Vector<u32, Const<4>>> {
    let mut parts = Array::<Vector<u32, Const<4>>>::new(comptime!(blueprint.weight_parts as usize));
    if comptime!(blueprint.weight_parts == 1) {
        parts[0] = words;
    } else {
        let mut first = Vector::<u32, Const<4>>::new(0u32);
        let mut second = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for i in 0..4usize {
            // The upper eight bits of a significand of eleven, and the rest. What makes a NaN one may be in the rest.
            let word = words.extract(i);
            let nan = ((word & 0x7fff_7fffu32) + 0x03ff_03ffu32) & 0x8000_8000u32;
            let upper = (word & 0xfff8_fff8u32) | (nan >> 6);
            first.insert(i, halves_to_bf16(upper));
            second.insert(i, halves_to_bf16(half_differences(word, upper)));
        }
        parts[0] = first;
        parts[1] = second;
    }
    parts
}
