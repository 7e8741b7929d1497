use cubecl::prelude::*;

use super::collapse::write_matrix;
use super::token::{CollapsedNorm, MixParameters, Streams, TokenBlueprint, TokenStreams, sigmoid};
use crate::intrinsics::group_sum;

/// How the kernels that start from partial sums are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PartialsBlueprint {
    /// How the streams are collapsed.
    pub token: TokenBlueprint,
    /// Rows of the projection. The sum of squares comes after them.
    pub rows: u32,
    /// Partials of each sum.
    pub splits: u32,
}

impl PartialsBlueprint {
    fn sums(&self) -> u32 {
        self.rows + 1
    }
}

/// Cubes of a token.
pub(crate) const TOKEN_CUBES: u32 = 2;

/// Computes the coefficients of every token, the input of its sub-layer and that input's norm. A
/// token has [`TOKEN_CUBES`] cubes. The first computes the input and the gates. The second computes
/// the matrix, whose iterations take as long as everything else.
///
/// - `partials`: the partial sums of every token's products with the projection's rows and of its
///   sum of squares: `[tokens, rows + 1, splits]`
/// - `coefficients`: `[tokens, (2 + n)·n]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn collapse_norm_kernel<F: Float, W: Float, N: Size, M: Size>(
    streams: &Streams<F, N>,
    partials: &[f32],
    mix: &MixParameters,
    norm: &mut CollapsedNorm<F, W, N, M>,
    coefficients: &mut [f32],
    iterations: u32,
    #[comptime] blueprint: PartialsBlueprint,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    let index = CUBE_POS_X;
    let is_first = CUBE_POS_Y == 0;
    if index < streams.tokens {
        let of_token = comptime!(blueprint.token);
        let n = comptime!(of_token.streams);
        let count = comptime!(blueprint.rows);
        let rounds = comptime!(count.div_ceil(of_token.units()));
        let first = index as usize * streams.vectors as usize;
        // Everything that does not depend on the partial sums is requested before the kernel waits
        // for them.
        let token = TokenStreams::<F, N>::new(streams, index, of_token);
        let weights = token.read_weights(&norm.weight);
        let mut offsets = Array::<f32>::new(comptime!(rounds as usize));
        let mut scales = Array::<f32>::new(comptime!(rounds as usize));
        #[unroll]
        for round in 0..rounds {
            let at = min(UNIT_POS + round * of_token.units(), count - 1) as usize;
            let round = comptime!(round as usize);
            offsets[round] = mix.base[at];
            scales[round] = mix.scale[at];
        }
        let mut sums = Shared::<[f32]>::new_slice(comptime!(blueprint.sums() as usize));
        add_partials(partials, index, &mut sums, blueprint);
        sync_cube();

        let inverse_rms = token.inverse_rms_of(sums[comptime!(count as usize)], mix.norm_epsilon);
        let to = index as usize * comptime!(count as usize);
        #[unroll]
        for round in 0..rounds {
            let at = UNIT_POS + round * of_token.units();
            let round = comptime!(round as usize);
            if at < count {
                let raw = sums[at as usize];
                let mixed = fma(raw * inverse_rms, scales[round], offsets[round]);
                let mut value = mixed;
                if at < 2 * n {
                    let gate = sigmoid(mixed, of_token.target);
                    value = select(at < n, gate + mix.epsilon, 2.0f32 * gate);
                    if is_first {
                        coefficients[to + at as usize] = value;
                    }
                }
                sums[at as usize] = value;
            }
        }
        sync_cube();

        if is_first {
            let mut gates = Array::<f32>::new(comptime!(n as usize));
            #[unroll]
            for i in 0..comptime!(n as usize) {
                gates[i] = sums[i];
            }
            token.write_norm(&gates, &weights, norm, first);
        } else {
            write_matrix(&sums, coefficients, to, iterations, mix.epsilon, of_token);
        }
    }
}

/// Collapses the streams of every token by gates alone, and writes the norm of the result. For
/// `partials`, see [`collapse_norm_kernel`].
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn head_norm_kernel<F: Float, W: Float, N: Size, M: Size>(
    streams: &Streams<F, N>,
    partials: &[f32],
    mix: &MixParameters,
    norm: &mut CollapsedNorm<F, W, N, M>,
    #[comptime] blueprint: PartialsBlueprint,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    let index = CUBE_POS as u32;
    if index < streams.tokens {
        let of_token = comptime!(blueprint.token);
        let n = comptime!(of_token.streams as usize);
        let first = index as usize * streams.vectors as usize;
        let token = TokenStreams::<F, N>::new(streams, index, of_token);
        let weights = token.read_weights(&norm.weight);
        let factor = mix.scale[0];
        let mut gates = Array::<f32>::new(n);
        #[unroll]
        for i in 0..n {
            gates[i] = mix.base[i];
        }
        let mut sums = Shared::<[f32]>::new_slice(comptime!(blueprint.sums() as usize));
        add_partials(partials, index, &mut sums, blueprint);
        sync_cube();

        let inverse_rms = token.inverse_rms_of(sums[n], mix.norm_epsilon);
        #[unroll]
        for i in 0..n {
            let mixed = fma(sums[i] * inverse_rms, factor, gates[i]);
            gates[i] = sigmoid(mixed, of_token.target) + mix.epsilon;
        }
        token.write_norm(&gates, &weights, norm, first);
    }
}

/// Adds up the partial sums of a token. A plane reduces one sum at a time, and its lanes read the
/// partials strided. The results are visible after the next barrier.
#[cube]
fn add_partials(
    partials: &[f32],
    index: u32,
    sums: &mut Shared<[f32]>,
    #[comptime] blueprint: PartialsBlueprint,
) {
    let partition = comptime!(blueprint.token.partition);
    let count = comptime!(blueprint.sums());
    let splits = comptime!(blueprint.splits);
    let rounds = comptime!(count.div_ceil(partition.planes));
    let steps = comptime!(splits.div_ceil(partition.plane));
    let mut lane_sums = Array::<f32>::new(comptime!(rounds as usize));
    #[unroll]
    for round in 0..rounds {
        let row = min(UNIT_POS_Y + round * partition.planes, count - 1);
        let first = (index * count + row) as usize * comptime!(splits as usize);
        let mut sum = 0.0f32;
        #[unroll(steps <= UNROLLED)]
        for step in 0..steps {
            let at = UNIT_POS_X + step * partition.plane;
            let inside = at < splits;
            let part = partials[first + select(inside, at, 0u32) as usize];
            sum += select(inside, part, 0.0f32);
        }
        lane_sums[comptime!(round as usize)] = sum;
    }
    #[unroll]
    for round in 0..rounds {
        let row = UNIT_POS_Y + round * partition.planes;
        let sum = lane_sums[comptime!(round as usize)];
        let sum = group_sum(sum, partition.plane, blueprint.token.target);
        if UNIT_POS_X == 0 && row < count {
            sums[row as usize] = sum;
        }
    }
}

/// The most partials of a sum that a lane requests at once.
const UNROLLED: u32 = 8;
