//! Products of rows in E4M3, with a scale for every 128 columns, by FP8 weights.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::blueprint::{ROW_BYTES, WgmmaBoxes};
use super::ring::pair_of;
use super::tile::{BAND, place_at};
use crate::caps::Target;
use crate::gemm::kernel::large_m::problem::{LargeMPairs, Problem};
use crate::gemm::kernel::weights::{MatrixStack, WeightFormat};
use crate::intrinsics::{pack_bf16, plane_value, shared_address};
use crate::warpgroup::{
    Ring, RingBlueprint, WARPGROUP, add_scaled_dots, arrive, await_products, clear_sums,
    commit_products, declare_dots, declare_sums, exchange_words, fence_registers, multiply_shared,
    rows_descriptor, set_registers, sum,
};

/// Rows of `x` of a tile, and rows of weights. Those of weights have one scale of every block.
pub(crate) const FP8_TILE: u32 = 128;
/// Columns of a stage, which have one scale.
const K_BLOCK: u32 = 128;
/// Bytes of a tile of either operand in a stage.
const TILE_BYTES: u32 = FP8_TILE * ROW_BYTES;
/// Warpgroups that multiply 64 rows of `x` each. One more copies.
const WARPGROUPS: u32 = FP8_TILE / 64;
/// Registers of a unit that copies, and of one that multiplies.
const REGISTERS: [u32; 2] = [40, 232];

/// How [`wgmma_fp8_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fp8Blueprint {
    /// Stages of [`K_BLOCK`] columns.
    pub stages: u32,
    /// Whether outputs are written eight at a time.
    pub vectors: bool,
    pub target: Target,
}

impl Fp8Blueprint {
    pub const fn units() -> u32 {
        WARPGROUP * (1 + WARPGROUPS)
    }

    /// Shared memory of a stage, with its barriers.
    pub const fn stage_bytes() -> usize {
        2 * TILE_BYTES as usize + 16
    }
}

/// Multiplies rows of `x` in E4M3 by the rows of FP8 matrices: `x · Wᵀ`.
///
/// - `boxes`: what [`quantize_kernel`](super::quantize_kernel) makes of `x`, and the weights
/// - `x_scales`: `[blocks of 128 columns, rows]`
/// - `output`: `[pairs, rows]`
///
/// One unit of a cube's first warpgroup copies boxes to a ring of stages; the others multiply rows
/// of `x`, 64 each, by those of weights. Tensor cores add products of E4M3 with about 13 digits
/// after the point of the largest of them. So the sums of a stage are scaled and added to those of
/// `f32`, while the next stage is multiplied. Cubes take tile after tile.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn wgmma_fp8_kernel<Y: Float, N: Size>(
    boxes: &WgmmaBoxes,
    x_scales: &[f32],
    pairs: &LargeMPairs,
    matrices: &MatrixStack<Vector<u32, Const<4>>>,
    output: &mut [Vector<Y, N>],
    #[comptime] blueprint: Fp8Blueprint,
    #[define(Y)] _dtype: ElemType,
) {
    let Fp8Blueprint {
        stages,
        vectors,
        target,
    } = comptime!(blueprint);
    declare_sums(comptime!(FP8_TILE / 2));
    declare_dots(comptime!(FP8_TILE / 2), "dot");
    declare_dots(comptime!(FP8_TILE / 2), "next");
    let words = comptime!(TILE_BYTES / 4);
    let length = comptime!((stages * words) as usize);
    let mut x_tiles = Shared::<[u32]>::new_aligned_slice(length, 1024usize);
    let mut weight_tiles = Shared::<[u32]>::new_aligned_slice(length, 1024usize);
    let barriers = Shared::<[Barrier]>::new_slice(comptime!(2 * stages as usize));
    let mut ring = Ring::new(
        &barriers,
        comptime!(RingBlueprint {
            stages,
            landings: 1,
            planes: WARPGROUPS * WARPGROUP / 32,
            fenced: false,
        }),
    );

    let layout = &matrices.layout;
    let steps = layout.columns.div_ceil(K_BLOCK);
    let tile_rows = layout.rows.div_ceil(FP8_TILE);
    let problems = pairs.problem_count(0u32, FP8_TILE);
    let tiles = tile_rows * problems;
    let [copying, multiplying] = comptime!(REGISTERS);
    let group = plane_value(UNIT_POS / WARPGROUP, 0u32, target);
    if group == 0 {
        set_registers(copying, false);
        if UNIT_POS == 0 {
            for index in range_stepped(CUBE_POS_X, tiles, CUBE_COUNT_X) {
                let (problem, row) = place_at(index, tile_rows, problems, BAND.runtime());
                let problem = pairs.problem(problem, 0u32, FP8_TILE);
                let x_row = i32::cast_from(problem.start);
                let matrix = i32::cast_from(problem.matrix);
                let weight_row = i32::cast_from(problem.matrix * layout.rows + row * FP8_TILE);
                for step in 0..steps {
                    ring.wait_free();
                    ring.expect(comptime!(2 * TILE_BYTES));
                    let at = (ring.slot * words) as usize;
                    let end = at + words as usize;
                    let word = i32::cast_from(step * comptime!(K_BLOCK / 4));
                    let barrier = &barriers[ring.slot as usize];
                    barrier.tma_load_3d(&boxes.x, &mut x_tiles[at..end], x_row, matrix, word);
                    let to = &mut weight_tiles[at..end];
                    barrier.tma_load_2d(&boxes.weights, to, weight_row, word);
                    ring.copied();
                }
            }
        }
    } else {
        set_registers(multiplying, true);
        let own = (group - 1) * 64;
        let tiles_of_stages = Fp8Stages {
            x: rows_descriptor(shared_address(&x_tiles) + own * ROW_BYTES),
            weights: rows_descriptor(shared_address(&weight_tiles)),
        };
        let own = own + UNIT_POS % WARPGROUP / 32 * 16 + UNIT_POS % 32 / 4;
        for index in range_stepped(CUBE_POS_X, tiles, CUBE_COUNT_X) {
            let (problem, row) = place_at(index, tile_rows, problems, BAND.runtime());
            let problem = pairs.problem(problem, 0u32, FP8_TILE);
            let tile = Fp8Tile {
                problem,
                row: own,
                first: row * FP8_TILE,
            };
            let scales = Fp8Scales::new(x_scales, pairs, matrices, &tile);
            multiply_stages(&mut ring, &tiles_of_stages, &scales, steps);
            let sums = Fp8Sums::new(pairs, tile, layout.rows);
            if comptime!(vectors) {
                sums.write_vectors(output, target);
            } else {
                sums.write(output);
            }
        }
    }
}

