use cubecl::prelude::*;

use crate::caps::Target;
use crate::intrinsics::{modulo, multiply_tiles, shuffle_xor};

/// How [`dense_kernel`] is compiled.
///
/// A cube has `expert_planes * experts` experts and a part of `d_model`, both partitioned among its
/// planes. Every plane multiplies its experts' part of the gate by that of all tokens. The planes'
/// sums are reduced in shared memory, those of the cubes in device memory. The partition does not
/// depend on the number of tokens, so that a token's sums do not either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DenseBlueprint {
    /// Tokens of each cube, a power of two.
    pub tokens: u32,
    /// Experts of each plane, a power of two.
    pub experts: u32,
    /// Planes of a cube that divide its experts.
    pub expert_planes: u32,
    /// Planes of a cube that divide its part of `d_model`.
    pub model_planes: u32,
    /// Vectors of a row that each lane multiplies, or with tensor cores each four lanes.
    pub k_steps: u32,
    /// Whether no cube's part of `d_model` reaches beyond its end.
    pub even: bool,
    /// Lanes of a plane.
    pub plane: u32,
    /// Where tensor cores multiply, the name of the dtype of both operands.
    pub mma_dtype: Option<&'static str>,
    pub target: Target,
}

impl DenseBlueprint {
    /// Experts of a cube.
    pub fn cube_experts(&self) -> u32 {
        self.experts * self.expert_planes
    }

    /// Sums of a plane.
    fn sums(&self) -> u32 {
        self.experts * self.tokens
    }

    /// Sums that a lane holds after the plane has reduced them over its lanes.
    fn lane_sums(&self) -> u32 {
        self.sums().div_ceil(self.plane)
    }

    /// Steps of the reduction over lanes in which each lane sends half of its sums, instead of all
    /// of them.
    fn halvings(&self) -> u32 {
        self.sums().min(self.plane).ilog2()
    }
}

/// The operands of the product, in rows of vectors: `[tokens, d_model]` and `[experts, d_model]`.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RouterOperands<X: Float, G: Float, N: Size> {
    x: Box<[Vector<X, N>]>,
    gate: Box<[Vector<G, N>]>,
    tokens: u32,
    experts: u32,
    /// Vectors of a row.
    model_vectors: u32,
    /// Vectors from one row of `x` to the next.
    x_vectors: usize,
    /// Vectors from one row of the gate to the next.
    gate_vectors: usize,
}

