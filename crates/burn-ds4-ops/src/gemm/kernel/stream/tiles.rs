use cubecl::prelude::*;

use cubecl::std::FastDivmod;

use super::blueprint::StreamBlueprint;
use super::load::load_x;
use super::pass::{Pass, TileRange};
use super::pipeline::{Stream, new_ring};
use super::place::LanePlace;
use crate::comptime_option::ComptimeOption;
use crate::gemm::kernel::epilogue::{
    Results, RowSums, add_terms, gated_value, lane_rows, zero_sums,
};
use crate::gemm::kernel::groups::{Groups, PairSizes, Pairing};
use crate::gemm::kernel::weights::{K_STEPS, MatrixStack, WeightReader};
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
    pub sizes: PairSizes,
    /// The slots: with [ids](Pairing::Ids), the pairs of a token have the same row of `x`.
    pub slots: FastDivmod<u32>,
    /// Tiles of a matrix.
    pub tiles: FastDivmod<u32>,
    /// The limit of gates.
    pub limit: f32,
}

#[cube]
impl<I: Int, Y: Float> StreamProblem<I, Y> {
    /// Rows of the output: a gate is none of them.
    fn outputs(&self, #[comptime] blueprint: StreamBlueprint) -> u32 {
        if comptime!(blueprint.gated.is_some()) {
            self.matrices.layout.rows / 2
        } else {
            self.matrices.layout.rows
        }
    }

    /// Tiles of a matrix, as a number.
    pub fn matrix_tiles(&self, #[comptime] blueprint: StreamBlueprint) -> u32 {
        let tile_outputs = comptime!(blueprint.tile_outputs());
        (self.outputs(blueprint) + comptime!(tile_outputs - 1)) / tile_outputs
    }

    /// All tiles of all groups.
    pub fn tiles_of(&self, groups: &Groups, #[comptime] blueprint: StreamBlueprint) -> u32 {
        if comptime!(blueprint.pairing == Pairing::One) {
            self.matrix_tiles(blueprint)
        } else {
            groups.count() * self.matrix_tiles(blueprint)
        }
    }
}

