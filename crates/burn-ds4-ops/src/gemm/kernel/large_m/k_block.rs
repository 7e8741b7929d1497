//! What a cube of the large-M kernel does between two barriers.

use cubecl::prelude::*;

use super::blueprint::{K_BLOCK, K_BLOCK_VEC8S, LargeMBlueprint, ROW_PITCH, ROW_TILES};
use super::problem::{LargeMPairs, Problem};
use crate::caps::Target;
use crate::gemm::kernel::epilogue::{add_scaled, zero_sums};
use crate::gemm::kernel::input::{ordered_vec8, read_vec8, vec8_at, vec8_slot};
use crate::gemm::kernel::weights::{TwoRows, WeightFormat, WeightReader, rare_bits, weight_x2};
use crate::intrinsics::{ballot, modulo, multiply_tiles};

/// A lane's part of the weights of a K-block: 16 bytes of each row for every K-step, and a scale
/// (FP8) or the code of a scale (FP4) for each row; for every K-step where its columns have one.
#[derive(CubeType)]
pub(super) struct KBlockWeights {
    words: Array<Vector<u32, Const<4>>>,
    scales: Array<u32>,
}

/// K-steps of a K-block.
const fn k_steps(format: WeightFormat) -> u32 {
    K_BLOCK / format.k_step()
}

/// Scales of a row of a lane in a K-block.
const fn row_scales(format: WeightFormat) -> u32 {
    match format {
        WeightFormat::Fp8Blocks32 => k_steps(format),
        _ => 1,
    }
}

#[cube]
impl KBlockWeights {
    pub fn new(#[comptime] format: WeightFormat) -> KBlockWeights {
        KBlockWeights {
            words: Array::new(comptime!((k_steps(format) * 2 * ROW_TILES) as usize)),
            scales: Array::new(comptime!((row_scales(format) * 2 * ROW_TILES) as usize)),
        }
    }

    pub fn copy_from(&mut self, other: &KBlockWeights, #[comptime] format: WeightFormat) {
        #[unroll]
        for i in 0..comptime!((k_steps(format) * 2 * ROW_TILES) as usize) {
            self.words[i] = other.words[i];
        }
        #[unroll]
        for i in 0..comptime!((row_scales(format) * 2 * ROW_TILES) as usize) {
            self.scales[i] = other.scales[i];
        }
    }
}

/// Reads the weights of a K-block, from column `first` on, and their scales; `rows` are those of
/// each tile.
#[cube]
pub(super) fn fetch_weights(
    weights: &WeightReader<'_>,
    rows: &Sequence<TwoRows>,
    first: u32,
    quarter: u32,
    block: &mut KBlockWeights,
) {
    let format = comptime!(weights.blueprint.format);
    #[unroll]
    for k_step in 0..comptime!(k_steps(format)) {
        let column =
            first + comptime!(k_step * format.k_step()) + quarter * comptime!(format.columns());
        #[unroll]
        for m in 0..rows.len() {
            let rows = rows.index(m);
            let to = comptime!((k_step * 2 * ROW_TILES) as usize + 2 * m);
            block.words[to] = weights.vector(rows.low, column);
            block.words[comptime!(to + 1)] = weights.vector(rows.high, column);
        }
    }
    #[unroll]
    for step in 0..comptime!(row_scales(format)) {
        #[unroll]
        for m in 0..rows.len() {
            let rows = rows.index(m);
            let to = comptime!((step * 2 * ROW_TILES) as usize + 2 * m);
            block.scales[to] = fetch_scale(weights, rows.low_scale, first, quarter, step);
            block.scales[comptime!(to + 1)] =
                fetch_scale(weights, rows.high_scale, first, quarter, step);
        }
    }
}

#[cube]
fn fetch_scale(
    weights: &WeightReader<'_>,
    row: usize,
    first: u32,
    quarter: u32,
    #[comptime] step: u32,
) -> u32 {
    let format = comptime!(weights.blueprint.format);
    match comptime!(format) {
        WeightFormat::Fp4(_) => {
            let column = first + quarter * 32;
            (weights.scale_word(row, column) >> weights.scale_shift(row, column)) & 255
        }
        WeightFormat::Fp8 => weights.scales[weights.scale_index(row, first)].extract(0usize),
        WeightFormat::Fp8Blocks32 => {
            let column =
                first + comptime!(step * format.k_step()) + quarter * comptime!(format.columns());
            weights.scales[weights.scale_index(row, column)].extract(0usize)
        }
        WeightFormat::Dense => 0u32.runtime(),
    }
}

