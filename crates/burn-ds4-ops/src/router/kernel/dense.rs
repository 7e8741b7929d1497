use cubecl::prelude::*;

use super::select::{Row, SelectBlueprint};
use crate::intrinsics::{arrives_last, multiply_tiles, shuffle_xor, sync_group};

/// How [`dense_kernel`] is compiled.
///
/// A cube owns `expert_planes * experts` experts and a stretch of `d_model`, both cut up among its planes. Every plane multiplies
/// its experts' stretch of the gate by that of all tokens; the planes' sums meet in shared memory, the cubes' in device memory.
/// The cut does not depend on the number of tokens, so that a token's sums do not either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DenseBlueprint {
    /// Tokens of a cube, a power of two.
    pub tokens: u32,
    /// Experts of a plane, a power of two.
    pub experts: u32,
    /// Planes of a cube that divide its experts.
    pub expert_planes: u32,
    /// Planes of a cube that divide its stretch of `d_model`.
    pub model_planes: u32,
    /// Vectors of a row to a lane, or with tensor cores to four.
    pub steps: u32,
    /// Whether the cubes' stretches are all full.
    pub even: bool,
    /// Lanes of a plane.
    pub plane: u32,
    /// Where the tensor cores multiply, the name of the dtype of both factors.
    pub tiles: Option<&'static str>,
    /// The cube that comes last chooses the experts. Needs cubes that can hand results to each other.
    pub finish: bool,
    /// How the experts are chosen.
    pub select: SelectBlueprint,
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

    /// Sums that a lane is left with when the plane has added its lanes up.
    fn left(&self) -> u32 {
        self.sums().div_ceil(self.plane)
    }

    /// Steps of adding the plane's lanes up in which each lane hands half of its sums over, instead of adding all of them.
    fn halvings(&self) -> u32 {
        self.sums().min(self.plane).ilog2()
    }
}

/// What is multiplied.
#[derive(CubeType)]
struct Factors<'a, X: Float, G: Float, N: Size> {
    x: &'a [Vector<X, N>],
    gate: &'a [Vector<G, N>],
    tokens: u32,
    experts: u32,
    /// Vectors of a row, and from one row to the next.
    model_vectors: u32,
    x_vectors: usize,
    gate_vectors: usize,
    #[cube(comptime)]
    blueprint: DenseBlueprint,
}

