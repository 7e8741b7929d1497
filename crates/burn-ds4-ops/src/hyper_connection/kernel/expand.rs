use cubecl::prelude::*;

use super::token::Streams;

/// The outputs of a sub-layer that are to be spread over the streams of their tokens.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PendingOutput<Y: Float, N: Size> {
    pub output: Box<[Vector<Y, N>]>,
    /// The distance from one token to the next.
    pub stride: usize,
    /// `[tokens, (2 + n)·n]`.
    pub coefficients: Box<[f32]>,
}

/// Spreads a sub-layer's output over the streams: `post[k] · y + Σ_j comb[j, k] · streams[j]`.
///
/// `expanded` is `[tokens, n, d]`. Every token has `cubes` cubes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn expand_kernel<F: Float, Y: Float, N: Size>(
    pending: &PendingOutput<Y, N>,
    streams: &Streams<F, N>,
    expanded: &mut [Vector<F, N>],
    cubes: u32,
    #[comptime] n: usize,
    #[define(F, Y)] _dtypes: [ElemType; 2],
) {
    let index = CUBE_POS / cubes as usize;
    let vector = (CUBE_POS % cubes as usize) * CUBE_DIM as usize + UNIT_POS as usize;
    if (index as u32) < streams.tokens && (vector as u32) < streams.vectors {
        let own = Vector::<f32, N>::cast_from(pending.output[index * pending.stride + vector]);
        let mut values = Array::<Vector<f32, N>>::new(n);
        #[unroll]
        for j in 0..n {
            let at = index * streams.token + j * streams.stream + vector;
            values[j] = Vector::cast_from(streams.values[at]);
        }
        let first = index * comptime!((2 + n) * n);
        let to = index * n * streams.vectors as usize + vector;
        #[unroll]
        for k in 0..n {
            let post = pending.coefficients[first + comptime!(n + k)];
            let mut sum = own * Vector::new(post);
            #[unroll]
            for j in 0..n {
                let comb = pending.coefficients[first + comptime!(2 * n + j * n + k)];
                sum = fma(Vector::new(comb), values[j], sum);
            }
            expanded[to + k * streams.vectors as usize] = Vector::cast_from(sum);
        }
    }
}