/// Whether any weight or scale of a plane takes the slow path.
#[cube]
pub(super) fn any_rare(
    block: &KBlockWeights,
    #[comptime] format: WeightFormat,
    #[comptime] target: Target,
) -> bool {
    if comptime!(format == WeightFormat::Dense) {
        false.runtime()
    } else {
        let mut rare = 0u32;
        #[unroll]
        for i in 0..comptime!(k_steps(format) * 2 * ROW_TILES) {
            let scales = comptime!(row_scales(format) * 2 * ROW_TILES);
            let scale = block.scales[comptime!((i % scales) as usize)];
            rare |= rare_bits(block.words[i as usize], scale, format);
        }
        ballot(rare != 0, target) != 0
    }
}

/// Adds the products of a K-block. `at` is the index of the lane's first vec8 of the first tile of
/// `x`.
#[cube]
pub(super) fn multiply_k_block(
    weights: &KBlockWeights,
    stages: &Shared<[Vector<u32, Const<4>>]>,
    at: u32,
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] rare: bool,
    #[comptime] blueprint: LargeMBlueprint,
) {
    let format = comptime!(blueprint.input.format);
    let x_tiles = comptime!(blueprint.x_tiles);
    // FP8 weights are multiplied without their scales; a K-block has one scale.
    let mut block_sums = zero_sums(comptime!(match format {
        WeightFormat::Fp8 => ROW_TILES * x_tiles,
        _ => 1,
    }));
    #[unroll]
    for k_step in 0..comptime!(k_steps(format)) {
        #[unroll]
        for u in 0..comptime!(format.vec8s()) {
            let mut pairs = Array::<u32>::new(comptime!(8 * ROW_TILES as usize));
            #[unroll]
            for r in 0..comptime!(2 * ROW_TILES) {
                let words = weights.words[comptime!((k_step * 2 * ROW_TILES + r) as usize)];
                let of_step = comptime!(k_step % row_scales(format) * 2 * ROW_TILES);
                #[unroll]
                for i in 0..4usize {
                    pairs[comptime!(4 * r as usize + i)] = weight_x2(
                        words,
                        weights.scales[comptime!((of_step + r) as usize)],
                        comptime!(u as usize),
                        i,
                        format,
                        false,
                        rare,
                    );
                }
            }
            #[unroll]
            for n in 0..x_tiles {
                let slot = comptime!(n * 8 * ROW_PITCH + (k_step * format.vec8s() + u) * 4);
                let vec8 = stages[(at + slot) as usize];
                #[unroll]
                for m in 0..ROW_TILES {
                    let sum_index = comptime!((m * x_tiles + n) as usize);
                    let first = comptime!(8 * m as usize);
                    #[unroll]
                    for half in 0..2usize {
                        let sum = if comptime!(format == WeightFormat::Fp8) {
                            block_sums[sum_index]
                        } else {
                            sums[sum_index]
                        };
                        let sum = multiply_tiles(
                            pairs[comptime!(first + 2 * half)],
                            pairs[comptime!(first + 4 + 2 * half)],
                            pairs[comptime!(first + 2 * half + 1)],
                            pairs[comptime!(first + 4 + 2 * half + 1)],
                            vec8.extract(comptime!(2 * half)),
                            vec8.extract(comptime!(2 * half + 1)),
                            sum,
                            "bf16",
                        );
                        if comptime!(format == WeightFormat::Fp8) {
                            block_sums[sum_index] = sum;
                        } else {
                            sums[sum_index] = sum;
                        }
                    }
                }
            }
        }
    }
    if comptime!(format == WeightFormat::Fp8) {
        #[unroll]
        for m in 0..ROW_TILES {
            let low = f32::reinterpret(weights.scales[comptime!(2 * m as usize)]);
            let high = f32::reinterpret(weights.scales[comptime!(2 * m as usize + 1)]);
            #[unroll]
            for n in 0..x_tiles {
                let sum_index = comptime!((m * x_tiles + n) as usize);
                sums[sum_index] = add_scaled(sums[sum_index], block_sums[sum_index], low, high);
            }
        }
    }
}

