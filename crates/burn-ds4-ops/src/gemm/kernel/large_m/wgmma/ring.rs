//! The stages in shared memory, which one warpgroup fills and the others multiply.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::blueprint::{ROW_BYTES, WgmmaBlueprint, WgmmaBoxes, WgmmaRows};
use super::tile::Tile;
use crate::gemm::kernel::large_m::problem::{LargeMPairs, Problem};
use crate::gemm::kernel::weights::{MatrixStack, WeightFormat};
use crate::intrinsics::{copy_vector, shared_address};
use crate::warpgroup::{Ring, RingBlueprint, WARPGROUP, copy_word, rows_descriptor};

/// Vectors of 16 bytes of a row of a tile of `x`.
const ROW_VECTORS: u32 = ROW_BYTES / 16;

/// The stages in shared memory.
#[derive(CubeType)]
pub(super) struct Stages {
    /// Tiles of rows of `x`, swizzled.
    x: Shared<[u32]>,
    /// Rows of weights, swizzled: four vectors each of codes that are decoded, or tiles like those
    /// of `x`.
    pub weights: Shared<[Vector<u32, Const<4>>]>,
    /// A word for each row of weights, or several, of all rows one after the other.
    pub scales: Shared<[u32]>,
    barriers: Shared<[Barrier]>,
    #[cube(comptime)]
    blueprint: WgmmaBlueprint,
}

#[cube]
impl Stages {
    pub fn new(#[comptime] blueprint: WgmmaBlueprint) -> Stages {
        let count = comptime!(blueprint.stages);
        let x = comptime!((count * x_bytes(blueprint) / 4) as usize);
        let weights =
            comptime!((count * blueprint.rows() * blueprint.operands.row_chunks()) as usize);
        let scales = comptime!(count * blueprint.rows() * blueprint.operands.row_scales());
        Stages {
            x: Shared::new_aligned_slice(x, 1024usize),
            weights: Shared::new_aligned_slice(weights, 1024usize),
            scales: Shared::new_slice(scales as usize),
            barriers: Shared::new_slice(comptime!(3 * count as usize)),
            blueprint,
        }
    }

    /// A ring of these stages. Every unit of the cube must call this.
    pub fn ring(&self) -> Ring {
        let blueprint = comptime!(self.blueprint);
        Ring::new(
            &self.barriers,
            comptime!(RingBlueprint {
                stages: blueprint.stages,
                landings: blueprint.copying_units(),
                planes: blueprint.multiplying_planes(),
                fenced: blueprint.gathers(),
            }),
        )
    }

    /// The first vector of the weights of a stage, and its address.
    pub fn weights_vector(&self, slot: u32) -> u32 {
        slot * comptime!(self.blueprint.rows() * self.blueprint.operands.row_chunks())
    }

    pub fn weights_address(&self, slot: u32) -> u32 {
        shared_address(&self.weights) + self.weights_vector(slot) * 16
    }

    /// The lower word of the descriptor of the rows of weights of a warpgroup, where they are not
    /// packed.
    pub fn weights_descriptor(&self, slot: u32, group: u32) -> u32 {
        rows_descriptor(self.weights_address(slot) + group * comptime!(64 * ROW_BYTES))
    }

    /// The first of its scales.
    pub fn scale(&self, slot: u32) -> u32 {
        slot * comptime!(self.blueprint.rows() * self.blueprint.operands.row_scales())
    }

    fn x_address(&self, slot: u32) -> u32 {
        shared_address(&self.x) + slot * comptime!(x_bytes(self.blueprint))
    }

    /// The lower word of the descriptor of its rows of `x` from byte `64 * part` on.
    pub fn x_descriptor(&self, slot: u32, #[comptime] part: usize) -> u32 {
        let tile = comptime!(part as u32 / 2 * self.blueprint.columns * ROW_BYTES);
        rows_descriptor(self.x_address(slot)) + comptime!((tile + part as u32 % 2 * 64) / 16)
    }

    /// Copies the stages of a tile: boxes of rows of `x` and of weights, and a word with the scales
    /// of each of those. Where rows of `x` are gathered, both are copied 16 bytes at a time. Zeros
    /// stand for columns past the end. All units that copy must call this.
    pub fn fill(
        &mut self,
        ring: &mut Ring,
        boxes: &WgmmaBoxes,
        x: &WgmmaRows,
        pairs: &LargeMPairs,
        matrices: &MatrixStack<Vector<u32, Const<4>>>,
        tile: &Tile,
    ) {
        let blueprint = comptime!(self.blueprint);
        let sources = Sources::new(x, pairs, matrices, tile, blueprint);
        let range = StageRange::new(matrices.layout.columns, blueprint);
        for step in range.first..range.end {
            ring.wait_free();
            if comptime!(blueprint.gathers()) {
                let width = matrices.layout.columns;
                self.gather_x(ring.slot, &x.words, &sources, width, step);
                self.gather_weights(ring.slot, &matrices.words, &sources, width, step);
            } else if UNIT_POS == 0 {
                let weights = comptime!(blueprint.rows() * blueprint.operands.row_chunks() * 16);
                ring.expect(comptime!(x_bytes(blueprint) + weights));
                self.copy_x(ring.slot, &boxes.x, tile, step);
                self.copy_weights(ring.slot, &boxes.weights, tile, matrices.layout.rows, step);
            }
            if comptime!(blueprint.scale_words) {
                #[unroll]
                for part in 0..comptime!(blueprint.operands.row_scales()) {
                    self.copy_scales(ring.slot, matrices, &sources, step, part);
                }
            }
            ring.copied();
        }
    }

