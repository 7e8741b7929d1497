//! The ring of stages in shared memory, which one warpgroup fills and the others multiply.

use cubecl::prelude::*;

use super::ptx::{
    arrive, arrive_after_copies, copy_vector, copy_word, fence_shared, init_barrier, is_over,
    shared_address, wait,
};
use super::{K_BLOCK, Tile, WARPGROUP, WgmmaBlueprint};
use crate::gemm::kernel::large_m::LargeMPairs;
use crate::gemm::kernel::weights::{MatrixStack, WeightFormat};

/// Bytes of a row of `x` in a stage, the span of the swizzle.
const ROW_BYTES: u32 = 128;
/// Vectors of 16 bytes of such a row.
const ROW_VECTORS: u32 = ROW_BYTES / 16;

/// The stages in shared memory.
#[derive(CubeType)]
pub(super) struct Stages {
    /// Rows of `x`, swizzled.
    pub x: Shared<[u32]>,
    pub weights: Shared<[Vector<u32, Const<2>>]>,
    /// A word for each row of weights.
    pub scales: Shared<[u32]>,
    barriers: Shared<[u64]>,
}

#[cube]
impl Stages {
    pub fn new(#[comptime] blueprint: WgmmaBlueprint) -> Stages {
        let count = comptime!(blueprint.stages);
        let x = comptime!((count * blueprint.columns * ROW_BYTES / 4) as usize);
        let weights = comptime!((count * blueprint.rows() * blueprint.row_chunks() * 2) as usize);
        let scales = comptime!((count * blueprint.rows()) as usize);
        Stages {
            x: Shared::new_aligned_slice(x, 1024usize),
            weights: Shared::new_aligned_slice(weights, 16usize),
            scales: Shared::new_slice(scales),
            barriers: Shared::new_slice(comptime!(3 * count as usize)),
        }
    }
}

/// Where a warpgroup is in the ring. A stage has three barriers: its copies have landed, it is
/// full, it is free.
///
/// Products read shared memory in another way than copies write it, so there must be a fence in
/// between. It would hold up units that multiply. The first plane that copies waits for the copies
/// instead, has the fence, and says that the stage is full.
#[derive(CubeType)]
pub(super) struct Ring {
    barriers: u32,
    x: u32,
    weights: u32,
    scales: u32,
    slot: u32,
    parity: u32,
    /// Stages that have been copied to, but are not full yet, and the first of them.
    pending: u32,
    landing: u32,
    landing_parity: u32,
    #[cube(comptime)]
    blueprint: WgmmaBlueprint,
}

#[cube]
impl Ring {
    /// Every unit of the cube must call this.
    pub fn new(stages: &Stages, #[comptime] blueprint: WgmmaBlueprint) -> Ring {
        let barriers = shared_address(&stages.barriers);
        if UNIT_POS == 0 {
            #[unroll]
            for i in 0..comptime!(blueprint.stages) {
                let arrivals = comptime!([WARPGROUP, 1, blueprint.multiplying_planes()]);
                #[unroll]
                for which in 0..3u32 {
                    let at = comptime!(8 * (which * blueprint.stages + i));
                    init_barrier(barriers + at, comptime!(arrivals[which as usize]));
                }
            }
        }
        sync_cube();
        Ring {
            barriers,
            x: shared_address(&stages.x),
            weights: shared_address(&stages.weights),
            scales: shared_address(&stages.scales),
            slot: 0u32.runtime(),
            parity: 0u32.runtime(),
            pending: 0u32.runtime(),
            landing: 0u32.runtime(),
            landing_parity: 0u32.runtime(),
            blueprint,
        }
    }

    pub fn next(&mut self) {
        self.slot += 1;
        if self.slot == comptime!(self.blueprint.stages) {
            self.slot = 0;
            self.parity ^= 1;
        }
    }

    /// The barrier that says that the stage is free.
    pub fn free(&self) -> u32 {
        self.barriers + 8 * self.slot + comptime!(16 * self.blueprint.stages)
    }

    pub fn wait_full(&self) {
        let full = self.barriers + 8 * self.slot + comptime!(8 * self.blueprint.stages);
        wait(full, self.parity);
    }

    /// The first vector of the stage's weights.
    pub fn weights_vector(&self) -> u32 {
        self.slot * comptime!(self.blueprint.rows() * self.blueprint.row_chunks() * 2)
    }

    /// The first of the stage's scales.
    pub fn scale(&self) -> u32 {
        self.slot * comptime!(self.blueprint.rows())
    }

    /// The lower word of the descriptor of the stage's rows of `x`.
    pub fn x_descriptor(&self) -> u32 {
        let stage = comptime!(self.blueprint.columns * ROW_BYTES);
        ((self.x + self.slot * stage) >> 4) | 0x1_0000u32
    }

    /// Waits until the stage is free. Meanwhile, the first plane says which stages are full.
    fn wait_free(&mut self) {
        let free = self.free();
        if UNIT_POS < 32 {
            while !is_over(free, self.parity ^ 1) {
                self.pass_on();
            }
            self.pass_on();
        } else {
            wait(free, self.parity ^ 1);
        }
    }

    /// Says that the first pending stage is full, if it is. Only for the first plane.
    fn pass_on(&mut self) {
        if self.pending > 0 {
            let landed = self.barriers + 8 * self.landing;
            if is_over(landed, self.landing_parity) {
                fence_shared();
                arrive(landed + comptime!(8 * self.blueprint.stages));
                self.pending -= 1;
                self.landing += 1;
                if self.landing == comptime!(self.blueprint.stages) {
                    self.landing = 0;
                    self.landing_parity ^= 1;
                }
            }
        }
    }

