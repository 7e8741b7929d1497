//! Products of a small number of rows of `x` by 16-bit weights, on tensor cores.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::input::{InputBlueprint, InputRows};
use super::tile_rows::{MatrixList, TileRows};
use crate::caps::Target;
use crate::gemm::kernel::epilogue::zero_sums;
use crate::gemm::kernel::weights::{K_STEPS, WeightFormat};
use crate::intrinsics::{
    await_copies, commit_copies, f16_differences, f16_to_bf16, modulo, multiply_tiles, sync_group,
    sync_planes,
};

/// Columns of a K-block: 256 bytes of each row.
const COLUMNS: u32 = WeightFormat::Dense.k_block();
/// Vectors of 16 bytes of a row in a K-block.
const ROW_VECTORS: u32 = 4 * K_STEPS;
/// Vectors of a stage: a K-block of 16 rows.
const STAGE_VECTORS: u32 = 16 * ROW_VECTORS;

/// How [`tiles_kernel`] is compiled.
///
/// The planes of a cube split K of a tile of 16 rows of weights: each multiplies a strided set of
/// K-blocks, and the partial sums are reduced in shared memory. The split depends on the number of
/// columns alone, so a row's result depends neither on the other rows of `x` nor on other weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TilesBlueprint {
    /// Whether the weights are `f16`; otherwise `bf16`.
    pub f16_weights: bool,
    /// Terms in `bf16` of a weight; one is the weight itself.
    pub weight_terms: u32,
    /// How `x` is read.
    pub input: InputBlueprint,
    /// Planes that split K of a tile, and groups of such planes in a cube.
    pub planes: u32,
    pub concurrent_tiles: u32,
    /// Stages of the pipeline of a plane.
    pub stages: u32,
    pub target: Target,
}

impl TilesBlueprint {
    /// Planes of a cube.
    pub const fn cube_planes(self) -> u32 {
        self.planes * self.concurrent_tiles
    }

    /// Vectors of shared memory for the pipelines of all planes.
    pub const fn ring_vectors(self) -> u32 {
        self.cube_planes() * self.stages * STAGE_VECTORS
    }

    pub const fn ring_bytes(self) -> usize {
        self.ring_vectors() as usize * 16
    }

    /// Bytes of shared memory.
    pub const fn shared_bytes(self) -> usize {
        let partials = 2 * self.cube_planes() * self.input.x_tiles * 32;
        self.ring_bytes() + (partials + self.input.shared_vectors()) as usize * 16
    }

    /// Accumulators of a tile: two for the first terms, which alternate, and one for all others,
    /// which are so small that they would be lost in the sums of the first.
    const fn sums(self) -> u32 {
        if self.input.terms * self.weight_terms == 1 {
            2
        } else {
            3
        }
    }

    const fn dtype(self) -> &'static str {
        if self.f16_weights && self.weight_terms == 1 {
            "f16"
        } else {
            "bf16"
        }
    }
}

/// The K-blocks of weights in the order in which a plane multiplies them.
#[derive(CubeType)]
struct Cursor {
    /// Index among the tiles of all matrices, and the rows of that tile.
    tile: u32,
    tile_rows: TileRows,
    /// K-block of the tile.
    k_block: u32,
    /// From one tile of the plane to the next.
    stride: u32,
    /// The picked block of the plane's next tile.
    next_block: i32,
}

#[cube]
impl Cursor {
    fn new(
        tile: u32,
        stride: u32,
        plane: u32,
        group: &MatrixList<Vector<u32, Const<4>>>,
    ) -> Cursor {
        let block = group.picks.read(tile, 16u32);
        let next_block = group.picks.read(tile + stride, 16u32);
        Cursor {
            tile,
            tile_rows: TileRows::new(tile, block, group, 16u32),
            k_block: plane,
            stride,
            next_block,
        }
    }