    /// Starts to copy a word of scales for each row of weights, number `part` of a stage.
    fn copy_scales(
        &self,
        slot: u32,
        matrices: &MatrixStack<Vector<u32, Const<4>>>,
        sources: &Sources,
        step: u32,
        #[comptime] part: u32,
    ) {
        let blueprint = comptime!(self.blueprint);
        let parts = comptime!(blueprint.operands.row_scales());
        let word = if comptime!(parts > 1) {
            // Past the end is the last one, whose columns are zeros.
            min(step * parts + part, matrices.layout.scales_per_row - 1)
        } else {
            step * comptime!(blueprint.operands.k_block()) / 128
        };
        let to = shared_address(&self.scales) + (self.scale(slot) + UNIT_POS) * 4;
        #[unroll]
        for i in 0..comptime!(blueprint.unit_scales()) {
            let to = to + comptime!((part * blueprint.rows() + i * WARPGROUP) * 4);
            if UNIT_POS < comptime!(blueprint.rows() - i * WARPGROUP) {
                copy_word(to, &matrices.scales, sources.scales[i as usize] + word);
            }
        }
    }

    /// Starts to copy the rows of `x` of a stage. Past those of the tile are others, whose products
    /// nobody reads.
    fn copy_x(&mut self, slot: u32, x: &TensorMap<u32, Tiled>, tile: &Tile, step: u32) {
        let blueprint = comptime!(self.blueprint);
        let problem = &tile.problem;
        let matrix = if comptime!(blueprint.sorted) {
            0u32.runtime()
        } else {
            problem.matrix
        };
        let (first, matrix) = (i32::cast_from(problem.start), i32::cast_from(matrix));
        let words = comptime!(blueprint.columns * ROW_BYTES / 4);
        #[unroll]
        for part in 0..comptime!(blueprint.operands.x_tiles()) {
            let tile = step * comptime!(blueprint.operands.x_tiles()) + part;
            let at = ((slot * comptime!(blueprint.operands.x_tiles()) + part) * words) as usize;
            let to = &mut self.x[at..at + words as usize];
            let word = i32::cast_from(tile * comptime!(ROW_BYTES / 4));
            self.barriers[slot as usize].tma_load_3d(x, to, first, matrix, word);
        }
    }

    /// Starts to copy this unit's part of the rows of `x` of a stage.
    fn gather_x(
        &self,
        slot: u32,
        x: &[Vector<u32, Const<4>>],
        sources: &Sources,
        width: u32,
        step: u32,
    ) {
        let blueprint = comptime!(self.blueprint);
        let to = self.x_address(slot) + sources.x_to;
        #[unroll]
        for tile in 0..comptime!(blueprint.operands.x_tiles()) {
            let to = to + comptime!(tile * blueprint.columns * ROW_BYTES);
            let vector = (step * comptime!(blueprint.operands.x_tiles()) + tile) * ROW_VECTORS
                + UNIT_POS % ROW_VECTORS;
            // Where a launch has put them in order, there is padding.
            let inside = comptime!(blueprint.permuted()).runtime() || vector < width / 8;
            let vector = select(inside, vector, 0u32);
            #[unroll]
            for i in 0..comptime!(blueprint.unit_rows()) {
                let to = to + comptime!(i * WARPGROUP / ROW_VECTORS * ROW_BYTES);
                copy_vector(to, x, sources.x[i as usize] + vector, inside);
            }
        }
    }

    /// The same of the rows of weights.
    fn gather_weights(
        &self,
        slot: u32,
        weights: &[Vector<u32, Const<4>>],
        sources: &Sources,
        width: u32,
        step: u32,
    ) {
        let blueprint = comptime!(self.blueprint);
        let chunks = comptime!(blueprint.operands.row_chunks());
        let to = self.weights_address(slot) + sources.weights_to;
        let vector = step * chunks + UNIT_POS % chunks;
        let inside = vector < width / comptime!(blueprint.format().columns());
        let vector = select(inside, vector, 0u32);
        #[unroll]
        for i in 0..comptime!(blueprint.unit_weight_rows()) {
            let to = to + comptime!(i * WARPGROUP * 16);
            copy_vector(to, weights, sources.weights[i as usize] + vector, inside);
        }
    }

