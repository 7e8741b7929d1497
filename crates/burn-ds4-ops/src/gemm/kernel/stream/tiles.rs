use cubecl::prelude::*;

use super::blueprint::StreamBlueprint;
use super::pipeline::{Stream, new_ring};
use crate::gemm::kernel::K_STEPS;
use crate::gemm::kernel::epilogue::{Results, add_terms, gated_value};
use crate::gemm::kernel::groups::{Groups, Pairing};
use crate::gemm::kernel::input::{
    SCALE_VEC8S, load_vec8, read_vec8, scale_index, scaled_vec8, vec8_slot,
};
use crate::gemm::kernel::weights::{MatrixStack, WeightReader};
use crate::intrinsics::modulo;

/// Rows of `x`, the matrices of a stack that they are multiplied by, and where the products go.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StreamProblem<I: Int, Y: Float> {
    /// The matrix of every pair, with [ids](Pairing::Ids).
    pub ids: ComptimeOption<Box<[I]>>,
    /// Factors of gated pairs.
    pub scores: ComptimeOption<Box<[f32]>>,
    pub matrices: MatrixStack<Vector<u32, Const<4>>>,
    /// `[pairs, rows]`; gated, `[pairs, terms, rows / 2]` in `bf16`, in the order of
    /// [`permuted_column`].
    pub output: Box<[Y]>,
    pub pairs: u32,
    /// Neighbouring pairs with [ids](Pairing::Ids) that have the same row of `x`.
    pub pairs_per_row: u32,
    /// The limit of gates.
    pub limit: f32,
}

/// The tiles that a cube multiplies: one of `count` equal ranges of all tiles.
#[derive(CubeType, Clone, Copy)]
pub(super) struct TileRange {
    /// Index of the range, and number of ranges.
    pub index: u32,
    pub count: u32,
}

/// Shared memory of a cube: the pipeline of weights, rows of `x`, and the partials of its planes.
#[derive(CubeType)]
pub(super) struct SharedStorage {
    pub ring: Shared<[Vector<u32, Const<4>>]>,
    x_rows: Shared<[Vector<u32, Const<4>>]>,
    partials: Shared<[Vector<f32, Const<4>>]>,
}

#[cube]
impl SharedStorage {
    /// Allocates enough for either of two blueprints, of which a cube uses one.
    pub fn new(
        #[comptime] one: StreamBlueprint,
        #[comptime] other: StreamBlueprint,
    ) -> SharedStorage {
        let planes = comptime!(largest(one.cube_planes, other.cube_planes));
        let x_rows = comptime!(largest(
            one.x_rows * one.row_pitch(),
            other.x_rows * other.row_pitch()
        ));
        let partials = comptime!(largest(
            one.partial_tiles * one.plane_groups * one.planes,
            other.partial_tiles * other.plane_groups * other.planes
        ));
        SharedStorage {
            ring: new_ring(planes),
            x_rows: Shared::new_slice(comptime!(x_rows as usize)),
            partials: Shared::new_slice(comptime!(partials as usize * 32)),
        }
    }
}

const fn largest(a: u32, b: u32) -> u32 {
    if a > b { a } else { b }
}

