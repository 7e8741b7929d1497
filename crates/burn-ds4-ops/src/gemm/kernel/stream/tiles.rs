use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use super::blueprint::StreamBlueprint;
use super::pipeline::{LanePlace, Stream, new_ring};
use crate::gemm::kernel::K_STEPS;
use crate::gemm::kernel::epilogue::{
    Results, RowSums, add_terms, gated_value, lane_rows, zero_sums,
};
use crate::gemm::kernel::groups::{Groups, PairSizes, Pairing};
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

/// The tiles that a cube multiplies, of all tiles of all groups.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct TileRange {
    first: u32,
    end: u32,
}

#[cube]
impl TileRange {
    /// Range `index`: all have `least` tiles, the first `more` of them one more.
    pub fn new(index: u32, least: u32, more: u32) -> TileRange {
        let first = index * least + min(index, more);
        TileRange {
            first,
            end: first + least + select(index < more, 1u32, 0u32),
        }
    }

    /// The range that begins after `tiles` more.
    pub fn after(self, tiles: u32) -> TileRange {
        TileRange {
            first: self.first + tiles,
            end: self.end + tiles,
        }
    }

    /// Range `index` of `count` that `tiles` are divided into.
    pub fn of(index: u32, count: u32, tiles: u32) -> TileRange {
        let least = tiles / count;
        TileRange::new(index, least, tiles - least * count)
    }
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
        let x_rows = comptime!(largest(one.shared_vec8s(), other.shared_vec8s()));
        let partials = comptime!(largest(one.partials(), other.partials()));
        SharedStorage {
            ring: new_ring(planes),
            x_rows: Shared::new_slice(comptime!(x_rows.max(1) as usize)),
            partials: Shared::new_slice(comptime!(partials as usize * 32)),
        }
    }
}

const fn largest(a: u32, b: u32) -> u32 {
    if a > b { a } else { b }
}

/// A cube's tiles of one group, and the pairs of it that are multiplied at a time.
#[derive(CubeType)]
struct Pass {
    matrix: u32,
    first_tile: u32,
    last_tile: u32,
    /// Where the group's [pairs](Groups::pair) start, how many there are, and the first of this
    /// pass.
    start: u32,
    count: u32,
    first_pair: u32,
    /// The first tile of those whose partials are in shared memory, and the part of K whose columns
    /// of `x` are.
    tile: u32,
    x_part: u32,
    /// The cube's tiles of later groups.
    next: u32,
    end: u32,
    /// Tiles of a matrix.
    matrix_tiles: u32,
}

#[cube]
impl Pass {
    /// The first one of a range; without pairs where the range is empty.
    fn first_of(
        range: TileRange,
        tiles: &FastDivmod<u32>,
        matrix_tiles: u32,
        groups: &Groups,
    ) -> Pass {
        let mut pass = Pass {
            matrix: 0u32.runtime(),
            first_tile: 0u32.runtime(),
            last_tile: 0u32.runtime(),
            start: 0u32.runtime(),
            count: 0u32.runtime(),
            first_pair: 0u32.runtime(),
            tile: 0u32.runtime(),
            x_part: 0u32.runtime(),
            next: range.first,
            end: range.end,
            matrix_tiles,
        };
        if range.first < range.end {
            pass.begin_group(tiles, groups);
        }
        pass
    }

    fn begin_group(&mut self, tiles: &FastDivmod<u32>, groups: &Groups) {
        let mut group = 0u32;
        self.first_tile = self.next;
        self.last_tile = self.end;
        if comptime!(groups.blueprint.pairing != Pairing::One) {
            let (at, first) = tiles.div_mod(self.next);
            group = at;
            self.first_tile = first;
            self.last_tile = min(first + (self.end - self.next), self.matrix_tiles);
        }
        self.next += self.last_tile - self.first_tile;
        self.matrix = groups.expert(group);
        self.start = groups.start(group);
        self.count = groups.size(group, self.start);
        self.first_pair = 0u32;
    }

    /// Whether there are pairs to multiply.
    fn has_pairs(&self) -> bool {
        self.first_pair < self.count
    }

