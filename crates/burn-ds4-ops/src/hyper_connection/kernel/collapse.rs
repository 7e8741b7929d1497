use cubecl::prelude::*;

use super::sinkhorn::sinkhorn;
use super::token::{MixParameters, Streams, TokenBlueprint, TokenStreams, coefficient, sigmoid};

/// `function · v` of every token.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Projected {
    pub values: Box<[f32]>,
    /// The distance from one token to the next.
    pub stride: usize,
}

/// Computes the coefficients of every token from its streams and their projection, and the input of
/// its sub-layer.
///
/// - `input`: `[tokens, d]`
/// - `coefficients`: `[tokens, (2 + n)·n]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn collapse_kernel<F: Float, N: Size>(
    streams: &Streams<F, N>,
    projected: &Projected,
    mix: &MixParameters,
    input: &mut [Vector<F, N>],
    coefficients: &mut [f32],
    iterations: u32,
    #[comptime] blueprint: TokenBlueprint,
    #[define(F)] _dtype: ElemType,
) {
    let index = CUBE_POS as u32;
    if index < streams.tokens {
        let n = comptime!(blueprint.streams);
        let count = comptime!(blueprint.coefficients());
        let output_first = index as usize * streams.vectors as usize;
        let token = TokenStreams::<F, N>::new(streams, index, blueprint);
        let rounds = comptime!(count.div_ceil(blueprint.units()));
        let mut raw = Array::<f32>::new(comptime!(rounds as usize));
        let mut offsets = Array::<f32>::new(comptime!(rounds as usize));
        let mut scales = Array::<f32>::new(comptime!(rounds as usize));
        let row = index as usize * projected.stride;
        // Requested before the kernel waits for the sum of squares.
        #[unroll]
        for round in 0..rounds {
            let at = min(UNIT_POS + round * blueprint.units(), count - 1) as usize;
            let round = comptime!(round as usize);
            raw[round] = projected.values[row + at];
            offsets[round] = mix.base[at];
            scales[round] = mix.scale[at];
        }
        let inverse_rms = token.inverse_rms(mix.norm_epsilon);

        let mut mixes = Shared::<[f32]>::new_slice(comptime!(count as usize));
        let to = index as usize * comptime!(count as usize);
        #[unroll]
        for round in 0..rounds {
            let at = UNIT_POS + round * blueprint.units();
            let round = comptime!(round as usize);
            let mixed = fma(raw[round] * inverse_rms, scales[round], offsets[round]);
            if at < count {
                let value = coefficient(mixed, at, mix.epsilon, blueprint);
                if at < 2 * n {
                    coefficients[to + at as usize] = value;
                }
                mixes[at as usize] = value;
            }
        }
        sync_cube();

        let mut gates = Array::<f32>::new(comptime!(n as usize));
        #[unroll]
        for i in 0..comptime!(n as usize) {
            gates[i] = mixes[i];
        }
        token.write_sum(&gates, input, output_first);

        write_matrix(&mixes, coefficients, to, iterations, mix.epsilon, blueprint);
    }
}

/// Computes the matrix of a token from the logits in `mixes`, and writes it to the token's
/// coefficients, which begin at `to`.
#[cube]
pub(super) fn write_matrix(
    mixes: &Shared<[f32]>,
    coefficients: &mut [f32],
    to: usize,
    iterations: u32,
    epsilon: f32,
    #[comptime] blueprint: TokenBlueprint,
) {
    let n = comptime!(blueprint.streams);
    // The last plane, which has the smallest part of the streams.
    if UNIT_POS_Y == comptime!(blueprint.partition.planes - 1) {
        let first = comptime!(2 * n as usize);
        let entries = comptime!((n * n) as usize);
        let mut matrix = Array::<f32>::new(entries);
        #[unroll]
        for i in 0..entries {
            matrix[i] = mixes[comptime!(first + i)];
        }
        sinkhorn(
            &mut matrix,
            iterations,
            epsilon,
            comptime!(n as usize),
            blueprint.target,
        );
        if UNIT_POS_X == 0 {
            #[unroll]
            for i in 0..entries {
                coefficients[to + comptime!(first + i)] = matrix[i];
            }
        }
    }
}

/// Collapses the streams of every token by gates alone. `output` is `[tokens, d]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn head_kernel<F: Float, N: Size>(
    streams: &Streams<F, N>,
    projected: &Projected,
    mix: &MixParameters,
    output: &mut [Vector<F, N>],
    #[comptime] blueprint: TokenBlueprint,
    #[define(F)] _dtype: ElemType,
) {
    let index = CUBE_POS as u32;
    if index < streams.tokens {
        let n = comptime!(blueprint.streams as usize);
        let output_first = index as usize * streams.vectors as usize;
        let token = TokenStreams::<F, N>::new(streams, index, blueprint);
        let row = index as usize * projected.stride;
        let factor = mix.scale[0];
        let mut gates = Array::<f32>::new(n);
        let mut offsets = Array::<f32>::new(n);
        #[unroll]
        for i in 0..n {
            gates[i] = projected.values[row + i];
            offsets[i] = mix.base[i];
        }
        let inverse_rms = token.inverse_rms(mix.norm_epsilon);
        #[unroll]
        for i in 0..n {
            let mixed = fma(gates[i] * inverse_rms, factor, offsets[i]);
            gates[i] = sigmoid(mixed, blueprint.target) + mix.epsilon;
        }
        token.write_sum(&gates, output, output_first);
    }
}