/// Multiplies a cube's range of tiles of a problem. Every unit of the cube must call this.
#[cube]
pub(super) fn multiply_tiles_of<X: Float, I: Int, Y: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    problem: &mut StreamProblem<I, Y>,
    groups: &Groups,
    range: TileRange,
    storage: &mut SharedStorage,
    #[comptime] blueprint: StreamBlueprint,
) {
    let gated = comptime!(blueprint.gated);
    let weights = WeightReader::new(&problem.matrices, blueprint.reader());
    let row = UNIT_POS_X / 4;
    let quarter = UNIT_POS_X % 4;
    let plane = modulo(UNIT_POS_Y, blueprint.planes);
    let plane_group = UNIT_POS_Y / blueprint.planes;
    let terms = comptime!(blueprint.input.terms);
    let k_block = comptime!(blueprint.input.format.k_block());
    let stride = comptime!(blueprint.plane_groups);
    let (rows, width) = (weights.stack.rows, weights.stack.columns);
    let mut stream = Stream::new(weights, quarter, storage.ring.clone(), blueprint);
    let mut codes = Array::<u32>::new(comptime!(2 * K_STEPS as usize));
    let x_start = (modulo(row, blueprint.x_rows) * comptime!(blueprint.row_pitch())) as usize;

    // A tile has 16 rows of the output, or 8 with their gates.
    let outputs = if comptime!(gated.is_some()) {
        rows / 2
    } else {
        rows
    };
    let tile_outputs = comptime!(blueprint.tile_outputs());
    let to_high = if comptime!(gated.is_some()) {
        outputs
    } else {
        8u32.runtime()
    };
    let tiles = (outputs + tile_outputs - 1) / tile_outputs;
    // All tiles of all groups are divided equally among the cubes; the first cubes have a tile more
    // if there is a remainder. Nothing can start before this is known, so there are as few
    // divisions as possible.
    let grouped = comptime!(blueprint.pairing != Pairing::One);
    let all_tiles = if comptime!(grouped) {
        groups.count() * tiles
    } else {
        tiles
    };
    let least = all_tiles / range.count;
    let more = all_tiles - least * range.count;
    let mut at = range.index * least + min(range.index, more);
    let end = at + least + select(range.index < more, 1u32, 0u32);
    while at < end {
        let group = if comptime!(grouped) {
            at / tiles
        } else {
            0u32.runtime()
        };
        let first_tile = at - group * tiles;
        let last_tile = min(first_tile + (end - at), tiles);
        at += last_tile - first_tile;
        let matrix = groups.expert(group);
        let start = groups.start(group);
        let count = groups.start(group + 1) - start;
        let mut k_blocks = (last_tile - first_tile + comptime!(stride - 1) - plane_group) / stride
            * blueprint.plane_k_blocks;
        if comptime!(blueprint.planes * stride < blueprint.cube_planes) {
            k_blocks = select(plane_group < stride, k_blocks, 0u32);
        }
        let mut pass = 0u32;
        while pass < count {
            let mut taken = 0u32;
            // Fetch `x` first, because all planes wait for it, and then the weights.
            let mut fetched = Array::<Vector<u32, Const<4>>>::new(comptime!(
                (blueprint.unit_vec8s() * blueprint.input.read_vectors()) as usize
            ));
            #[unroll]
            for i in 0..comptime!(blueprint.unit_vec8s()) {
                let at = UNIT_POS + comptime!(i * blueprint.cube_units());
                let x_row = min(
                    at / comptime!(blueprint.row_vec8s()),
                    comptime!(blueprint.x_rows - 1),
                );
                let vec8 = at % comptime!(blueprint.row_vec8s());
                let pair = groups.pair(start + min(pass + x_row / terms, count - 1));
                let inside = vec8 * 8 < width;
                let source_row = if comptime!(blueprint.pairing == Pairing::Ids) {
                    pair / problem.pairs_per_row
                } else {
                    pair
                };
                let source = source_row as usize * x_vectors;
                let read = select(inside, vec8, 0u32);
                let to = comptime!(i * blueprint.input.read_vectors());
                if comptime!(blueprint.input.f16_input) {
                    read_vec8(x, source, read, &mut fetched, to, blueprint.input);
                } else {
                    let pairs = load_vec8(x, source, read, modulo(x_row, terms), blueprint.input);
                    fetched[to as usize] = select(inside, pairs, Vector::new(0u32));
                }
            }
            if taken < k_blocks {
                let own = min((first_tile + plane_group) * tile_outputs + row, outputs - 1);
                stream.seek(matrix, own, own + to_high, plane * k_block, x_start);
                stream.fetch();
            }
            #[unroll]
            for i in 0..comptime!(blueprint.unit_vec8s()) {
                let at = UNIT_POS + comptime!(i * blueprint.cube_units());
                let x_row = at / comptime!(blueprint.row_vec8s());
                let vec8 = at % comptime!(blueprint.row_vec8s());
                let slot = vec8_slot(vec8, blueprint.input.format);
                let offset = (x_row * comptime!(blueprint.row_pitch()) + slot) as usize;
                let from = comptime!(i * blueprint.input.read_vectors());
                if comptime!(blueprint.input.f16_input) {
                    let (pairs, scale) = scaled_vec8::<X, N>(
                        &fetched,
                        from,
                        vec8 * 8 < width,
                        modulo(x_row, terms),
                        blueprint,
                    );
                    if x_row < blueprint.x_rows {
                        storage.x_rows[offset] = pairs;
                        if vec8 % SCALE_VEC8S == 0 {
                            storage.x_rows[scale_index(x_row, vec8 / SCALE_VEC8S, blueprint)] =
                                Vector::new(u32::reinterpret(scale));
                        }
                    }
                } else if x_row < blueprint.x_rows {
                    storage.x_rows[offset] = fetched[from as usize];
                }
            }
            sync_cube();

            let mut base = first_tile;
            while base < last_tile {
                let mut filled = 0u32;
                while filled < blueprint.partial_tiles && taken < k_blocks {
                    let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
                    for block in 0..blueprint.plane_k_blocks {
                        let fetched = stream.fetched();
                        stream.load_scales(&mut codes);
                        taken += 1;
                        let has_next = taken < k_blocks;
                        if has_next {
                            let ends_tile = block + 1 == blueprint.plane_k_blocks;
                            let tile = base
                                + (filled + select(ends_tile, 1u32, 0u32)) * stride
                                + plane_group;
                            let own = min(tile * tile_outputs + row, outputs - 1);
                            let next = select(ends_tile, 0u32, block + 1);
                            let first = (next * blueprint.planes + plane) * k_block;
                            stream.seek(matrix, own, own + to_high, first, x_start);
                        }
                        sum += stream.multiply(&fetched, &storage.x_rows[..], &codes, has_next);
                    }
                    let slot = (filled * stride + plane_group) * blueprint.planes + plane;
                    storage.partials[(slot * 32 + UNIT_POS_X) as usize] = sum;
                    filled += 1;
                }
                sync_cube();
                let mut local = UNIT_POS_Y;
                while local < comptime!(blueprint.partial_tiles * stride)
                    && base + local < last_tile
                {
                    let slot = local * comptime!(blueprint.planes * 32) + UNIT_POS_X;
                    let mut sum = storage.partials[slot as usize];
                    #[unroll]
                    for p in 1..blueprint.planes {
                        sum += storage.partials[(slot + p * 32) as usize];
                    }
                    let sum = add_terms(sum, terms, blueprint.target);
                    let lane_columns = comptime!(if terms == 1 { 2u32 } else { 1u32 });
                    #[unroll]
                    for w in 0..lane_columns {
                        let of = (quarter * 2 + w) / terms;
                        let low = sum.extract(comptime!(w as usize));
                        let high = sum.extract(comptime!(w as usize + 2));
                        let own = (base + local) * tile_outputs + row;
                        let writes = modulo(quarter * 2, terms) == 0
                            && of < comptime!(blueprint.pass_pairs());
                        if writes && pass + of < count {
                            let pair = groups.pair(start + pass + of);
                            let results = Results {
                                row: pair,
                                own,
                                outputs,
                            };
                            let output = &mut problem.output[..];
                            if comptime!(gated.is_none()) {
                                results.write(output, low, high);
                            } else if own < outputs {
                                let (scores, limit) = (&problem.scores, problem.limit);
                                let target = comptime!(blueprint.target);
                                let value = gated_value(low, high, limit, scores, pair, target);
                                let next = comptime!(gated.unwrap());
                                results.write_gated::<X, Y>(output, value, terms, next);
                            }
                        }
                    }
                    local += CUBE_DIM_Y;
                }
                sync_cube();
                base += comptime!(blueprint.partial_tiles * stride);
            }
            pass += comptime!(blueprint.pass_pairs());
        }
    }
}