    /// Goes on to the next pairs of the group, or to the next group.
    fn advance(
        &mut self,
        tiles: &FastDivmod<u32>,
        groups: &Groups,
        #[comptime] blueprint: StreamBlueprint,
    ) {
        self.first_pair += comptime!(blueprint.pass_pairs());
        if self.first_pair >= self.count && self.next < self.end {
            self.begin_group(tiles, groups);
        }
    }

    /// The K-block that follows `block` of this part of K, in this plane's tile `filled` of
    /// `tiles`: how many of its tiles come before that K-block's, and its number there.
    fn next_k_block(
        &self,
        block: u32,
        filled: u32,
        tiles: u32,
        #[comptime] blueprint: StreamBlueprint,
    ) -> (u32, u32) {
        let ends_tile = block + 1 == blueprint.x_k_blocks;
        let mut before = filled + select(ends_tile, 1u32, 0u32);
        let mut next = select(ends_tile, 0u32, block + 1);
        if comptime!(blueprint.x_parts() > 1) {
            // The next part of the same tiles, or the first of others.
            let ends_part = before == tiles;
            let ends = ends_part && self.x_part + 1 == comptime!(blueprint.x_parts());
            let next_part = self.x_part + select(ends_part, 1u32, 0u32);
            next += select(ends, 0u32, next_part * blueprint.x_k_blocks);
            before = select(ends_part && !ends, 0u32, before);
        }
        (before, next)
    }

    /// Begins to fetch the first weights, if this is the first part of the first tiles.
    fn begin_weights(&self, place: &LanePlace, stream: &mut Stream) {
        let blueprint = comptime!(stream.blueprint);
        let begins = if comptime!(blueprint.x_parts() > 1) {
            self.x_part == 0 && self.tile == self.first_tile
        } else {
            true.runtime()
        };
        if begins && self.k_blocks(place, blueprint) > 0 {
            stream.seek_tile(place, self.matrix, self.first_tile, 0u32);
            stream.fetch();
        }
    }

    /// K-blocks of this plane.
    fn k_blocks(&self, place: &LanePlace, #[comptime] blueprint: StreamBlueprint) -> u32 {
        let stride = comptime!(blueprint.plane_groups);
        let plane_group = place.plane_group;
        let tiles = self.last_tile - self.first_tile;
        let k_blocks =
            (tiles + comptime!(stride - 1) - plane_group) / stride * blueprint.plane_k_blocks;
        if comptime!(blueprint.planes * stride < blueprint.cube_planes) {
            select(plane_group < stride, k_blocks, 0u32)
        } else {
            k_blocks
        }
    }
}

/// Makes the `x` that a plane multiplies by ready, in registers or in shared memory, and begins to
/// fetch the first weights. Every unit of the cube must call this.
#[cube]
fn load_x<X: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    slots: &FastDivmod<u32>,
    groups: &Groups,
    pass: &Pass,
    place: &LanePlace,
    stream: &mut Stream,
    x_rows: &mut Shared<[Vector<u32, Const<4>>]>,
) {
    if comptime!(stream.blueprint.x_in_registers) {
        load_operands::<X, N>(x, x_vectors, groups, pass, place, stream);
    } else {
        load_rows::<X, N>(x, x_vectors, slots, groups, pass, place, stream, x_rows);
    }
}

/// Puts a plane's K-block of a pass's rows of `x` into registers, of which it has one in each part
/// of K. There are no ids.
#[cube]
fn load_operands<X: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    groups: &Groups,
    pass: &Pass,
    place: &LanePlace,
    stream: &mut Stream,
) {
    let blueprint = comptime!(stream.blueprint);
    let x_tiles = comptime!(blueprint.x_tiles());
    let mut rows = Array::<usize>::new(comptime!(x_tiles as usize));
    #[unroll]
    for tile in 0..x_tiles {
        let x_row = pass.first_pair + place.row + comptime!(8 * tile);
        let pair = groups.pair(pass.start, min(x_row, pass.count - 1));
        rows[tile as usize] = pair as usize * x_vectors;
    }
    let k_block = pass.x_part * blueprint.planes + place.plane;
    let vec8s = comptime!(blueprint.input.format.vec8s());
    let vec8 = k_block * comptime!(blueprint.input.format.k_block() / 8);
    stream.read_operands::<X, N>(x, &rows, vec8 + UNIT_POS_X % 4 * vec8s);
    pass.begin_weights(place, stream);
    stream.scale_operands();
}