#[cube]
impl<X: Float, G: Float, N: Size> RouterOperands<X, G, N> {
    /// Multiplies without tensor cores. `shared_partials` is
    /// `[model_planes, expert_planes, experts, tokens]`.
    fn multiply(&self, shared_partials: &mut Shared<[f32]>, #[comptime] blueprint: DenseBlueprint) {
        let lane = UNIT_POS_X;
        let expert_plane = modulo(UNIT_POS_Y, blueprint.expert_planes);
        let model_plane = UNIT_POS_Y / blueprint.expert_planes;
        let cube_experts = comptime!(blueprint.cube_experts());
        let first_expert = CUBE_POS_X * cube_experts + expert_plane * blueprint.experts;
        let first_token = CUBE_POS_Z * blueprint.tokens;
        let first_vector = (CUBE_POS_Y * blueprint.model_planes + model_plane)
            * comptime!(blueprint.k_steps * blueprint.plane)
            + lane;

        // Reads all of the gate first, as it takes longest to arrive.
        let mut gates =
            Array::<Vector<G, N>>::new(comptime!((blueprint.k_steps * blueprint.experts) as usize));
        #[unroll]
        for step in 0..blueprint.k_steps {
            let vector = first_vector + step * blueprint.plane;
            let inside = vector < self.model_vectors;
            let vector = if comptime!(blueprint.even) {
                vector
            } else {
                select(inside, vector, 0u32)
            };
            #[unroll]
            for e in 0..blueprint.experts {
                let expert = min(first_expert + e, self.experts - 1);
                gates[(step * blueprint.experts + e) as usize] =
                    self.gate[expert as usize * self.gate_vectors + vector as usize];
            }
        }
        let size = N::value().comptime();
        let mut sums = Array::<f32>::new(comptime!(blueprint.sums() as usize));
        #[unroll]
        for i in 0..comptime!(blueprint.sums()) {
            sums[i as usize] = 0.0f32;
        }
        #[unroll]
        for step in 0..blueprint.k_steps {
            let vector = first_vector + step * blueprint.plane;
            let inside = vector < self.model_vectors;
            let vector = if comptime!(blueprint.even) {
                vector
            } else {
                select(inside, vector, 0u32)
            };
            #[unroll]
            for t in 0..blueprint.tokens {
                let token = min(first_token + t, self.tokens - 1);
                let values = Vector::<f32, N>::cast_from(
                    self.x[token as usize * self.x_vectors + vector as usize],
                );
                #[unroll]
                for e in 0..blueprint.experts {
                    let factors =
                        Vector::<f32, N>::cast_from(gates[(step * blueprint.experts + e) as usize]);
                    let before = sums[(e * blueprint.tokens + t) as usize];
                    // A separate multiplication and addition could be rounded differently in the
                    // kernel of another number of tokens. What begins a chain of `fma` is not.
                    let mut sum = before;
                    if comptime!(size == 1) {
                        sum = fma(values.extract(0usize), factors.extract(0usize), sum);
                    } else {
                        let mut product = values.extract(0usize) * factors.extract(0usize);
                        #[unroll]
                        for j in 1..size {
                            product = fma(values.extract(j), factors.extract(j), product);
                        }
                        sum += product;
                    }
                    if comptime!(!blueprint.even) {
                        sum = select(inside, sum, before);
                    }
                    sums[(e * blueprint.tokens + t) as usize] = sum;
                }
            }
        }

        // Reduces the sums over lanes. As long as a lane holds several sums, it exchanges half of
        // them for the partner's other half.
        let mut first = 0u32;
        let mut spare = false;
        #[unroll]
        for step in 0..comptime!(blueprint.plane.ilog2()) {
            let mask = comptime!(blueprint.plane >> (step + 1));
            let upper = lane & mask != 0;
            if comptime!(step < blueprint.halvings()) {
                let half = comptime!(blueprint.sums() >> (step + 1));
                #[unroll]
                for i in 0..half {
                    let (low, high) = (sums[i as usize], sums[(i + half) as usize]);
                    let sent = select(upper, low, high);
                    let own = select(upper, high, low);
                    sums[i as usize] = own + shuffle_xor(sent, mask, blueprint.target);
                }
                first += select(upper, half, 0u32);
            } else {
                sums[0] += shuffle_xor(sums[0], mask, blueprint.target);
                spare = spare || upper;
            }
        }
        let plane_sums = comptime!(blueprint.sums());
        if !spare {
            #[unroll]
            for i in 0..comptime!(blueprint.lane_sums()) {
                shared_partials[(UNIT_POS_Y * plane_sums + first + i) as usize] = sums[i as usize];
            }
        }
    }

