//! Rotary position embedding.

use cubecl::prelude::*;

use super::Blocks;

/// Every unit has a vector of a row, of which it turns the pairs if they are among the last channels, and copies them otherwise.
///
/// - `x`: rows of heads of positions of sequences, `strides` vectors apart
/// - `cos`, `sin`: of each position, for each of the last channels
/// - `output`: `[batch, positions, heads, vectors]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn rotate_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    cos: &[f32],
    sin: &[f32],
    output: &mut [Vector<F, N>],
    outputs: usize,
    positions: usize,
    heads: usize,
    vectors: usize,
    kept: usize,
    strides: Blocks,
    #[define(F)] _dtype: ElemType,
) {
    let size = N::value();
    let own = CUBE_POS * CUBE_DIM as usize + UNIT_POS as usize;
    if own < outputs {
        let vector = own % vectors;
        let head = own / vectors % heads;
        let token = own / vectors / heads;
        let from = token / positions * strides.sequence
            + token % positions * strides.block
            + head * strides.slot
            + vector;
        let value = x[from];
        let mut turned = Vector::<f32, N>::cast_from(value);
        if vector >= kept {
            let first = (token * (vectors - kept) + (vector - kept)) * size;
            let wide = Vector::<f32, N>::cast_from(value);
            #[unroll]
            for i in 0..size {
                let other = wide.extract(comptime!(i ^ 1));
                let product = other * sin[first + i];
                turned.insert(i, fma(wide.extract(i), cos[first + i], product));
            }
        }
        output[own] = Vector::cast_from(turned);
    }
}