/// Shared memory of a cube: the pipeline of weights, rows of `x`, and the partials of its planes.
#[derive(CubeType)]
pub(in crate::gemm::kernel) struct SharedStorage {
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
        let ring = comptime!(largest(one.ring_vectors(), other.ring_vectors()));
        let x_rows = comptime!(largest(one.shared_vec8s(), other.shared_vec8s()));
        let partials = comptime!(largest(one.partials(), other.partials()));
        SharedStorage {
            ring: new_ring(ring),
            x_rows: Shared::new_slice(comptime!(x_rows.max(1) as usize)),
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
    let quarter = UNIT_POS_X % 4;
    let terms = comptime!(blueprint.input.terms);
    let stride = comptime!(blueprint.concurrent_tiles);
    let x_tiles = comptime!(blueprint.x_tiles());
    let x_loads = comptime!(blueprint.x_loads());
    let tile_partials = comptime!(blueprint.tile_partials());
    let place = LanePlace::new(problem.outputs(blueprint), blueprint);
    let mut stream = Stream::new(weights, quarter, storage.ring.clone(), blueprint);
    let mut codes = Array::<u32>::new(comptime!(2 * K_STEPS as usize));

    let tile_outputs = comptime!(blueprint.tile_outputs());
    let matrix_tiles = problem.matrix_tiles(blueprint);
    let mut pass = Pass::first_of(range, &problem.tiles, matrix_tiles, groups);
    while pass.has_pairs() {
        let mut taken = 0u32;
        let k_blocks = pass.k_blocks(&place, blueprint);
        let last_tile = pass.last_tile;
        pass.tile = pass.first_tile;
        if comptime!(x_loads == 1) {
            load_x::<X, N>(
                x,
                x_vectors,
                &problem.slots,
                groups,
                &pass,
                &place,
                &mut stream,
                &mut storage.x_rows,
            );
        }
        if comptime!(blueprint.reads_ahead()) && k_blocks > 0 {
            stream.prefetch_x(&storage.x_rows[..], 0u32);
        }
        while pass.tile < last_tile {
            let base = pass.tile;
            // This plane's tiles of those whose partials fit, where it comes back to them.
            let tiles = if comptime!(x_loads > 1) {
                min(
                    (last_tile - base + comptime!(stride - 1) - place.concurrent_tile) / stride,
                    blueprint.partial_tiles.runtime(),
                )
            } else {
                blueprint.partial_tiles.runtime()
            };
            for load in 0..x_loads {
                if comptime!(x_loads > 1) {
                    pass.x_load = load;
                    load_x::<X, N>(
                        x,
                        x_vectors,
                        &problem.slots,
                        groups,
                        &pass,
                        &place,
                        &mut stream,
                        &mut storage.x_rows,
                    );
                }
                let mut filled = 0u32;
                while filled < tiles && taken < k_blocks {
                    let mut sums = zero_sums(x_tiles);
                    if comptime!(x_loads > 1 && !blueprint.x_in_registers) && load > 0 {
                        let slot = place.partial_slot(filled, blueprint);
                        #[unroll]
                        for x_tile in 0..x_tiles {
                            sums[x_tile as usize] =
                                storage.partials[(slot + comptime!(32 * x_tile)) as usize];
                        }
                    }
                    for block in 0..blueprint.x_k_blocks {
                        let fetched = stream.fetched();
                        stream.load_scales(&mut codes);
                        taken += 1;
                        let has_next = taken < k_blocks;
                        if has_next {
                            let (before, next) = pass.next_k_block(block, filled, tiles, blueprint);
                            stream.seek_tile(&place, pass.matrix, base + before * stride, next);
                        }
                        let products =
                            stream.multiply(&fetched, &storage.x_rows[..], &codes, has_next);
                        #[unroll]
                        for x_tile in 0..comptime!(x_tiles as usize) {
                            sums[x_tile] += products[x_tile];
                        }
                    }
                    let mut slot = place.partial_slot(filled, blueprint);
                    if comptime!(x_loads > 1 && blueprint.x_in_registers) {
                        slot += load * comptime!(32 * x_tiles * blueprint.planes);
                    }
                    #[unroll]
                    for x_tile in 0..x_tiles {
                        storage.partials[(slot + comptime!(32 * x_tile)) as usize] =
                            sums[x_tile as usize];
                    }
                    filled += 1;
                }
            }
            sync_cube();
            let mut local = UNIT_POS_Y;
            while local < comptime!(blueprint.partial_tiles * stride * x_tiles)
                && base + local / x_tiles < last_tile
            {
                let x_tile = modulo(local, x_tiles);
                let slot = local / x_tiles * comptime!(tile_partials * x_tiles) + x_tile;
                let slot = slot * 32 + UNIT_POS_X;
                let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
                #[unroll]
                for split in 0..blueprint.k_splits {
                    let at = slot + split * comptime!(32 * x_tiles);
                    let mut of_split = storage.partials[at as usize];
                    #[unroll]
                    for block in 1..comptime!(tile_partials / blueprint.k_splits) {
                        let ahead = comptime!(block * blueprint.k_splits * 32 * x_tiles);
                        of_split += storage.partials[(at + ahead) as usize];
                    }
                    if comptime!(split == 0) {
                        sum = of_split;
                    } else {
                        sum += of_split;
                    }
                }
                let sum = add_terms(sum, terms, blueprint.target);
                let own = (base + local / x_tiles) * tile_outputs + place.row;
                #[unroll]
                for w in 0..comptime!(lane_rows(terms)) {
                    let of_row = RowSums::new(sum, w, terms);
                    let x_row = x_tile * comptime!(8 / terms) + of_row.x_row;
                    let writes = of_row.is_own && x_row < comptime!(blueprint.pass_pairs());
                    if writes && pass.first_pair + x_row < pass.count {
                        let pair = groups.pair(pass.start, pass.first_pair + x_row);
                        let results = Results {
                            row: pair,
                            own,
                            outputs: place.outputs,
                        };
                        let output = &mut problem.output[..];
                        if comptime!(gated.is_none()) {
                            results.write(output, of_row.low, of_row.high);
                        } else if own < place.outputs {
                            let (scores, limit) = (&problem.scores, problem.limit);
                            let target = comptime!(blueprint.target);
                            let value =
                                gated_value(of_row.low, of_row.high, limit, scores, pair, target);
                            let next = comptime!(gated.unwrap());
                            results.write_gated::<X, Y>(output, value, terms, next);
                        }
                    }
                }
                local += CUBE_DIM_Y;
            }
            sync_cube();
            pass.tile += comptime!(blueprint.partial_tiles * stride);
        }
        pass.advance(&problem.tiles, groups, blueprint);
    }
}