    /// Begins to copy the K-block, if there is one, to a stage of `ring`, and advances to the
    /// plane's next one.
    fn fetch(
        &mut self,
        ring: &mut Shared<[Vector<u32, Const<4>>]>,
        stage: u32,
        group: &MatrixList<Vector<u32, Const<4>>>,
        vectors: u32,
        plane: u32,
        k_blocks: u32,
        #[comptime] blueprint: TilesBlueprint,
    ) {
        if self.tile < group.tiles {
            self.copy(&group.words, ring, stage, vectors, blueprint);
        }
        commit_copies();
        self.k_block += blueprint.planes;
        if self.k_block >= k_blocks {
            self.k_block = plane;
            self.tile += self.stride;
            self.tile_rows
                .seek(self.tile, self.next_block, group, 16u32);
            self.next_block = group.picks.read(self.tile + self.stride, 16u32);
        }
    }

    /// Begins to copy the K-block: two rows at a time, 256 bytes of each. In odd rows, neighbouring
    /// parts of 64 bytes are swapped, so that the lanes of a product, which read 64 bytes of each
    /// of eight rows, have no bank conflict.
    fn copy(
        &self,
        words: &Sequence<Box<[Vector<u32, Const<4>>]>>,
        ring: &mut Shared<[Vector<u32, Const<4>>]>,
        stage: u32,
        vectors: u32,
        #[comptime] blueprint: TilesBlueprint,
    ) {
        let odd_row = UNIT_POS_X / ROW_VECTORS;
        let column = UNIT_POS_X % ROW_VECTORS;
        let mut vector = self.k_block * ROW_VECTORS + column;
        if comptime!(!blueprint.input.k_aligned) {
            // What is read past the end is not used.
            vector = select(vector < vectors, vector, 0u32);
        }
        let to = stage + odd_row * ROW_VECTORS + (column ^ (odd_row * 4));
        #[unroll]
        for i in 0..words.len() {
            let matrix = comptime!(i as u32);
            if comptime!(words.len() == 1) || self.tile_rows.matrix == matrix {
                let words = words.index(i);
                #[unroll]
                for j in 0..8u32 {
                    let row = min(
                        self.tile_rows.row + comptime!(2 * j) + odd_row,
                        self.tile_rows.rows - 1,
                    );
                    let at = row as usize * vectors as usize + vector as usize;
                    let to = (to + comptime!(2 * j * ROW_VECTORS)) as usize;
                    copy_async(&words[at..at + 1], &mut ring[to..to + 1], 4u32);
                }
            }
        }
    }
}

/// Multiplies up to `8 * x_tiles` rows of `x` by all rows of some matrices of 16-bit weights.
///
/// - `x`: rows of vectors of 16 bytes, `x_vectors` from one to the next
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn tiles_kernel<X: Float, Y: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    rows: u32,
    columns: u32,
    group: &MatrixList<Vector<u32, Const<4>>>,
    output: &mut [Y],
    #[comptime] blueprint: TilesBlueprint,
    #[define(X, Y)] _dtypes: [ElemType; 2],
) {
    let mut ring =
        Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(blueprint.ring_vectors() as usize));
    let mut input = InputRows::new(x, rows, x_vectors, columns, blueprint.input);
    let cubes = CubeRange {
        index: CUBE_POS_X,
        count: CUBE_COUNT_X,
    };
    multiply_group(&mut input, group, output, &mut ring, cubes, blueprint);
}

/// The cubes that go through the tiles of a group.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(in crate::gemm::kernel) struct CubeRange {
    /// This cube among them.
    pub index: u32,
    pub count: u32,
}

