use cubecl::prelude::*;

use super::sinkhorn::sinkhorn;
use super::token::{
    CollapsedRows, MixParameters, Streams, TokenBlueprint, TokenStreams, coefficient, sigmoid,
};
use crate::intrinsics::{group_sums, read_ordered};

/// How the kernels that start from partial sums are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PartialsBlueprint {
    /// How the streams are collapsed.
    pub token: TokenBlueprint,
    /// Rows of the projection. The sum of squares comes after them.
    pub rows: u32,
    /// Partials of each sum.
    pub splits: u32,
    /// Whether there are more tokens than cubes in a dimension.
    pub layers: bool,
}

impl PartialsBlueprint {
    fn sums(&self) -> u32 {
        self.rows + 1
    }

    /// Sums of each plane, and coefficients of each unit.
    fn plane_rounds(&self) -> u32 {
        self.sums().div_ceil(self.token.partition.planes)
    }

    fn unit_rounds(&self) -> u32 {
        self.rows.div_ceil(self.token.units())
    }
}

/// Cubes of a token.
pub(crate) const TOKEN_CUBES: u32 = 2;

/// Computes the coefficients of every token, the input of its sub-layer and that input's norm, if
/// there is one. A token has [`TOKEN_CUBES`] cubes. The first computes the input and the gates. The
/// second computes the matrix, whose iterations take longer than everything else.
///
/// - `partials`: the partial sums of every token's products with the projection's rows and of its
///   sum of squares: `[tokens, rows + 1, splits]`
/// - `coefficients`: `[tokens, (2 + n)·n]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn collapse_norm_kernel<F: Float, W: Float, N: Size, M: Size>(
    streams: &Streams<F, N>,
    partials: &[f32],
    mix: &MixParameters,
    rows: &mut CollapsedRows<F, W, N, M>,
    coefficients: &mut [f32],
    iterations: u32,
    #[comptime] blueprint: PartialsBlueprint,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    let mut index = CUBE_POS_X;
    if comptime!(blueprint.layers) {
        index += CUBE_POS_Z * CUBE_COUNT_X;
    }
    if index < streams.tokens {
        let mut sums = Shared::<[f32]>::new_slice(comptime!(blueprint.sums() as usize));
        let first = index as usize * comptime!(blueprint.rows as usize);
        if CUBE_POS_Y == 0 {
            let token = TokenStreams::<F, N>::new(streams, index, blueprint.token);
            let weights = token.read_weights(&rows.norm);
            // What is used first is requested last, so that nothing is requested after its use.
            let mut parts = Coefficients::request(partials, mix, index, blueprint);
            parts.compute(streams, mix, &mut sums);
            parts.write_gates(&sums, coefficients, first);
            let n = comptime!(blueprint.token.streams as usize);
            let mut gates = Array::<f32>::new(n);
            #[unroll]
            for i in 0..n {
                gates[i] = sums[i];
            }
            let to = index as usize * streams.vectors as usize;
            token.write(&gates, &weights, rows, to);
        } else {
            let mut parts = Coefficients::request(partials, mix, index, blueprint);
            parts.compute(streams, mix, &mut sums);
            let epsilon = mix.epsilon;
            write_matrix(
                &sums,
                coefficients,
                first,
                iterations,
                epsilon,
                blueprint.token,
            );
        }
    }
}

