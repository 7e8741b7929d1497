//! Products of the terms of weights and of `x`.

use cubecl::prelude::*;

use super::tiles::TilesBlueprint;
use crate::intrinsics::{f16_differences, f16_to_bf16, multiply_tiles};

/// Adds the products of a lane's 16 bytes of two rows of weights with the same columns of a row of
/// `x` to the accumulators of tile `t`.
#[cube]
pub(super) fn add_products(
    low: &Array<Vector<u32, Const<4>>>,
    high: &Array<Vector<u32, Const<4>>>,
    columns: &Array<Vector<u32, Const<4>>>,
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] t: u32,
    #[comptime] accumulator: u32,
    #[comptime] blueprint: TilesBlueprint,
) {
    #[unroll]
    for term in 0..comptime!(blueprint.input.terms as usize) {
        #[unroll]
        for weight_term in 0..comptime!(blueprint.weight_terms as usize) {
            let which = comptime!(if term == 0 && weight_term == 0 {
                accumulator
            } else {
                2
            });
            let to = comptime!((t * blueprint.sums() + which) as usize);
            #[unroll]
            for m in 0..2usize {
                sums[to] = multiply_tiles(
                    low[weight_term].extract(comptime!(2 * m)),
                    high[weight_term].extract(comptime!(2 * m)),
                    low[weight_term].extract(comptime!(2 * m + 1)),
                    high[weight_term].extract(comptime!(2 * m + 1)),
                    columns[term].extract(comptime!(2 * m)),
                    columns[term].extract(comptime!(2 * m + 1)),
                    sums[to],
                    comptime!(blueprint.dtype()),
                );
            }
        }
    }
}

/// Splits a lane's 16 bytes of weights into terms.
#[cube]
pub(super) fn split_weights(
    words: Vector<u32, Const<4>>,
    #[comptime] blueprint: TilesBlueprint,
) -> Array<Vector<u32, Const<4>>> {
    let mut terms = Array::<Vector<u32, Const<4>>>::new(comptime!(blueprint.weight_terms as usize));
    if comptime!(blueprint.weight_terms == 1) {
        terms[0] = words;
    } else {
        let mut first = Vector::<u32, Const<4>>::new(0u32);
        let mut second = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for i in 0..4usize {
            // The first term has the upper eight bits of a significand of eleven, the second one
            // the rest. The set bits of a NaN's mantissa may all be in the rest.
            let word = words.extract(i);
            let nan = ((word & 0x7fff_7fffu32) + 0x03ff_03ffu32) & 0x8000_8000u32;
            let upper = (word & 0xfff8_fff8u32) | (nan >> 6);
            first.insert(i, f16_to_bf16(upper));
            second.insert(i, f16_to_bf16(f16_differences(word, upper)));
        }
        terms[0] = first;
        terms[1] = second;
    }
    terms
}