/// Multiplies a cube's tiles. `ring` has [`TilesBlueprint::ring_vectors`] or more. Every unit of
/// the cube must call this.
#[cube]
pub(in crate::gemm::kernel) fn multiply_group<X: Float, Y: Float, N: Size>(
    input: &mut InputRows<'_, X, N>,
    group: &MatrixList<Vector<u32, Const<4>>>,
    output: &mut [Y],
    ring: &mut Shared<[Vector<u32, Const<4>>]>,
    cubes: CubeRange,
    #[comptime] blueprint: TilesBlueprint,
) {
    let (rows, columns) = (input.rows, input.columns);
    let lane_row = UNIT_POS_X / 4;
    let quarter = UNIT_POS_X % 4;
    let (planes, concurrent_tiles) = comptime!((blueprint.planes, blueprint.concurrent_tiles));
    let (stages, x_tiles) = comptime!((blueprint.stages, blueprint.input.x_tiles));
    let plane = modulo(UNIT_POS_Y, planes);
    let concurrent_tile = UNIT_POS_Y / planes;
    let vectors = columns / 8;
    let k_blocks = (columns + comptime!(COLUMNS - 1)) / COLUMNS;
    let mut partials = Shared::<[f32]>::new_slice(comptime!(
        (concurrent_tiles * 2 * planes * x_tiles * 128) as usize
    ));
    // Fetch `x` first, because all planes wait for it, and then the weights.
    input.fetch();

    let first_stage = UNIT_POS_Y * comptime!(stages * STAGE_VECTORS);
    let first_tile = concurrent_tile * cubes.count + cubes.index;
    let stride = cubes.count * concurrent_tiles;
    let mut next = Cursor::new(first_tile, stride, plane, group);
    #[unroll]
    for stage in 0..stages {
        let to = first_stage + comptime!(stage * STAGE_VECTORS);
        next.fetch(ring, to, group, vectors, plane, k_blocks, blueprint);
    }

    let row_start = first_stage + lane_row * ROW_VECTORS;
    let swizzle = lane_row % 2 * 4;

    input.store(stages);

    let mut stage = 0u32;
    let mut buffer = concurrent_tile * 2;
    let mut tile = first_tile;
    while tile < group.tiles {
        let block = group.picks.read(tile, 16u32);
        let each = comptime!(blueprint.sums());
        let mut sums = zero_sums(comptime!(each * x_tiles));
        let mut k_block = plane;
        while k_block < k_blocks {
            let first = k_block * COLUMNS + quarter * 8;
            let held = input.read_ahead(first);
            await_copies(comptime!(stages - 1));
            sync_group(blueprint.target);
            let row_start = row_start + stage * STAGE_VECTORS;
            #[unroll]
            for c in 0..K_STEPS {
                let column = first + comptime!(c * 32);
                let at = (row_start + ((comptime!(4 * c) + quarter) ^ swizzle)) as usize;
                let mut low = ring[at];
                let mut high = ring[at + comptime!(8 * ROW_VECTORS as usize)];
                if comptime!(!blueprint.input.k_aligned) {
                    let inside = column < columns;
                    low = select(inside, low, Vector::new(0u32));
                    high = select(inside, high, Vector::new(0u32));
                }
                let low_terms = split_weights(low, blueprint);
                let high_terms = split_weights(high, blueprint);
                #[unroll]
                for t in 0..x_tiles {
                    let columns = input.columns(&held, t, c, column);
                    add_products(
                        &low_terms,
                        &high_terms,
                        &columns,
                        &mut sums,
                        t,
                        c % 2,
                        blueprint,
                    );
                }
            }
            sync_group(blueprint.target);
            let to = first_stage + stage * STAGE_VECTORS;
            next.fetch(ring, to, group, vectors, plane, k_blocks, blueprint);
            stage = select(stage + 1 == stages, 0u32, stage + 1);
            k_block += planes;
        }

        // Two buffers alternate: before a plane writes to one again, it has waited for all planes
        // that read it.
        let base = buffer * comptime!(planes * x_tiles * 128);
        buffer ^= 1u32;
        #[unroll]
        for t in 0..x_tiles {
            let first = comptime!((each * t) as usize);
            let mut sum = sums[first] + sums[comptime!(first + 1)];
            if comptime!(each == 3) {
                sum += sums[comptime!(first + 2)];
            }
            #[unroll]
            for i in 0..4u32 {
                // Column by column of the tile, each with 16 rows of weights.
                let index = (comptime!(8 * t) + quarter * 2 + comptime!(i % 2)) * 16
                    + lane_row
                    + comptime!(i / 2 * 8);
                let to = base + plane * comptime!(x_tiles * 128) + index;
                partials[to as usize] = sum.extract(i as usize);
            }
        }
        if comptime!(planes == 1) {
            sync_group(blueprint.target);
        } else {
            sync_planes(concurrent_tile, planes);
        }
        let tile_rows = TileRows::new(tile, block, group, 16u32);
        let mut index = plane * 32 + UNIT_POS_X;
        while index < comptime!(x_tiles * 128) {
            let mut total = partials[(base + index) as usize];
            #[unroll]
            for p in 1..planes {
                total += partials[(base + comptime!(p * x_tiles * 128) + index) as usize];
            }
            let x_row = index / 16;
            let row = tile_rows.row + index % 16;
            if tile_rows.contains(x_row, rows, row, group) {
                let to = tile_rows.output_index(x_row, row, group);
                output[to] = Y::cast_from(total);
            }
            index += comptime!(planes * 32);
        }
        tile += stride;
    }
}