/// Puts a pass's rows of `x` into shared memory, those columns of them that are its part of K. For
/// the first part of the first tiles, it also begins to fetch the first weights. Every unit of the
/// cube must call this.
///
/// `x` is asked for first, because all planes wait for it, and then the weights.
#[cube]
fn load_rows<X: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    slots: &FastDivmod<u32>,
    groups: &Groups,
    pass: &Pass,
    place: &LanePlace,
    stream: &mut Stream,
    x_rows: &mut Shared<[Vector<u32, Const<4>>]>,
) {
    let blueprint = comptime!(stream.blueprint);
    let terms = comptime!(blueprint.input.terms);
    let several_parts = comptime!(blueprint.x_parts() > 1);
    let first_vec8 = if comptime!(several_parts) {
        pass.x_part * comptime!(blueprint.row_vec8s())
    } else {
        0u32.runtime()
    };
    let columns = stream.columns();
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
        let vec8 = modulo(at, blueprint.row_vec8s());
        let index = min(pass.first_pair + x_row / terms, pass.count - 1);
        let pair = groups.pair(pass.start, index);
        let vec8 = first_vec8 + vec8;
        let inside = comptime!(blueprint.k_aligned) || vec8 * 8 < columns;
        let source_row = if comptime!(blueprint.pairing == Pairing::Ids) {
            slots.div(pair)
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
    pass.begin_weights(place, stream);
    if comptime!(several_parts) {
        // Other planes may still multiply by the part before.
        sync_cube();
    }
    #[unroll]
    for i in 0..comptime!(blueprint.unit_vec8s()) {
        let at = UNIT_POS + comptime!(i * blueprint.cube_units());
        let x_row = at / comptime!(blueprint.row_vec8s());
        let vec8 = modulo(at, blueprint.row_vec8s());
        let slot = vec8_slot(vec8, blueprint.input.format);
        let offset = (x_row * comptime!(blueprint.row_pitch()) + slot) as usize;
        let from = comptime!(i * blueprint.input.read_vectors());
        if comptime!(blueprint.input.f16_input) {
            let (pairs, scale) = scaled_vec8::<X, N>(
                &fetched,
                from,
                comptime!(blueprint.k_aligned) || (first_vec8 + vec8) * 8 < columns,
                modulo(x_row, terms),
                blueprint,
            );
            if comptime!(blueprint.fills_units()) || x_row < blueprint.x_rows {
                x_rows[offset] = pairs;
                if vec8 % SCALE_VEC8S == 0 {
                    x_rows[scale_index(x_row, vec8 / SCALE_VEC8S, blueprint)] =
                        Vector::new(u32::reinterpret(scale));
                }
            }
        } else if comptime!(blueprint.fills_units()) || x_row < blueprint.x_rows {
            x_rows[offset] = fetched[from as usize];
        }
    }
    sync_cube();
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
    let stride = comptime!(blueprint.plane_groups);
    let x_tiles = comptime!(blueprint.x_tiles());
    let x_parts = comptime!(blueprint.x_parts());
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
        if comptime!(x_parts == 1) {
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
            let tiles = if comptime!(x_parts > 1) {
                min(
                    (last_tile - base + comptime!(stride - 1) - place.plane_group) / stride,
                    blueprint.partial_tiles.runtime(),
                )
            } else {
                blueprint.partial_tiles.runtime()
            };
            for part in 0..x_parts {
                if comptime!(x_parts > 1) {
                    pass.x_part = part;
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
                    if comptime!(x_parts > 1 && !blueprint.x_in_registers) && part > 0 {
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
                    if comptime!(x_parts > 1 && blueprint.x_in_registers) {
                        slot += part * comptime!(32 * x_tiles * blueprint.planes);
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