    /// Starts to copy the rows of weights of a stage, of a matrix of `rows` rows. Past those of the
    /// matrix are others.
    fn copy_weights(
        &mut self,
        slot: u32,
        weights: &TensorMap<u32, Tiled>,
        tile: &Tile,
        rows: u32,
        step: u32,
    ) {
        let blueprint = comptime!(self.blueprint);
        let (boxes, chunks) =
            comptime!((blueprint.weight_boxes(), blueprint.operands.row_chunks()));
        let vectors = comptime!(blueprint.rows() * chunks / boxes);
        let first = tile.problem.matrix * rows + tile.first;
        let word = i32::cast_from(step * comptime!(chunks * 4));
        #[unroll]
        for part in 0..boxes {
            let at = (self.weights_vector(slot) + comptime!(part * vectors)) as usize;
            let to = &mut self.weights[at..at + vectors as usize];
            let row = i32::cast_from(first + part * (rows / 2));
            self.barriers[slot as usize].tma_load_2d(weights, to, row, word);
        }
    }
}

/// What a unit copies of every stage of a tile besides boxes.
#[derive(CubeType)]
struct Sources {
    /// The first vector of each of the unit's rows of `x`, and where the first one goes. Eight
    /// units copy a row, each a chunk of 16 bytes to the place that the swizzle gives it.
    x: Array<u32>,
    x_to: u32,
    /// The same of weights.
    weights: Array<u32>,
    weights_to: u32,
    /// The first word of the scales of every 128th row of weights.
    scales: Array<u32>,
}

#[cube]
impl Sources {
    fn new(
        x: &WgmmaRows,
        pairs: &LargeMPairs,
        matrices: &MatrixStack<Vector<u32, Const<4>>>,
        tile: &Tile,
        #[comptime] blueprint: WgmmaBlueprint,
    ) -> Sources {
        let (problem, layout) = (&tile.problem, &matrices.layout);
        let x_rows = comptime!(blueprint.unit_rows());
        let row = UNIT_POS / ROW_VECTORS;
        let x_to = row * ROW_BYTES + ((UNIT_POS % ROW_VECTORS) ^ (row % 8)) * 16;
        let mut x_rows_of = Array::<u32>::new(x_rows as usize);
        if comptime!(blueprint.gathers()) {
            #[unroll]
            for i in 0..x_rows {
                let own = row + comptime!(i * WARPGROUP / ROW_VECTORS);
                x_rows_of[i as usize] = pair_of(pairs, problem, own) / pairs.per_row * x.vectors;
            }
        }
        let chunks = comptime!(blueprint.operands.row_chunks());
        let row = UNIT_POS / chunks;
        let mut weights = Array::<u32>::new(comptime!(blueprint.unit_weight_rows() as usize));
        if comptime!(blueprint.gathers()) {
            #[unroll]
            for i in 0..comptime!(blueprint.unit_weight_rows()) {
                let own = row + comptime!(i * WARPGROUP / blueprint.operands.row_chunks());
                let own = tile.matrix_row(own, layout.rows, blueprint);
                let own = problem.matrix * layout.rows + own;
                weights[i as usize] =
                    own * (layout.columns / comptime!(blueprint.format().columns()));
            }
        }
        let scale_rows = comptime!(blueprint.unit_scales());
        let mut scales = Array::<u32>::new(scale_rows as usize);
        #[unroll]
        for i in 0..scale_rows {
            let own = tile.matrix_row(UNIT_POS + comptime!(i * WARPGROUP), layout.rows, blueprint);
            let start = problem.matrix as usize * layout.scales_per_matrix
                + layout.scale_row_start(own, blueprint.format(), true);
            scales[i as usize] = match comptime!(blueprint.format()) {
                WeightFormat::Fp4(_) => (start / 4) as u32,
                _ => start as u32,
            };
        }
        Sources {
            x: x_rows_of,
            x_to,
            weights,
            weights_to: (row * chunks + chunk_place(row, UNIT_POS % chunks)) * 16,
            scales,
        }
    }
}

/// The pair of a row of `x` of the tile. Rows past the end have the last one's, whose products
/// nobody reads.
#[cube]
pub(super) fn pair_of(pairs: &LargeMPairs, problem: &Problem, row: u32) -> u32 {
    pairs.at(problem, problem.start + min(row, problem.count - 1))
}

/// The stages of a tile that a cube has: all, or those of its K-split.
#[derive(CubeType)]
pub(super) struct StageRange {
    pub first: u32,
    pub end: u32,
}

#[cube]
impl StageRange {
    pub fn new(width: u32, #[comptime] blueprint: WgmmaBlueprint) -> StageRange {
        let all = width.div_ceil(comptime!(blueprint.operands.k_block()));
        StageRange {
            first: CUBE_POS_Y * all / CUBE_COUNT_Y,
            end: (CUBE_POS_Y + 1) * all / CUBE_COUNT_Y,
        }
    }
}

/// Bytes of `x` in a stage.
const fn x_bytes(blueprint: WgmmaBlueprint) -> u32 {
    blueprint.operands.x_tiles() * blueprint.columns * ROW_BYTES
}

/// Where the swizzle puts a chunk of 16 bytes of a row of codes among the four of the row.
#[cube]
pub(super) fn chunk_place(row: u32, chunk: u32) -> u32 {
    chunk ^ (row / 2 % 4)
}