#[cube]
impl<'a, X: Float, G: Float, N: Size> Factors<'a, X, G, N> {
    #[allow(clippy::too_many_arguments)]
    fn new(
        x: &'a [Vector<X, N>],
        gate: &'a [Vector<G, N>],
        tokens: u32,
        experts: u32,
        model_vectors: u32,
        x_vectors: usize,
        gate_vectors: usize,
        #[comptime] blueprint: DenseBlueprint,
    ) -> Self {
        Factors::<'a, X, G, N> {
            x,
            gate,
            tokens,
            experts,
            model_vectors,
            x_vectors,
            gate_vectors,
            blueprint,
        }
    }

    /// Sums of this plane, lane by lane. `stage` is `[model_planes, expert_planes, experts, tokens]`.
    fn multiply(&self, stage: &mut Shared<[f32]>) {
        let blueprint = comptime!(self.blueprint);
        let lane = UNIT_POS_X;
        let expert_plane = UNIT_POS_Y % blueprint.expert_planes;
        let model_plane = UNIT_POS_Y / blueprint.expert_planes;
        let cube_experts = comptime!(blueprint.cube_experts());
        let first_expert = CUBE_POS_X * cube_experts + expert_plane * blueprint.experts;
        let first_token = CUBE_POS_Z * blueprint.tokens;
        let first_vector = (CUBE_POS_Y * blueprint.model_planes + model_plane)
            * comptime!(blueprint.steps * blueprint.plane)
            + lane;

        // All of the gate first: it comes from furthest away.
        let mut gates =
            Array::<Vector<G, N>>::new(comptime!((blueprint.steps * blueprint.experts) as usize));
        #[unroll]
        for step in 0..blueprint.steps {
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
        let mut sums = Array::<f32>::new(comptime!(blueprint.sums() as usize));
        #[unroll]
        for i in 0..comptime!(blueprint.sums()) {
            sums[i as usize] = 0.0f32;
        }
        #[unroll]
        for step in 0..blueprint.steps {
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
                    let mut sum = sums[(e * blueprint.tokens + t) as usize];
                    let mut product = values.extract(0usize) * factors.extract(0usize);
                    #[unroll]
                    for j in 1..N::value() {
                        product += values.extract(j) * factors.extract(j);
                    }
                    if comptime!(blueprint.even) {
                        sum += product;
                    } else {
                        sum += select(inside, product, 0.0f32);
                    }
                    sums[(e * blueprint.tokens + t) as usize] = sum;
                }
            }
        }

        // The lanes' sums become the plane's: as long as a lane holds several, it hands over half of them for the other half.
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
                    let given = select(upper, low, high);
                    let kept = select(upper, high, low);
                    sums[i as usize] = kept + shuffle_xor(given, mask, blueprint.select.target);
                }
                first += select(upper, half, 0u32);
            } else {
                sums[0] += shuffle_xor(sums[0], mask, blueprint.select.target);
                spare = spare || upper;
            }
        }
        let plane_sums = comptime!(blueprint.sums());
        if !spare {
            #[unroll]
            for i in 0..comptime!(blueprint.left()) {
                stage[(UNIT_POS_Y * plane_sums + first + i) as usize] = sums[i as usize];
            }
        }
    }

    /// Sums of this plane by the tensor cores: tiles of 16 experts by 8 tokens, two at a time from 32 columns of which each lane
    /// has eight in a row of `x` and of the gate. Which column is which makes no difference to the sum.
    fn multiply_tiles(&self, stage: &mut Shared<[f32]>) {
        let blueprint = comptime!(self.blueprint);
        let dtype = comptime!(blueprint.tiles.unwrap_or_default());
        let row = UNIT_POS_X / 4;
        let quarter = UNIT_POS_X % 4;
        let first_expert = CUBE_POS_X * 16;
        let first_token = CUBE_POS_Z * blueprint.tokens;
        let low = min(first_expert + row, self.experts - 1) as usize * self.gate_vectors;
        let high = min(first_expert + row + 8, self.experts - 1) as usize * self.gate_vectors;
        let first_vector = (CUBE_POS_Y * blueprint.model_planes + UNIT_POS_Y)
            * comptime!(blueprint.steps * 4)
            + quarter;

        // All of the gate first: it comes from furthest away.
        let mut gates =
            Array::<Vector<u32, Const<4>>>::new(comptime!(2 * blueprint.steps as usize));
        #[unroll]
        for step in 0..blueprint.steps {
            let vector = first_vector + step * 4;
            gates[comptime!(2 * step as usize)] = self.words(self.gate, low, vector);
            gates[comptime!(2 * step as usize + 1)] = self.words(self.gate, high, vector);
        }
        let groups = comptime!(blueprint.tokens / 8);
        let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(groups as usize));
        #[unroll]
        for group in 0..groups {
            sums[group as usize] = Vector::new(0.0f32);
        }
        #[unroll]
        for step in 0..blueprint.steps {
            let vector = first_vector + step * 4;
            let low = gates[comptime!(2 * step as usize)];
            let high = gates[comptime!(2 * step as usize + 1)];
            #[unroll]
            for group in 0..groups {
                let token = min(first_token + group * 8 + row, self.tokens - 1);
                let values = self.words(self.x, token as usize * self.x_vectors, vector);
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
                let place = expert * blueprint.tokens + token + comptime!(i % 2);
                stage[(plane + place) as usize] =
                    sums[group as usize].extract(comptime!(i as usize));
            }
        }
    }

    /// A vector of eight 16-bit values as words, zeros past the end of the row.
    fn words<E: Float>(
        &self,
        matrix: &[Vector<E, N>],
        row: usize,
        vector: u32,
    ) -> Vector<u32, Const<4>> {
        if comptime!(self.blueprint.even) {
            Vector::<u32, Const<4>>::reinterpret(matrix[row + vector as usize])
        } else {
            let inside = vector < self.model_vectors;
            let vector = select(inside, vector, 0u32);
            let words = Vector::<u32, Const<4>>::reinterpret(matrix[row + vector as usize]);
            select(inside, words, Vector::new(0u32))
        }
    }
}