    /// Multiplies with tensor cores: tiles of 16 experts by 8 tokens, two from each 32 columns.
    /// Each lane holds eight columns of a row of `x` and of the gate. Both have the same columns in
    /// the same order, so it makes no difference to the sum which they are.
    fn multiply_mma(
        &self,
        shared_partials: &mut Shared<[f32]>,
        #[comptime] blueprint: DenseBlueprint,
    ) {
        let dtype = comptime!(blueprint.mma_dtype.unwrap_or_default());
        let row = UNIT_POS_X / 4;
        let quarter = UNIT_POS_X % 4;
        let first_expert = CUBE_POS_X * 16;
        let first_token = CUBE_POS_Z * blueprint.tokens;
        let low = min(first_expert + row, self.experts - 1) as usize * self.gate_vectors;
        let high = min(first_expert + row + 8, self.experts - 1) as usize * self.gate_vectors;
        let first_vector = (CUBE_POS_Y * blueprint.model_planes + UNIT_POS_Y)
            * comptime!(blueprint.k_steps * 4)
            + quarter;

        // Reads all of the gate first, as it takes longest to arrive.
        let mut gates =
            Array::<Vector<u32, Const<4>>>::new(comptime!(2 * blueprint.k_steps as usize));
        #[unroll]
        for step in 0..blueprint.k_steps {
            let vector = first_vector + step * 4;
            gates[comptime!(2 * step as usize)] =
                self.words(&self.gate, low, vector, blueprint.even);
            gates[comptime!(2 * step as usize + 1)] =
                self.words(&self.gate, high, vector, blueprint.even);
        }
        let groups = comptime!(blueprint.tokens / 8);
        let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(groups as usize));
        #[unroll]
        for group in 0..groups {
            sums[group as usize] = Vector::new(0.0f32);
        }
        #[unroll]
        for step in 0..blueprint.k_steps {
            let vector = first_vector + step * 4;
            let low = gates[comptime!(2 * step as usize)];
            let high = gates[comptime!(2 * step as usize + 1)];
            #[unroll]
            for group in 0..groups {
                let token = min(first_token + group * 8 + row, self.tokens - 1);
                let token_row = token as usize * self.x_vectors;
                let values = self.words(&self.x, token_row, vector, blueprint.even);
                #[unroll]
                for half in 0..2usize {
                    sums[group as usize] = multiply_tiles(
                        low.extract(comptime!(2 * half)),
                        high.extract(comptime!(2 * half)),
                        low.extract(comptime!(2 * half + 1)),
                        high.extract(comptime!(2 * half + 1)),
                        values.extract(comptime!(2 * half)),
                        values.extract(comptime!(2 * half + 1)),
                        sums[group as usize],
                        dtype,
                    );
                }
            }
        }
        let plane = UNIT_POS_Y * comptime!(blueprint.sums());
        #[unroll]
        for group in 0..groups {
            let token = group * 8 + quarter * 2;
            #[unroll]
            for i in 0..4u32 {
                let expert = row + comptime!(i / 2 * 8);
                let index = expert * blueprint.tokens + token + comptime!(i % 2);
                shared_partials[(plane + index) as usize] =
                    sums[group as usize].extract(comptime!(i as usize));
            }
        }
    }

    /// Reads a vector of eight 16-bit values as words, or zeros past the end of the row.
    fn words<E: Float>(
        &self,
        matrix: &[Vector<E, N>],
        row: usize,
        vector: u32,
        #[comptime] even: bool,
    ) -> Vector<u32, Const<4>> {
        if comptime!(even) {
            Vector::<u32, Const<4>>::reinterpret(matrix[row + vector as usize])
        } else {
            let inside = vector < self.model_vectors;
            let vector = select(inside, vector, 0u32);
            let words = Vector::<u32, Const<4>>::reinterpret(matrix[row + vector as usize]);
            select(inside, words, Vector::new(0u32))
        }
    }
}

/// Multiplies tokens by the gate in partial sums.
///
/// - `partials`: `[k_splits, tokens, experts]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn dense_kernel<X: Float, G: Float, N: Size, M: Size>(
    operands: &RouterOperands<X, G, N>,
    partials: &mut [Vector<f32, M>],
    #[comptime] blueprint: DenseBlueprint,
    #[define(X, G)] _dtypes: [ElemType; 2],
) {
    let (tokens, experts) = (operands.tokens, operands.experts);
    let cube_experts = comptime!(blueprint.cube_experts());
    let cube_sums = comptime!(cube_experts * blueprint.tokens);
    let mut shared_partials =
        Shared::<[f32]>::new_slice(comptime!((cube_sums * blueprint.model_planes) as usize));
    if comptime!(blueprint.mma_dtype.is_some()) {
        operands.multiply_mma(&mut shared_partials, blueprint);
    } else {
        operands.multiply(&mut shared_partials, blueprint);
    }
    sync_cube();

    // Reduces the planes' sums.
    let size = M::value() as u32;
    let columns = experts / size;
    let mut at = UNIT_POS;
    while at < comptime!(cube_experts * blueprint.tokens) / size {
        let token = at / (cube_experts / size);
        let expert = at % (cube_experts / size) * size;
        let mut total = Vector::<f32, M>::new(0.0f32);
        #[unroll]
        for i in 0..M::value() {
            let index = (expert + i as u32) * blueprint.tokens + token;
            let mut sum = shared_partials[index as usize];
            #[unroll]
            for plane in 1..blueprint.model_planes {
                sum += shared_partials[(plane * cube_sums + index) as usize];
            }
            total.insert(i, sum);
        }
        let column = (CUBE_POS_X * cube_experts + expert) / size;
        let token = CUBE_POS_Z * blueprint.tokens + token;
        if token < tokens && column < columns {
            let row = (CUBE_POS_Y * tokens + token) as usize;
            partials[row * columns as usize + column as usize] = total;
        }
        at += CUBE_DIM;
    }
}