/// The rows of `x` of a cube.
#[derive(CubeType)]
pub(super) struct XRows<'a, X: Numeric, N: Size> {
    x: &'a [Vector<X, N>],
    x_vectors: usize,
    pairs: &'a LargeMPairs,
    problem: &'a Problem,
    width: u32,
    #[cube(comptime)]
    blueprint: LargeMBlueprint,
}

#[cube]
impl<'a, X: Numeric, N: Size> XRows<'a, X, N> {
    pub fn new(
        x: &'a [Vector<X, N>],
        x_vectors: usize,
        pairs: &'a LargeMPairs,
        problem: &'a Problem,
        width: u32,
        #[comptime] blueprint: LargeMBlueprint,
    ) -> XRows<'a, X, N> {
        XRows::<'a, X, N> {
            x,
            x_vectors,
            pairs,
            problem,
            width,
            blueprint,
        }
    }

    /// Reads this unit's part of a K-block.
    pub fn fetch(&self, k_block: u32, x_vec8s: &mut Array<Vector<u32, Const<4>>>) {
        let blueprint = comptime!(self.blueprint);
        let terms = comptime!(blueprint.input.terms);
        #[unroll]
        for i in 0..comptime!(blueprint.unit_vec8s()) {
            let index = UNIT_POS + comptime!(i * blueprint.planes * 32);
            let u = index % K_BLOCK_VEC8S;
            let shared_row = index / K_BLOCK_VEC8S;
            let at = self.problem.start + min(shared_row / terms, self.problem.count - 1);
            let x_row = if comptime!(blueprint.input.permuted) {
                at * terms + modulo(shared_row, terms)
            } else {
                self.pairs.at(self.problem, at) / self.pairs.per_row
            };
            let column = if comptime!(blueprint.input.permuted) {
                vec8_at(u, blueprint.input.format) * 8
            } else {
                u * 8
            };
            let inside = k_block * K_BLOCK + column < self.width;
            let read = if comptime!(blueprint.k_aligned) {
                k_block * K_BLOCK_VEC8S + u
            } else {
                select(inside, k_block * K_BLOCK_VEC8S + u, 0u32)
            };
            let row = x_row as usize * self.x_vectors;
            let term = modulo(shared_row, terms);
            let mut words =
                Array::<Vector<u32, Const<4>>>::new(comptime!(blueprint.input.vectors() as usize));
            read_vec8(self.x, row, read, &mut words, 0u32, blueprint.input);
            let mut pairs = ordered_vec8::<X, N>(&words, 0u32, term, blueprint.input);
            if comptime!(!blueprint.k_aligned) {
                pairs = select(inside, pairs, Vector::new(0u32));
            }
            x_vec8s[i as usize] = pairs;
        }
    }
}

/// Stores it in shared memory, in the order in which lanes read it.
#[cube]
pub(super) fn store_x(
    x_vec8s: &Array<Vector<u32, Const<4>>>,
    stage: u32,
    stages: &mut Shared<[Vector<u32, Const<4>>]>,
    #[comptime] blueprint: LargeMBlueprint,
) {
    let x_rows = comptime!(8 * blueprint.x_tiles);
    #[unroll]
    for i in 0..comptime!(blueprint.unit_vec8s()) {
        let index = UNIT_POS + comptime!(i * blueprint.planes * 32);
        let u = index % K_BLOCK_VEC8S;
        let x_row = index / K_BLOCK_VEC8S;
        let at = if comptime!(blueprint.input.permuted) {
            u
        } else {
            vec8_slot(u, blueprint.input.format)
        };
        let offset = stage * comptime!(x_rows * ROW_PITCH) + x_row * ROW_PITCH + at;
        if x_row < x_rows {
            stages[offset as usize] = x_vec8s[i as usize];
        }
    }
}