/// What a lane has of a tile.
#[derive(CubeType, Clone, Copy)]
struct Fp8Tile {
    problem: Problem,
    /// The lower one of the lane's rows of `x`; the other one is 8 below.
    row: u32,
    /// The first row of weights.
    first: u32,
}

/// The descriptors of the first stage: of the rows of `x` of a warpgroup, and of the weights.
#[derive(CubeType)]
struct Fp8Stages {
    x: u32,
    weights: u32,
}

#[cube]
impl Fp8Stages {
    /// Starts the products of the next stage, which replace the accumulators `dots`. Returns the
    /// barrier to arrive at when they are finished.
    fn start(&self, ring: &mut Ring, #[comptime] dots: &'static str) -> u32 {
        ring.wait_full();
        let ahead = ring.slot * comptime!(TILE_BYTES / 16);
        let (x, weights) = (self.x + ahead, self.weights + ahead);
        let free = ring.free();
        fence_registers();
        #[unroll]
        for part in 0..4u32 {
            let adds = comptime!((part > 0) as u32).runtime();
            let ahead = comptime!(2 * part);
            multiply_shared(x + ahead, weights + ahead, adds, FP8_TILE, dots, "e4m3");
        }
        commit_products();
        ring.next();
        free
    }
}

/// Where the scales of a lane's rows are.
#[derive(CubeType)]
struct Fp8Scales<'a> {
    x: &'a [f32],
    weights: &'a [Vector<u32, Const<1>>],
    /// The lane's rows of `x`, of so many.
    low: u32,
    high: u32,
    rows: u32,
    /// The first scale of the rows of weights.
    weight: u32,
}

