use cubecl::prelude::*;

use super::collapse::write_matrix;
use super::token::{StreamsLayout, TokenBlueprint, TokenStreams, sigmoid};
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

/// Constants of coefficients and norms.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Epsilons {
    /// For gates and matrix.
    pub gates: f32,
    /// For the norm over all streams.
    pub streams: f32,
    /// For the norm of the collapsed streams.
    pub input: f32,
}

/// Cubes of a token.
pub(crate) const TOKEN_CUBES: u32 = 2;

/// Computes the coefficients of every token, the input of its sub-layer and that input's norm. A
/// token has [`TOKEN_CUBES`] cubes. The first computes the input and the gates. The second computes
/// the matrix, whose iterations take as long as everything else.
///
/// - `streams`: see [`StreamsLayout`]
/// - `partials`: the partial sums of every token's products with the projection's rows and of its
///   sum of squares: `[tokens, rows + 1, splits]`
/// - `base`, `scale`: one value for each coefficient
/// - `weight`: one value for each channel of the norm
/// - `input`, `normed`: `[tokens, d]`
/// - `coefficients`: `[tokens, (2 + n)·n]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn collapse_norm_kernel<F: Float, W: Float, N: Size, M: Size>(
    streams: &[Vector<F, N>],
    partials: &[f32],
    base: &[f32],
    scale: &[f32],
    weight: &[Vector<W, M>],
    input: &mut [Vector<F, N>],
    normed: &mut [Vector<F, N>],
    coefficients: &mut [f32],
    layout: StreamsLayout,
    iterations: u32,
    epsilons: Epsilons,
    #[comptime] blueprint: PartialsBlueprint,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    let index = CUBE_POS_X;
    let is_first = CUBE_POS_Y == 0;
    if index < layout.tokens {
        let of_token = comptime!(blueprint.token);
        let n = comptime!(of_token.streams);
        let count = comptime!(blueprint.rows);
        let rounds = comptime!(count.div_ceil(of_token.units()));
        let first = index as usize * layout.vectors as usize;
        // Everything that does not depend on the partial sums is requested before the kernel waits
        // for them.
        let token = TokenStreams::<F, N>::new(streams, index, layout, of_token);
        let weights = token.read_weights(weight);
        let mut offsets = Array::<f32>::new(comptime!(rounds as usize));
        let mut scales = Array::<f32>::new(comptime!(rounds as usize));
        #[unroll]
        for round in 0..rounds {
            let at = min(UNIT_POS + round * of_token.units(), count - 1) as usize;
            let round = comptime!(round as usize);
            offsets[round] = base[at];
            scales[round] = scale[at];
        }
        let mut sums = Shared::<[f32]>::new_slice(comptime!(blueprint.sums() as usize));
        add_partials(partials, index, &mut sums, blueprint);
        sync_cube();

        let inverse_rms = token.inverse_rms_of(sums[comptime!(count as usize)], epsilons.streams);
        let to = index as usize * comptime!(count as usize);
        #[unroll]
        for round in 0..rounds {
            let at = UNIT_POS + round * of_token.units();
            let round = comptime!(round as usize);
            if at < count {
                let raw = sums[at as usize];
                let mix = fma(raw * inverse_rms, scales[round], offsets[round]);
                let mut value = mix;
                if at < 2 * n {
                    let gate = sigmoid(mix, of_token.target);
                    value = select(at < n, gate + epsilons.gates, 2.0f32 * gate);
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
            token.write_norm(
                &gates,
                weight,
                &weights,
                input,
                normed,
                first,
                epsilons.input,
            );
        } else {
            write_matrix(
                &sums,
                coefficients,
                to,
                iterations,
                epsilons.gates,
                of_token,
            );
        }
    }
}

/// Collapses the streams of every token by gates alone, and writes the norm of the result.
///
/// - `scale`: one value for all gates
/// - `collapsed`, `normed`: `[tokens, d]`
/// - others: see [`collapse_norm_kernel`]
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn head_norm_kernel<F: Float, W: Float, N: Size, M: Size>(
    streams: &[Vector<F, N>],
    partials: &[f32],
    base: &[f32],
    scale: &[f32],
    weight: &[Vector<W, M>],
    collapsed: &mut [Vector<F, N>],
    normed: &mut [Vector<F, N>],
    layout: StreamsLayout,
    epsilons: Epsilons,
    #[comptime] blueprint: PartialsBlueprint,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    let index = CUBE_POS as u32;
    if index < layout.tokens {
        let of_token = comptime!(blueprint.token);
        let n = comptime!(of_token.streams as usize);
        let first = index as usize * layout.vectors as usize;
        let token = TokenStreams::<F, N>::new(streams, index, layout, of_token);
        let weights = token.read_weights(weight);
        let factor = scale[0];
        let mut gates = Array::<f32>::new(n);
        #[unroll]
        for i in 0..n {
            gates[i] = base[i];
        }
        let mut sums = Shared::<[f32]>::new_slice(comptime!(blueprint.sums() as usize));
        add_partials(partials, index, &mut sums, blueprint);
        sync_cube();

        let inverse_rms = token.inverse_rms_of(sums[n], epsilons.streams);
        #[unroll]
        for i in 0..n {
            let mix = fma(sums[i] * inverse_rms, factor, gates[i]);
            gates[i] = sigmoid(mix, of_token.target) + epsilons.gates;
        }
        token.write_norm(
            &gates,
            weight,
            &weights,
            collapsed,
            normed,
            first,
            epsilons.input,
        );
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
