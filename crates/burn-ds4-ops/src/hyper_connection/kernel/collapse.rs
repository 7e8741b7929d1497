use cubecl::prelude::*;

use super::sinkhorn::sinkhorn;
use super::token::{StreamsLayout, TokenBlueprint, TokenStreams, sigmoid};

/// Computes the coefficients of every token from its streams and their projection, and the input of
/// its sub-layer.
///
/// - `streams`: see [`StreamsLayout`]
/// - `projected`: `function · v` of every token, rows `projected_stride` apart
/// - `base`, `scale`: one value for each coefficient
/// - `input`: `[tokens, d]`
/// - `coefficients`: `[tokens, (2 + n)·n]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn collapse_kernel<F: Float, N: Size>(
    streams: &[Vector<F, N>],
    projected: &[f32],
    base: &[f32],
    scale: &[f32],
    input: &mut [Vector<F, N>],
    coefficients: &mut [f32],
    layout: StreamsLayout,
    projected_stride: usize,
    iterations: u32,
    epsilon: f32,
    norm_epsilon: f32,
    #[comptime] blueprint: TokenBlueprint,
    #[define(F)] _dtype: ElemType,
) {
    let index = CUBE_POS as u32;
    if index < layout.tokens {
        let n = comptime!(blueprint.streams);
        let count = comptime!(blueprint.coefficients());
        let output_first = index as usize * layout.vectors as usize;
        let token = TokenStreams::<F, N>::new(streams, index, layout, blueprint);
        let rounds = comptime!(count.div_ceil(blueprint.units()));
        let mut raw = Array::<f32>::new(comptime!(rounds as usize));
        let mut offsets = Array::<f32>::new(comptime!(rounds as usize));
        let mut scales = Array::<f32>::new(comptime!(rounds as usize));
        let row = index as usize * projected_stride;
        // Requested before the kernel waits for the sum of squares.
        #[unroll]
        for round in 0..rounds {
            let at = min(UNIT_POS + round * blueprint.units(), count - 1) as usize;
            let round = comptime!(round as usize);
            raw[round] = projected[row + at];
            offsets[round] = base[at];
            scales[round] = scale[at];
        }
        let inverse_rms = token.inverse_rms(norm_epsilon);

        let mut mixes = Shared::<[f32]>::new_slice(comptime!(count as usize));
        let to = index as usize * comptime!(count as usize);
        #[unroll]
        for round in 0..rounds {
            let at = UNIT_POS + round * blueprint.units();
            let round = comptime!(round as usize);
            let mix = fma(raw[round] * inverse_rms, scales[round], offsets[round]);
            if at < count {
                let mut value = mix;
                if at < 2 * n {
                    let gate = sigmoid(mix, blueprint.target);
                    value = select(at < n, gate + epsilon, 2.0f32 * gate);
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

        write_matrix(&mixes, coefficients, to, iterations, epsilon, blueprint);
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

/// Collapses the streams of every token by gates alone.
///
/// - `streams`: see [`StreamsLayout`]
/// - `projected`: `function · v` of every token, rows `projected_stride` apart
/// - `base`: one value for each gate
/// - `scale`: one value for all gates
/// - `output`: `[tokens, d]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn head_kernel<F: Float, N: Size>(
    streams: &[Vector<F, N>],
    projected: &[f32],
    base: &[f32],
    scale: &[f32],
    output: &mut [Vector<F, N>],
    layout: StreamsLayout,
    projected_stride: usize,
    epsilon: f32,
    norm_epsilon: f32,
    #[comptime] blueprint: TokenBlueprint,
    #[define(F)] _dtype: ElemType,
) {
    let index = CUBE_POS as u32;
    if index < layout.tokens {
        let n = comptime!(blueprint.streams as usize);
        let output_first = index as usize * layout.vectors as usize;
        let token = TokenStreams::<F, N>::new(streams, index, layout, blueprint);
        let row = index as usize * projected_stride;
        let factor = scale[0];
        let mut gates = Array::<f32>::new(n);
        let mut offsets = Array::<f32>::new(n);
        #[unroll]
        for i in 0..n {
            gates[i] = projected[row + i];
            offsets[i] = base[i];
        }
        let inverse_rms = token.inverse_rms(norm_epsilon);
        #[unroll]
        for i in 0..n {
            let mix = fma(gates[i] * inverse_rms, factor, offsets[i]);
            gates[i] = sigmoid(mix, blueprint.target) + epsilon;
        }
        token.write_sum(&gates, output, output_first);
    }
}