#[cube]
impl<'a> Fp8Scales<'a> {
    fn new(
        x: &'a [f32],
        pairs: &LargeMPairs,
        matrices: &'a MatrixStack<Vector<u32, Const<4>>>,
        tile: &Fp8Tile,
    ) -> Fp8Scales<'a> {
        let layout = &matrices.layout;
        let start = layout.scale_row_start(tile.first, WeightFormat::Fp8, true);
        let matrix = tile.problem.matrix as usize * layout.scales_per_matrix;
        Fp8Scales::<'a> {
            x,
            weights: &matrices.scales,
            low: pair_of(pairs, &tile.problem, tile.row),
            high: pair_of(pairs, &tile.problem, tile.row + 8),
            rows: pairs.count * pairs.matrix_count,
            weight: (matrix + start) as u32,
        }
    }

    /// Those of both rows for the columns of a stage.
    fn read(&self, step: u32) -> (f32, f32) {
        let weight = f32::reinterpret(self.weights[(self.weight + step) as usize].extract(0usize));
        let first = step * self.rows;
        let low = self.x[(first + self.low) as usize] * weight;
        let high = self.x[(first + self.high) as usize] * weight;
        (low, high)
    }
}

/// Multiplies the stages of a tile as they become full.
#[cube]
fn multiply_stages(ring: &mut Ring, stages: &Fp8Stages, scales: &Fp8Scales, steps: u32) {
    clear_sums(comptime!(FP8_TILE / 2));
    // None may be under way at the end of a turn, or `ptxas` makes them wait for each other.
    for pair in 0..steps / 2 {
        let (low, high) = scales.read(2 * pair);
        let (next_low, next_high) = scales.read(2 * pair + 1);
        let first = stages.start(ring, "dot");
        let second = stages.start(ring, "next");
        await_products(1u32);
        arrive(first);
        add_scaled_dots(low, high, FP8_TILE, "dot");
        await_products(0u32);
        arrive(second);
        add_scaled_dots(next_low, next_high, FP8_TILE, "next");
    }
    if steps % 2 == 1 {
        let (low, high) = scales.read(steps - 1);
        let last = stages.start(ring, "dot");
        await_products(0u32);
        arrive(last);
        add_scaled_dots(low, high, FP8_TILE, "dot");
    }
}

/// The sums of a lane: in its rows of `x`, for rows of weights `2 * q` and `2 * q + 1` of every
/// eight.
#[derive(CubeType)]
struct Fp8Sums<'a> {
    pairs: &'a LargeMPairs,
    tile: Fp8Tile,
    outputs: u32,
}

#[cube]
impl<'a> Fp8Sums<'a> {
    fn new(pairs: &'a LargeMPairs, tile: Fp8Tile, outputs: u32) -> Fp8Sums<'a> {
        Fp8Sums::<'a> {
            pairs,
            tile,
            outputs,
        }
    }

    /// Writes `[pairs, outputs]`, an element at a time.
    fn write<Y: Float, N: Size>(&self, output: &mut [Vector<Y, N>]) {
        #[unroll]
        for i in 0..comptime!(FP8_TILE / 2) {
            let row = self.tile.row + comptime!(i / 2 % 2 * 8);
            let column = self.tile.first + UNIT_POS % 4 * 2 + comptime!(i / 4 * 8 + i % 2);
            if row < self.tile.problem.count && column < self.outputs {
                let pair = pair_of(self.pairs, &self.tile.problem, row);
                let at = pair as usize * self.outputs as usize + column as usize;
                output[at] = Vector::cast_from(sum(i));
            }
        }
    }

    /// Writes `[pairs, outputs]` in `bf16`, eight outputs at a time.
    fn write_vectors<Y: Float, N: Size>(
        &self,
        output: &mut [Vector<Y, N>],
        #[comptime] target: Target,
    ) {
        #[unroll]
        for part in 0..comptime!(FP8_TILE / 16) {
            let mut words = Array::<u32>::new(4usize);
            #[unroll]
            for i in 0..4u32 {
                let first = comptime!(part / 2 * 16 + i * 4 + part % 2 * 2);
                words[i as usize] = pack_bf16(sum(first), sum(comptime!(first + 1)));
            }
            let vector = exchange_words(&mut words, target);
            let row = self.tile.row + comptime!(part % 2 * 8);
            let column = self.tile.first + comptime!(part / 2 * 32) + UNIT_POS % 4 * 8;
            if row < self.tile.problem.count && column < self.outputs {
                let pair = pair_of(self.pairs, &self.tile.problem, row);
                let at = pair as usize * (self.outputs / 8) as usize + (column / 8) as usize;
                output[at] = Vector::reinterpret(vector);
            }
        }
    }
}
