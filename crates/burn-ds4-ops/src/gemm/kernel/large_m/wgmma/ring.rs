//! The stages in shared memory, which one warpgroup fills and the others multiply.

use cubecl::prelude::*;

use super::{ROW_BYTES, Tile, WgmmaBlueprint, WgmmaRows};
use crate::gemm::kernel::large_m::{LargeMPairs, Problem};
use crate::gemm::kernel::weights::{MatrixStack, WeightFormat};
use crate::intrinsics::shared_address;
use crate::warpgroup::{Ring, RingBlueprint, WARPGROUP, copy_vector, copy_word, rows_descriptor};

/// Vectors of 16 bytes of a row of a tile of `x`.
const ROW_VECTORS: u32 = ROW_BYTES / 16;

/// The stages in shared memory.
#[derive(CubeType)]
pub(super) struct Stages {
    /// Tiles of rows of `x`, swizzled.
    x: Shared<[u32]>,
    /// Rows of codes, four vectors, which change their places from one pair of rows to the next; or
    /// rows of tiles like those of `x`.
    pub weights: Shared<[Vector<u32, Const<4>>]>,
    /// A word for each row of weights, and for each row of `x` that has scales.
    pub scales: Shared<[u32]>,
    barriers: Shared<[u64]>,
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
        let scales = comptime!((count * blueprint.stage_scales()) as usize);
        Stages {
            x: Shared::new_aligned_slice(x, 1024usize),
            weights: Shared::new_aligned_slice(weights, comptime!(weights_alignment(blueprint))),
            scales: Shared::new_slice(scales),
            barriers: Shared::new_slice(comptime!(3 * count as usize)),
            blueprint,
        }
    }

    /// A ring of these stages. Every unit of the cube must call this.
    pub fn ring(&self) -> Ring {
        let stages = comptime!(self.blueprint.stages);
        let planes = comptime!(self.blueprint.multiplying_planes());
        Ring::new(
            &self.barriers,
            comptime!(RingBlueprint {
                stages,
                landings: WARPGROUP,
                planes,
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
        slot * comptime!(self.blueprint.stage_scales())
    }

    /// The address of those of the rows of `x`.
    pub fn x_scales(&self, slot: u32) -> u32 {
        shared_address(&self.scales) + (self.scale(slot) + comptime!(self.blueprint.rows())) * 4
    }

    fn x_address(&self, slot: u32) -> u32 {
        shared_address(&self.x) + slot * comptime!(x_bytes(self.blueprint))
    }

    /// The lower word of the descriptor of its rows of `x` from byte `64 * part` on.
    pub fn x_descriptor(&self, slot: u32, #[comptime] part: usize) -> u32 {
        let tile = comptime!(part as u32 / 2 * self.blueprint.columns * ROW_BYTES);
        rows_descriptor(self.x_address(slot)) + comptime!((tile + part as u32 % 2 * 64) / 16)
    }

    /// Copies the stages of a tile: rows of `x` and of weights, and a word with the scales of each
    /// of those. Zeros stand for columns past the end. Every unit of the warpgroup must call this.
    pub fn fill(
        &self,
        ring: &mut Ring,
        x: &WgmmaRows,
        pairs: &LargeMPairs,
        matrices: &MatrixStack<Vector<u32, Const<4>>>,
        tile: &Tile,
    ) {
        let blueprint = comptime!(self.blueprint);
        let x_rows = comptime!(blueprint.unit_rows());
        let width = matrices.layout.columns;
        let sources = Sources::new(x, pairs, matrices, tile, blueprint);
        let range = StageRange::new(width, blueprint);
        for step in range.first..range.end {
            ring.wait_free();
            let to = self.x_address(ring.slot) + sources.x_to;
            #[unroll]
            for tile in 0..comptime!(blueprint.operands.x_tiles()) {
                let to = to + comptime!(tile * blueprint.columns * ROW_BYTES);
                let vector = (step * comptime!(blueprint.operands.x_tiles()) + tile) * ROW_VECTORS
                    + UNIT_POS % ROW_VECTORS;
                // Where a launch has put them in order, there is padding.
                let padded = comptime!(blueprint.permuted() || blueprint.operands.is_fp8());
                let inside =
                    comptime!(blueprint.whole_stages || padded).runtime() || vector < width / 8;
                let vector = select(inside, vector, 0u32);
                #[unroll]
                for i in 0..x_rows {
                    let to = to + comptime!(i * WARPGROUP / ROW_VECTORS * ROW_BYTES);
                    copy_vector(to, &x.words, sources.x[i as usize] + vector, inside);
                }
            }
            let to = self.weights_address(ring.slot) + sources.weights_to;
            let chunks = comptime!(blueprint.operands.row_chunks());
            let vector = step * chunks + UNIT_POS % chunks;
            let inside = comptime!(blueprint.whole_stages).runtime()
                || vector < width / comptime!(blueprint.format().columns());
            let vector = select(inside, vector, 0u32);
            #[unroll]
            for i in 0..comptime!(blueprint.unit_weight_rows()) {
                let to = to + comptime!(i * WARPGROUP * 16);
                let from = sources.weights[i as usize] + vector;
                copy_vector(to, &matrices.words, from, inside);
            }
            if comptime!(blueprint.scale_words) {
                let word = step * comptime!(blueprint.operands.k_block()) / 128;
                let to = shared_address(&self.scales) + (self.scale(ring.slot) + UNIT_POS) * 4;
                #[unroll]
                for i in 0..comptime!(blueprint.unit_scales()) {
                    let to = to + comptime!(i * WARPGROUP * 4);
                    if UNIT_POS < comptime!(blueprint.rows() - i * WARPGROUP) {
                        copy_word(to, &matrices.scales, sources.scales[i as usize] + word);
                    }
                }
            }
            #[comptime]
            if let ComptimeOption::Some(scales) = &x.scales {
                let to = self.x_scales(ring.slot) + UNIT_POS * 4;
                #[unroll]
                for i in 0..comptime!(blueprint.columns.div_ceil(WARPGROUP)) {
                    let to = to + comptime!(i * WARPGROUP * 4);
                    if UNIT_POS < comptime!(blueprint.columns - i * WARPGROUP) {
                        copy_word(to, scales, step * x.rows + sources.x_scales[i as usize]);
                    }
                }
            }
            ring.copied();
        }
    }
}

/// What a unit copies of every stage of a tile.
#[derive(CubeType)]
struct Sources {
    /// The first vector of each of the unit's rows of `x`, and where the first one goes. Eight
    /// units copy a row, each a chunk of 16 bytes to the place that the swizzle gives it.
    x: Array<u32>,
    x_to: u32,
    /// The same of weights.
    weights: Array<u32>,
    weights_to: u32,
    /// The first word of the scales of every 128th row.
    scales: Array<u32>,
    /// Every 128th row of `x`.
    x_scales: Array<u32>,
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
        let problem = &tile.problem;
        let layout = &matrices.layout;
        let x_rows = comptime!(blueprint.unit_rows());
        let row = UNIT_POS / ROW_VECTORS;
        let x_to = row * ROW_BYTES + ((UNIT_POS % ROW_VECTORS) ^ (row % 8)) * 16;
        let mut x_rows_of = Array::<u32>::new(x_rows as usize);
        #[unroll]
        for i in 0..x_rows {
            let own = row + comptime!(i * WARPGROUP / ROW_VECTORS);
            x_rows_of[i as usize] = x_row(pairs, problem, own, blueprint) * x.vectors;
        }
        let x_scale_rows = comptime!(blueprint.columns.div_ceil(WARPGROUP));
        let mut x_scales = Array::<u32>::new(x_scale_rows as usize);
        if comptime!(blueprint.operands.is_fp8()) {
            #[unroll]
            for i in 0..x_scale_rows {
                let own = UNIT_POS + comptime!(i * WARPGROUP);
                x_scales[i as usize] = x_row(pairs, problem, own, blueprint);
            }
        }
        let weight_rows = comptime!(blueprint.unit_weight_rows());
        let chunks = comptime!(blueprint.operands.row_chunks());
        let row = UNIT_POS / chunks;
        let mut weights = Array::<u32>::new(weight_rows as usize);
        #[unroll]
        for i in 0..weight_rows {
            let own = row + comptime!(i * WARPGROUP / blueprint.operands.row_chunks());
            let own = problem.matrix * layout.rows + tile.matrix_row(own, layout.rows, blueprint);
            weights[i as usize] = own * (layout.columns / comptime!(blueprint.format().columns()));
        }
        let scale_rows = comptime!(blueprint.unit_scales());
        let mut scales = Array::<u32>::new(scale_rows as usize);
        #[unroll]
        for i in 0..scale_rows {
            let own = tile.matrix_row(UNIT_POS + comptime!(i * WARPGROUP), layout.rows, blueprint);
            let start = problem.matrix as usize * layout.scales_per_matrix
                + layout.scale_row_start(own, blueprint.format());
            scales[i as usize] = match comptime!(blueprint.format()) {
                WeightFormat::Fp4 => (start / 4) as u32,
                _ => start as u32,
            };
        }
        Sources {
            x: x_rows_of,
            x_to,
            weights,
            weights_to: (row * chunks + chunk_place(row, UNIT_POS % chunks, blueprint)) * 16,
            scales,
            x_scales,
        }
    }
}

/// The row of `x` of a column of the tile. Columns past the end have others, whose products nobody
/// reads.
#[cube]
fn x_row(
    pairs: &LargeMPairs,
    problem: &Problem,
    column: u32,
    #[comptime] blueprint: WgmmaBlueprint,
) -> u32 {
    let at = problem.start + min(column, problem.count - 1);
    if comptime!(blueprint.by_position) {
        at
    } else {
        pairs.at(problem, at) / pairs.per_row
    }
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

/// Where a chunk of 16 bytes of a row of weights is among those of the row, such that lanes that
/// read together do so from different banks.
#[cube]
pub(super) fn chunk_place(row: u32, chunk: u32, #[comptime] blueprint: WgmmaBlueprint) -> u32 {
    if comptime!(blueprint.operands.shares_weights()) {
        chunk ^ (row % ROW_VECTORS)
    } else {
        chunk ^ (row / 2 % comptime!(blueprint.operands.row_chunks()))
    }
}

/// The alignment of a stage's weights, in bytes.
const fn weights_alignment(blueprint: WgmmaBlueprint) -> usize {
    if blueprint.operands.shares_weights() {
        1024
    } else {
        16
    }
}
