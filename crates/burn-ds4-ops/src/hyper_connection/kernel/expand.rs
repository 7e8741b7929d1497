use cubecl::prelude::*;

use super::token::StreamsLayout;

/// Spreads a sub-layer's output over the streams: `post[k] · y + Σ_j comb[j, k] · streams[j]`.
///
/// - `output`: rows `output_vectors` vectors apart
/// - `streams`: see [`StreamsLayout`]
/// - `coefficients`: `[tokens, (2 + n)·n]`
/// - `expanded`: `[tokens, n, d]`
///
/// Every token has `cubes` cubes.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn expand_kernel<F: Float, Y: Float, N: Size>(
    output: &[Vector<Y, N>],
    streams: &[Vector<F, N>],
    coefficients: &[f32],
    expanded: &mut [Vector<F, N>],
    layout: StreamsLayout,
    output_vectors: usize,
    cubes: u32,
    #[comptime] n: usize,
    #[define(F, Y)] _dtypes: [ElemType; 2],
) {
    let index = CUBE_POS / cubes as usize;
    let vector = (CUBE_POS % cubes as usize) * CUBE_DIM as usize + UNIT_POS as usize;
    if (index as u32) < layout.tokens && (vector as u32) < layout.vectors {
        let own = Vector::<f32, N>::cast_from(output[index * output_vectors + vector]);
        let mut values = Array::<Vector<f32, N>>::new(n);
        #[unroll]
        for j in 0..n {
            let at = index * layout.token + j * layout.stream + vector;
            values[j] = Vector::cast_from(streams[at]);
        }
        let first = index * comptime!((2 + n) * n);
        let to = index * n * layout.vectors as usize + vector;
        #[unroll]
        for k in 0..n {
            let post = coefficients[first + comptime!(n + k)];
            let mut sum = own * Vector::new(post);
            #[unroll]
            for j in 0..n {
                let comb = coefficients[first + comptime!(2 * n + j * n + k)];
                sum = fma(Vector::new(comb), values[j], sum);
            }
            expanded[to + k * layout.vectors as usize] = Vector::cast_from(sum);
        }
    }
}