/// Computes the matrix of a token from the logits in `mixes`, and writes it to the token's
/// coefficients, which begin at `to`.
#[cube]
fn write_matrix(
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

/// Collapses the streams of every token by gates alone, and writes the result or its norm. For
/// `partials`, see [`collapse_norm_kernel`].
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn head_norm_kernel<F: Float, W: Float, N: Size, M: Size>(
    streams: &Streams<F, N>,
    partials: &[f32],
    mix: &MixParameters,
    rows: &mut CollapsedRows<F, W, N, M>,
    #[comptime] blueprint: PartialsBlueprint,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    let index = CUBE_POS as u32;
    if index < streams.tokens {
        let of_token = comptime!(blueprint.token);
        let n = comptime!(of_token.streams as usize);
        let first = index as usize * streams.vectors as usize;
        let token = TokenStreams::<F, N>::new(streams, index, of_token);
        let weights = token.read_weights(&rows.norm);
        let mut parts = LanePartials::request(partials, index, blueprint);
        let factor = mix.scale[0];
        let mut gates = Array::<f32>::new(n);
        #[unroll]
        for i in 0..n {
            gates[i] = mix.base[i];
        }
        let mut sums = Shared::<[f32]>::new_slice(comptime!(blueprint.sums() as usize));
        parts.add(&mut sums);
        sync_cube();

        let inverse_rms = streams.inverse_rms(sums[n], mix.norm_epsilon, of_token);
        #[unroll]
        for i in 0..n {
            let mixed = fma(sums[i] * inverse_rms, factor, gates[i]);
            gates[i] = sigmoid(mixed, of_token.target) + mix.epsilon;
        }
        token.write(&gates, &weights, rows, first);
    }
}

/// What a token's coefficients are computed from.
#[derive(CubeType)]
struct Coefficients {
    partials: LanePartials,
    /// Of the unit's coefficients.
    offsets: Array<f32>,
    scales: Array<f32>,
    #[cube(comptime)]
    blueprint: PartialsBlueprint,
}

#[cube]
impl Coefficients {
    /// Requests what belongs to token `index`.
    fn request(
        partials: &[f32],
        mix: &MixParameters,
        index: u32,
        #[comptime] blueprint: PartialsBlueprint,
    ) -> Coefficients {
        let rounds = comptime!(blueprint.unit_rounds() as usize);
        let mut own = Coefficients {
            partials: LanePartials::request(partials, index, blueprint),
            offsets: Array::new(rounds),
            scales: Array::new(rounds),
            blueprint,
        };
        #[unroll]
        for round in 0..rounds {
            let at = UNIT_POS + comptime!(round as u32 * blueprint.token.units());
            let at = min(at, comptime!(blueprint.rows - 1)) as usize;
            own.offsets[round] = read_ordered(&mix.base, at, blueprint.token.target);
            own.scales[round] = read_ordered(&mix.scale, at, blueprint.token.target);
        }
        own
    }

    /// Writes gates and the logits of the matrix to `sums`. Every unit of the cube must call this.
    fn compute<F: Float, N: Size>(
        &mut self,
        streams: &Streams<F, N>,
        mix: &MixParameters,
        sums: &mut Shared<[f32]>,
    ) {
        let blueprint = comptime!(self.blueprint);
        let count = comptime!(blueprint.rows);
        self.partials.add(sums);
        sync_cube();
        let squares = sums[count as usize];
        let inverse_rms = streams.inverse_rms(squares, mix.norm_epsilon, blueprint.token);
        #[unroll]
        for round in 0..comptime!(blueprint.unit_rounds() as usize) {
            let at = UNIT_POS + comptime!(round as u32 * blueprint.token.units());
            if at < count {
                let raw = sums[at as usize];
                let mixed = fma(raw * inverse_rms, self.scales[round], self.offsets[round]);
                sums[at as usize] = coefficient(mixed, at, mix.epsilon, blueprint.token);
            }
        }
        sync_cube();
    }

    /// Writes the gates to a token's coefficients, which begin at `first`.
    fn write_gates(&self, sums: &Shared<[f32]>, coefficients: &mut [f32], first: usize) {
        let gates = comptime!(2 * self.blueprint.token.streams);
        let units = comptime!(self.blueprint.token.units());
        #[unroll]
        for round in 0..comptime!(gates.div_ceil(units)) {
            let at = (UNIT_POS + comptime!(round * units)) as usize;
            if at < gates as usize {
                coefficients[first + at] = sums[at];
            }
        }
    }
}

/// A lane's parts of the partial sums of a token. A plane has some of the sums, whose partials its
/// lanes read strided.
#[derive(CubeType)]
struct LanePartials {
    sums: Array<f32>,
    #[cube(comptime)]
    blueprint: PartialsBlueprint,
}

#[cube]
impl LanePartials {
    /// Requests those of token `index`.
    fn request(
        partials: &[f32],
        index: u32,
        #[comptime] blueprint: PartialsBlueprint,
    ) -> LanePartials {
        let partition = comptime!(blueprint.token.partition);
        let count = comptime!(blueprint.sums());
        let splits = comptime!(blueprint.splits);
        let rounds = comptime!(blueprint.plane_rounds());
        let steps = comptime!(splits.div_ceil(partition.plane));
        let mut own = LanePartials {
            sums: Array::new(comptime!(rounds as usize)),
            blueprint,
        };
        #[unroll]
        for round in 0..rounds {
            let row = min(UNIT_POS_Y + round * partition.planes, count - 1);
            let first = (index * count + row) as usize * comptime!(splits as usize);
            let mut sum = 0.0f32;
            #[unroll(steps <= UNROLLED)]
            for step in 0..steps {
                let at = UNIT_POS_X + step * partition.plane;
                let inside = at < splits;
                let from = first + select(inside, at, 0u32) as usize;
                let part = read_ordered(partials, from, blueprint.token.target);
                sum += select(inside, part, 0.0f32);
            }
            own.sums[comptime!(round as usize)] = sum;
        }
        own
    }

    /// Adds them up. The results are visible after the next barrier. Every lane of the plane must
    /// call this.
    fn add(&mut self, sums: &mut Shared<[f32]>) {
        let blueprint = comptime!(self.blueprint);
        let partition = comptime!(blueprint.token.partition);
        let (rounds, target) = comptime!((blueprint.plane_rounds(), blueprint.token.target));
        group_sums(&mut self.sums, rounds, partition.plane, target);
        #[unroll]
        for round in 0..rounds {
            let row = UNIT_POS_Y + round * partition.planes;
            if UNIT_POS_X == 0 && row < comptime!(blueprint.sums()) {
                sums[row as usize] = self.sums[comptime!(round as usize)];
            }
        }
    }
}

/// The most partials of a sum that a lane requests at once.
const UNROLLED: u32 = 8;