/// Multiplies a few tokens by the gate in partial sums, and routes them.
///
/// - `x`: `[tokens, d_model]`, `gate`: `[experts, d_model]`, rows of vectors
/// - `partial`: `[stretches, tokens, experts]`, scratch
/// - `arrived`: one number that is 0 between launches
/// - the rest as for `select_kernel`
#[cube(launch_unchecked, address_type = "dynamic")]
// One condition is the kernel's, the other the argument's: CubeCL tells them apart by their nesting.
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
pub(crate) fn dense_kernel<X: Float, G: Float, P: Int, N: Size, M: Size>(
    x: &[Vector<X, N>],
    gate: &[Vector<G, N>],
    partial: &mut [Vector<f32, M>],
    arrived: &mut [Atomic<u32>],
    bias: ComptimeOption<&[Vector<f32, M>]>,
    padding: ComptimeOption<&[P]>,
    weights: &mut [f32],
    ids: &mut [i32],
    tokens: u32,
    experts: u32,
    model_vectors: u32,
    x_vectors: usize,
    gate_vectors: usize,
    scale: f32,
    none: f32,
    #[comptime] blueprint: DenseBlueprint,
    #[define(X, G, P)] _dtypes: [ElemType; 3],
) {
    let cube_experts = comptime!(blueprint.cube_experts());
    let cube_sums = comptime!(cube_experts * blueprint.tokens);
    let mut stage =
        Shared::<[f32]>::new_slice(comptime!((cube_sums * blueprint.model_planes) as usize));
    // The cube that comes last would otherwise wait for the bias, which comes from as far away as the gate.
    let mut bias_stage = Shared::<[Vector<f32, M>]>::new_slice(comptime!(if blueprint.finish {
        blueprint.select.row_vectors() as usize
    } else {
        1
    }));
    #[comptime]
    if let ComptimeOption::Some(bias) = bias {
        if comptime!(blueprint.finish) {
            let mut vector = UNIT_POS;
            while vector < experts / M::value() as u32 {
                bias_stage[vector as usize] = bias[vector as usize];
                vector += CUBE_DIM;
            }
        }
    }
    let factors = Factors::<X, G, N>::new(
        x,
        gate,
        tokens,
        experts,
        model_vectors,
        x_vectors,
        gate_vectors,
        blueprint,
    );
    if comptime!(blueprint.tiles.is_some()) {
        factors.multiply_tiles(&mut stage);
    } else {
        factors.multiply(&mut stage);
    }
    sync_cube();

    // The planes' sums become the cube's.
    let size = M::value() as u32;
    let columns = experts / size;
    let mut at = UNIT_POS;
    while at < comptime!(cube_experts * blueprint.tokens) / size {
        let token = at / (cube_experts / size);
        let expert = at % (cube_experts / size) * size;
        let mut total = Vector::<f32, M>::new(0.0f32);
        #[unroll]
        for i in 0..M::value() {
            let place = (expert + i as u32) * blueprint.tokens + token;
            let mut sum = stage[place as usize];
            #[unroll]
            for plane in 1..blueprint.model_planes {
                sum += stage[(plane * cube_sums + place) as usize];
            }
            total.insert(i, sum);
        }
        let column = (CUBE_POS_X * cube_experts + expert) / size;
        let token = CUBE_POS_Z * blueprint.tokens + token;
        if token < tokens && column < columns {
            let row = (CUBE_POS_Y * tokens + token) as usize;
            partial[row * columns as usize + column as usize] = total;
        }
        at += CUBE_DIM;
    }

    if comptime!(blueprint.finish) {
        let near: ComptimeOption<&[Vector<f32, M>]> = bias.map(|_far| &bias_stage[..]);
        if arrives_last(arrived, CUBE_COUNT as u32, blueprint.select.target) {
            if UNIT_POS == 0 {
                arrived[0].store(0u32);
            }
            let mut token = UNIT_POS_Y;
            while token < tokens {
                let at = token as usize * columns as usize;
                let part_vectors = tokens as usize * columns as usize;
                let row = Row::<f32, M>::new(
                    &*partial,
                    near,
                    at,
                    part_vectors,
                    columns,
                    UNIT_POS_X,
                    none,
                    blueprint.select,
                );
                let padded: ComptimeOption<bool> =
                    padding.map(|padding| padding[token as usize] != P::from_int(0));
                let padded = padded.unwrap_or_else(|| false);
                let first = token as usize * blueprint.select.k as usize;
                row.write(weights, ids, first, scale, padded, true);
                // The next row takes this one's place in shared memory.
                sync_group(blueprint.select.target);
                token += CUBE_DIM_Y;
            }
        }
    }
}