/// Adds the products of a lane's 16 bytes of two rows of weights with the same columns of a row of
/// `x` to the accumulators of tile `t`.
#[cube]
fn add_products(
    low: &Array<Vector<u32, Const<4>>>,
    high: &Array<Vector<u32, Const<4>>>,
    columns: &Array<Vector<u32, Const<4>>>,
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] t: u32,
    #[comptime] accumulator: u32,
    #[comptime] blueprint: TilesBlueprint,
) {
    #[unroll]
    for term in 0..comptime!(blueprint.input.terms as usize) {
        #[unroll]
        for weight_term in 0..comptime!(blueprint.weight_terms as usize) {
            let which = comptime!(if term == 0 && weight_term == 0 {
                accumulator
            } else {
                2
            });
            let to = comptime!((t * blueprint.sums() + which) as usize);
            #[unroll]
            for m in 0..2usize {
                sums[to] = multiply_tiles(
                    low[weight_term].extract(comptime!(2 * m)),
                    high[weight_term].extract(comptime!(2 * m)),
                    low[weight_term].extract(comptime!(2 * m + 1)),
                    high[weight_term].extract(comptime!(2 * m + 1)),
                    columns[term].extract(comptime!(2 * m)),
                    columns[term].extract(comptime!(2 * m + 1)),
                    sums[to],
                    comptime!(blueprint.dtype()),
                );
            }
        }
    }
}

/// Splits a lane's 16 bytes of weights into terms.
#[cube]
fn split_weights(
    words: Vector<u32, Const<4>>,
    #[comptime] blueprint: TilesBlueprint,
) -> Array<Vector<u32, Const<4>>> {
    let mut terms = Array::<Vector<u32, Const<4>>>::new(comptime!(blueprint.weight_terms as usize));
    if comptime!(blueprint.weight_terms == 1) {
        terms[0] = words;
    } else {
        let mut first = Vector::<u32, Const<4>>::new(0u32);
        let mut second = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for i in 0..4usize {
            // The first term has the upper eight bits of a significand of eleven, the second one
            // the rest. The set bits of a NaN's mantissa may all be in the rest.
            let word = words.extract(i);
            let nan = ((word & 0x7fff_7fffu32) + 0x03ff_03ffu32) & 0x8000_8000u32;
            let upper = (word & 0xfff8_fff8u32) | (nan >> 6);
            first.insert(i, f16_to_bf16(upper));
            second.insert(i, f16_to_bf16(f16_differences(word, upper)));
        }
        terms[0] = first;
        terms[1] = second;
    }
    terms
}