    /// Waits until everything has been passed on. Every unit that copies must call this at the end.
    pub fn finish(&mut self) {
        if UNIT_POS < 32 {
            while self.pending > 0 {
                self.pass_on();
            }
        }
    }

    /// Copies the stages of a tile: rows of `x` and of weights, 64 columns at a time, and a word
    /// with the scales of each of those. Zeros stand for columns past the end. Every unit of the
    /// warpgroup must call this.
    pub fn fill(
        &mut self,
        x: &[Vector<u32, Const<4>>],
        x_vectors: u32,
        pairs: &LargeMPairs,
        matrices: &MatrixStack<Vector<u32, Const<4>>>,
        tile: &Tile,
    ) {
        let blueprint = comptime!(self.blueprint);
        let x_rows = comptime!(blueprint.unit_rows());
        let chunks = comptime!(blueprint.row_chunks());
        let width = matrices.layout.columns;
        let sources = Sources::new(x_vectors, pairs, matrices, tile, blueprint);
        for step in 0..stages_of(width) {
            self.wait_free();
            let to = self.x + self.slot * comptime!(blueprint.columns * ROW_BYTES) + sources.x_to;
            let vector = step * ROW_VECTORS + UNIT_POS % ROW_VECTORS;
            let inside = comptime!(blueprint.whole_stages || blueprint.permuted()).runtime()
                || vector < width / 8;
            let vector = select(inside, vector, 0u32);
            #[unroll]
            for i in 0..x_rows {
                let to = to + comptime!(i * WARPGROUP / ROW_VECTORS * ROW_BYTES);
                copy_vector(to, x, sources.x[i as usize] + vector, inside);
            }
            let stage = comptime!(blueprint.rows() * chunks * 16);
            let to = self.weights + self.slot * stage + sources.weights_to;
            let vector = step * chunks + UNIT_POS % chunks;
            let inside = comptime!(blueprint.whole_stages).runtime()
                || vector < width / comptime!(blueprint.format.columns());
            let vector = select(inside, vector, 0u32);
            #[unroll]
            for i in 0..comptime!(blueprint.unit_weight_rows()) {
                let to = to + comptime!(i * WARPGROUP * 16);
                let from = sources.weights[i as usize] + vector;
                copy_vector(to, &matrices.words, from, inside);
            }
            if comptime!(blueprint.scale_words) {
                let to = self.scales + (self.slot * comptime!(blueprint.rows()) + UNIT_POS) * 4;
                #[unroll]
                for i in 0..comptime!(blueprint.unit_scales()) {
                    let to = to + comptime!(i * WARPGROUP * 4);
                    if UNIT_POS < comptime!(blueprint.rows() - i * WARPGROUP) {
                        copy_word(to, &matrices.scales, sources.scales[i as usize] + step / 2);
                    }
                }
            }
            arrive_after_copies(self.barriers + 8 * self.slot);
            self.pending += 1;
            self.next();
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
}

#[cube]
impl Sources {
    fn new(
        x_vectors: u32,
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
        let mut x = Array::<u32>::new(x_rows as usize);
        #[unroll]
        for i in 0..x_rows {
            // Rows past the end are others, whose products nobody reads.
            let own = min(
                row + comptime!(i * WARPGROUP / ROW_VECTORS),
                problem.count - 1,
            );
            let at = problem.start + own;
            let x_row = if comptime!(blueprint.by_position) {
                at
            } else {
                pairs.at(problem, at) / pairs.per_row
            };
            x[i as usize] = x_row * x_vectors;
        }
        let chunks = comptime!(blueprint.row_chunks());
        let weight_rows = comptime!(blueprint.unit_weight_rows());
        let row = UNIT_POS / chunks;
        let place = chunk_place(row, UNIT_POS % chunks, blueprint);
        let mut weights = Array::<u32>::new(weight_rows as usize);
        #[unroll]
        for i in 0..weight_rows {
            let own = row + comptime!(i * WARPGROUP / chunks);
            let own = problem.matrix * layout.rows + tile.matrix_row(own, layout.rows, blueprint);
            weights[i as usize] = own * (layout.columns / comptime!(blueprint.format.columns()));
        }
        let scale_rows = comptime!(blueprint.unit_scales());
        let mut scales = Array::<u32>::new(scale_rows as usize);
        #[unroll]
        for i in 0..scale_rows {
            let own = tile.matrix_row(UNIT_POS + comptime!(i * WARPGROUP), layout.rows, blueprint);
            let start = problem.matrix as usize * layout.scales_per_matrix
                + layout.scale_row_start(own, blueprint.format);
            scales[i as usize] = match comptime!(blueprint.format) {
                WeightFormat::Fp4 => (start / 4) as u32,
                _ => start as u32,
            };
        }
        Sources {
            x,
            x_to,
            weights,
            weights_to: (row * chunks + place) * 16,
            scales,
        }
    }
}

/// Stages of a tile.
#[cube]
pub(super) fn stages_of(width: u32) -> u32 {
    width.div_ceil(K_BLOCK)
}

/// Where a chunk of 16 bytes of a row of weights is among those of the row, such that lanes that
/// read together do so from different banks.
#[cube]
pub(super) fn chunk_place(row: u32, chunk: u32, #[comptime] blueprint: WgmmaBlueprint) -> u32 {
    if comptime!(blueprint.row_chunks() == 4) {
        chunk ^ (row / 2 % 4)
    } else {
        chunk
    }
}
