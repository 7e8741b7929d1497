use cubecl::prelude::*;

use super::blueprint::{LANE_VECTORS, StreamBlueprint};
use super::operands::{BLOCK_STEPS, XOperands};
use super::place::{LanePlace, XColumns};
use super::row_words::{ACCUMULATORS, RowWords, between_columns};
use super::rows::x_scale;
use crate::gemm::kernel::epilogue::{add_scaled, unscaled, zero_sums};
use crate::gemm::kernel::weights::{K_STEPS, WeightFormat, WeightReader, rare_bits};
use crate::intrinsics::{
    await_copies, ballot, byte, commit_copies, copy_vector, modulo, read_ordered, shared_address,
};

/// The pipeline of weights of a plane of a small-M kernel, in one or two stages of shared memory:
/// while it multiplies a K-block of two rows to a lane, the next one is fetched.
#[derive(CubeType)]
pub(crate) struct Stream<'a> {
    weights: WeightReader<'a>,
    /// For each plane and stage, 16 bytes of each lane for every K-step of the lower row, then of
    /// the upper one.
    ring: Shared<[Vector<u32, Const<4>>]>,
    /// Where it is in shared memory.
    ring_address: u32,
    /// The lane's first vector in the stage that was fetched last.
    stage_offset: usize,
    /// FP4: words with the scales of every K-step, of the lower row and then of the upper one. FP8:
    /// scales of every second K-step, or of every one where blocks are smaller, likewise.
    scales: Array<u32>,
    /// The `x` of one K-step, if it was prefetched.
    x_vec8s: Array<Vector<u32, Const<4>>>,
    /// The `x` of a K-block in registers, if the blueprint has it there.
    pub operands: XOperands,
    /// Where the lane's part of the K-block starts in each row, in vectors of words; where the
    /// scales of those rows start; its first column; and its first vec8 in `x`.
    low: usize,
    high: usize,
    low_scale: usize,
    high_scale: usize,
    first: u32,
    x_at: usize,
    quarter: u32,
    #[cube(comptime)]
    pub blueprint: StreamBlueprint,
}

/// A K-block that was fetched: the lane's first vector in its stage, where its part of `x` and of
/// the columns starts, and the `x` that was prefetched.
#[derive(CubeType)]
pub(super) struct KBlock {
    stage_offset: usize,
    x_at: usize,
    first: u32,
    x_vec8s: Array<Vector<u32, Const<4>>>,
}

/// Bytes of all banks of shared memory.
const BANKS_BYTES: usize = 128;

/// Shared memory for the pipelines of a cube, of so many vectors. It begins at the first bank: what
/// eight lanes copy asynchronously would otherwise lie in two lines of banks.
#[cube]
pub(super) fn new_ring(#[comptime] vectors: u32) -> Shared<[Vector<u32, Const<4>>]> {
    Shared::new_aligned_slice(comptime!(vectors as usize), BANKS_BYTES)
}

#[cube]
impl<'a> Stream<'a> {
    /// `ring` is [allocated](new_ring) for all planes of the cube.
    pub fn new(
        weights: WeightReader<'a>,
        quarter: u32,
        ring: Shared<[Vector<u32, Const<4>>]>,
        #[comptime] blueprint: StreamBlueprint,
    ) -> Stream<'a> {
        let vec8s = comptime!(weights.blueprint.format.vec8s());
        let ring_address = shared_address(&ring[0..1]);
        Stream::<'a> {
            weights,
            ring,
            ring_address,
            stage_offset: (UNIT_POS_Y * comptime!(blueprint.plane_ring_vectors()) + UNIT_POS_X)
                as usize,
            scales: Array::new(comptime!(LANE_VECTORS as usize)),
            x_vec8s: Array::new(comptime!(vec8s as usize)),
            operands: XOperands::new(blueprint),
            low: 0usize,
            high: 0usize,
            low_scale: 0usize,
            high_scale: 0usize,
            first: 0u32,
            x_at: 0usize,
            quarter,
            blueprint,
        }
    }

    /// Chooses the K-block to fetch next: that of two rows of a matrix, from column `first` on, and
    /// of a row of `x` at vec8 `x_row`.
    pub fn seek(&mut self, matrix: u32, low: u32, high: u32, first: u32, x_row: usize) {
        let format = comptime!(self.weights.blueprint.format);
        let rows = self.weights.two_rows(matrix, low, high);
        let at = (first / comptime!(format.columns()) + self.quarter) as usize;
        self.low = rows.low + at;
        self.high = rows.high + at;
        self.low_scale = rows.low_scale;
        self.high_scale = rows.high_scale;
        self.first = first + self.quarter * comptime!(format.columns());
        let x_first = if comptime!(self.blueprint.x_loads() > 1) {
            first % comptime!(self.blueprint.x_columns())
        } else {
            first
        };
        self.x_at = x_row + (x_first / 8 + self.quarter) as usize;
    }

    /// [`seek`](Self::seek) for K-block `block` of this plane, where a cube has `x_rows` rows of
    /// `x`: that of the tile of this plane's group, where the first group has tile `first_tile`.
    pub fn seek_tile(&mut self, place: &LanePlace, matrix: u32, first_tile: u32, block: u32) {
        let blueprint = comptime!(self.blueprint);
        let tile = first_tile + place.concurrent_tile;
        let own = min(
            tile * comptime!(blueprint.tile_outputs()) + place.row,
            place.outputs - 1,
        );
        let k_block = comptime!(blueprint.input.format.k_block());
        let first = (block * blueprint.planes + place.plane) * k_block;
        self.seek(matrix, own, own + place.to_high, first, place.x_row);
    }

    /// Columns of the weights.
    pub fn columns(&self) -> u32 {
        self.weights.stack.columns
    }

    /// Begins to fetch the weights of the chosen K-block. Every lane of the plane must call this.
    pub fn fetch(&mut self) {
        if comptime!(!self.blueprint.one_stage) {
            self.stage_offset ^= comptime!((LANE_VECTORS * 32) as usize);
        }
        self.fetch_scales();
        // Memory answers in order, and the assembler puts some of these reads after the copies.
        sync_plane();
        let stage = self.ring_address + self.stage_offset as u32 * 16;
        #[unroll]
        for c in 0..K_STEPS {
            self.fetch_k_step(stage, c);
            commit_copies();
        }
    }

    /// Continues after another stream of the same plane, by the K-block that it fetched last. The
    /// two alternate in one ring.
    pub fn continue_after(&mut self, last: &KBlock) {
        self.stage_offset = last.stage_offset;
    }

    /// Takes the place of [`fetch`](Self::fetch) where no K-block follows.
    pub fn commit_empty_groups(&self) {
        #[unroll]
        for _ in 0..K_STEPS {
            commit_copies();
        }
    }

    /// Begins to fetch a K-step of the chosen K-block, as zeros past the end.
    fn fetch_k_step(&self, stage: u32, #[comptime] c: u32) {
        let ahead = comptime!((c * 4) as usize);
        let format = comptime!(self.weights.blueprint.format);
        let inside = comptime!(self.weights.blueprint.k_aligned).runtime()
            || self.first + comptime!(c * format.k_step()) < self.weights.stack.columns;
        let words = self.weights.words;
        let low = select(inside, self.low + ahead, 0usize);
        let high = select(inside, self.high + ahead, 0usize);
        let to = stage + comptime!(c * 32 * 16);
        copy_vector(to, &words[low..low + 1], 0u32, inside);
        let to = to + comptime!(K_STEPS * 32 * 16);
        copy_vector(to, &words[high..high + 1], 0u32, inside);
    }

    /// Reads the scales of the chosen K-block. Memory answers in order, so this is before the
    /// copies.
    fn fetch_scales(&mut self) {
        let format = comptime!(self.weights.blueprint.format);
        let target = comptime!(self.weights.blueprint.target);
        if comptime!(format.is_fp4()) {
            if comptime!(self.weights.blueprint.scale_vectors) {
                let mut at = self.first / 512;
                if comptime!(!self.weights.blueprint.k_aligned) {
                    at = min(at, self.weights.stack.columns / 512 - 1);
                }
                let at = at as usize;
                let scales = self.weights.scales.with_vector_size::<Const<4>>();
                let low = read_ordered(scales, self.low_scale / 16 + at, target);
                let high = read_ordered(scales, self.high_scale / 16 + at, target);
                #[unroll]
                for c in 0..K_STEPS {
                    self.scales[c as usize] = low.extract(comptime!(c as usize));
                    self.scales[comptime!((K_STEPS + c) as usize)] =
                        high.extract(comptime!(c as usize));
                }
            } else {
                #[unroll]
                for c in 0..K_STEPS {
                    let column = self.first + comptime!(c * 128);
                    self.scales[c as usize] = self.weights.scale_word(self.low_scale, column);
                    self.scales[comptime!((K_STEPS + c) as usize)] =
                        self.weights.scale_word(self.high_scale, column);
                }
            }
        }
        if comptime!(format.is_fp8()) {
            let steps = comptime!((format.fp8_block() / format.k_step()).max(1));
            #[unroll]
            for c in 0..comptime!(K_STEPS / steps) {
                let column = self.first + comptime!(c * steps * format.k_step());
                let low = self.weights.scale_index(self.low_scale, column);
                let high = self.weights.scale_index(self.high_scale, column);
                let scales = self.weights.scales;
                self.scales[comptime!((steps * c) as usize)] =
                    u32::reinterpret(read_ordered(scales, low, target));
                self.scales[comptime!((K_STEPS + steps * c) as usize)] =
                    u32::reinterpret(read_ordered(scales, high, target));
            }
        }
    }

    /// Reads the `x` of a K-step of the chosen K-block; from memory, before the weights that are
    /// fetched next. Every lane of the plane must call this.
    pub fn prefetch_x(&mut self, x: &[Vector<u32, Const<4>>], k_step: u32) {
        let format = comptime!(self.weights.blueprint.format);
        let at = self.x_at + (k_step * comptime!(4 * format.vec8s())) as usize;
        let column = self.first + k_step * comptime!(format.k_step());
        #[unroll]
        for u in 0..comptime!(format.vec8s()) {
            self.x_vec8s[u as usize] = self.x_vec8(x, at, column, u);
        }
        if comptime!(self.blueprint.x_rows == 0) {
            // Else the assembler puts some of these reads after the copies.
            sync_plane();
        }
    }

    /// Reads vec8 `u` of the lane's 16 bytes in the K-step that starts at vec8 `at` of `x` and at
    /// `column` of the weights; zeros past the end.
    fn x_vec8(
        &self,
        x: &[Vector<u32, Const<4>>],
        at: usize,
        column: u32,
        #[comptime] u: u32,
    ) -> Vector<u32, Const<4>> {
        let inside = comptime!(self.weights.blueprint.k_aligned)
            || column + comptime!(u * 8) < self.weights.stack.columns;
        let at = select(inside, at + comptime!((u * 4) as usize), 0usize);
        let words = if comptime!(self.blueprint.x_rows == 0) {
            read_ordered(x, at, self.blueprint.target)
        } else {
            x[at]
        };
        select(inside, words, Vector::new(0u32))
    }

    /// Copies the scales of the K-block that was fetched, as codes (FP4).
    pub fn load_scales(&self, scales: &mut Array<u32>) {
        #[unroll]
        for c in 0..K_STEPS {
            let low = self.scales[c as usize];
            let high = self.scales[comptime!((K_STEPS + c) as usize)];
            if comptime!(!self.weights.blueprint.format.is_fp4()) {
                scales[c as usize] = low;
                scales[comptime!((K_STEPS + c) as usize)] = high;
            } else if comptime!(self.weights.blueprint.scale_vectors) {
                scales[c as usize] = byte(low, self.quarter);
                scales[comptime!((K_STEPS + c) as usize)] = byte(high, self.quarter);
            } else {
                let column = self.first + comptime!(c * 128);
                let low_byte = self.weights.scale_byte(self.low_scale, column) % 4;
                let high_byte = self.weights.scale_byte(self.high_scale, column) % 4;
                scales[c as usize] = byte(low, low_byte as u32);
                scales[comptime!((K_STEPS + c) as usize)] = byte(high, high_byte as u32);
            }
        }
    }

    /// The K-block that was fetched last. It stays what it is when another is chosen.
    pub fn fetched(&self) -> KBlock {
        let vec8s = comptime!(self.weights.blueprint.format.vec8s());
        let mut x_vec8s = Array::<Vector<u32, Const<4>>>::new(comptime!(vec8s as usize));
        if comptime!(self.blueprint.reads_ahead()) {
            #[unroll]
            for u in 0..comptime!(vec8s as usize) {
                x_vec8s[u] = self.x_vec8s[u];
            }
        }
        // Fields as they are would follow the stream.
        KBlock {
            stage_offset: self.stage_offset + 0usize,
            x_at: self.x_at + 0usize,
            first: self.first + 0u32,
            x_vec8s,
        }
    }

    /// Multiplies the K-block that was [fetched](Self::fetched) by `x` in shared memory, and
    /// meanwhile fetches the chosen one, if `has_next`. Where the blueprint says so, `x` is read
    /// one K-step before it is needed, including that of the next K-block. Every lane gets four
    /// sums of 16 rows of weights by each tile of 8 rows of `x`. Every lane of the plane must call
    /// this.
    pub fn multiply(
        &mut self,
        block: &KBlock,
        x: &[Vector<u32, Const<4>>],
        scales: &Array<u32>,
        has_next: bool,
    ) -> Array<Vector<f32, Const<4>>> {
        if comptime!(self.blueprint.one_stage) {
            if has_next {
                self.fetch_scales();
                sync_plane();
            }
        } else if has_next {
            self.fetch();
        } else {
            self.commit_empty_groups();
        }
        self.multiply_staged(block, x, scales, has_next, XColumns::Rows)
    }

    /// [`multiply`](Self::multiply) where the caller has called [`fetch`](Self::fetch) or
    /// [`commit_empty_groups`](Self::commit_empty_groups) for what follows. `x` may come from
    /// memory, where the caller has [prefetched](Self::prefetch_x) what `x_columns` says.
    pub fn multiply_staged(
        &mut self,
        block: &KBlock,
        x: &[Vector<u32, Const<4>>],
        scales: &Array<u32>,
        has_next: bool,
        #[comptime] x_columns: XColumns,
    ) -> Array<Vector<f32, Const<4>>> {
        let spread = comptime!(x_columns == XColumns::KSteps);
        let ahead = comptime!(self.blueprint.reads_ahead());
        let in_registers = comptime!(self.blueprint.x_in_registers);
        let one_stage = comptime!(self.blueprint.one_stage);
        let stage_offset = block.stage_offset;
        let (x_at, first) = (block.x_at, block.first);
        let format = comptime!(self.weights.blueprint.format);
        let f16_input = comptime!(self.blueprint.input.f16_input);
        let vec8s = comptime!(format.vec8s());
        let x_tiles = comptime!(self.blueprint.x_tiles());
        // Of each tile of `x`, two alternating accumulators, so that a product need not wait for
        // the one before; and a third for FP8, which sums the scaled blocks.
        let mut sums = zero_sums(comptime!(ACCUMULATORS * x_tiles));
        let mut columns = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * vec8s as usize));
        if comptime!(ahead) {
            #[unroll]
            for u in 0..vec8s {
                columns[u as usize] = block.x_vec8s[u as usize];
            }
        }
        let mut ordinary = true;
        if comptime!(format.is_fp4()) {
            let mut rare = 0u32;
            #[unroll]
            for i in 0..comptime!(LANE_VECTORS as usize) {
                rare |= scales[i];
            }
            ordinary = ballot(rare & 0x80u32 != 0, self.weights.blueprint.target) == 0;
        }
        #[unroll]
        for c in 0..K_STEPS {
            let more = comptime!(if one_stage { 0 } else { K_STEPS - c });
            await_copies(comptime!(K_STEPS - 1 + more));
            let low = self.ring[stage_offset + comptime!((c * 32) as usize)];
            let high = self.ring[stage_offset + comptime!(((K_STEPS + c) * 32) as usize)];
            let now = comptime!(if ahead && !spread { c % 2 * vec8s } else { 0 });
            let wanted = comptime!(if ahead { c + 1 } else { c });
            if comptime!(!spread && !in_registers && wanted < K_STEPS) {
                let at = x_at + comptime!((wanted * 4 * vec8s) as usize);
                let column = first + comptime!(wanted * format.k_step());
                let to = comptime!(if ahead { vec8s - now } else { 0 });
                #[unroll]
                for tile in 0..x_tiles {
                    let of_tile = comptime!((tile * 8 * self.blueprint.row_pitch()) as usize);
                    #[unroll]
                    for u in 0..vec8s {
                        columns[comptime!((to + tile * vec8s + u) as usize)] =
                            self.x_vec8(x, at + of_tile, column, u);
                    }
                }
            } else if comptime!(self.blueprint.x_rows > 0) && has_next {
                self.prefetch_x(x, 0u32);
            }
            let words = RowWords {
                low,
                high,
                low_scale: scales[c as usize],
                high_scale: scales[comptime!((K_STEPS + c) as usize)],
            };
            if comptime!(format.is_fp8() && !f16_input) {
                let rare = rare_bits(low, words.low_scale, format)
                    | rare_bits(high, words.high_scale, format);
                ordinary = ballot(rare != 0, self.weights.blueprint.target) == 0;
            }
            if comptime!(in_registers) {
                let own = comptime!(c * x_tiles * vec8s);
                words.multiply(&self.operands.vec8s, own, &mut sums, self.blueprint, false);
            } else if comptime!(format == WeightFormat::Dense || f16_input) {
                words.multiply(&columns, now, &mut sums, self.blueprint, false);
            } else if ordinary {
                words.multiply(&columns, now, &mut sums, self.blueprint, false);
            } else {
                words.multiply(&columns, now, &mut sums, self.blueprint, true);
            }
            if comptime!(one_stage) {
                // The K-step is in registers, and its place is free.
                if has_next {
                    let stage = self.ring_address + self.stage_offset as u32 * 16;
                    self.fetch_k_step(stage, c);
                }
                commit_copies();
            }
            if comptime!(format == WeightFormat::Fp8 && c % 2 == 1) {
                #[unroll]
                for tile in 0..x_tiles {
                    let of_tile = comptime!((ACCUMULATORS * tile) as usize);
                    let mut block = sums[of_tile] + sums[comptime!(of_tile + 1)];
                    if comptime!(f16_input) {
                        block = self.unscaled(x, block, first, tile, c);
                    }
                    if comptime!(spread && c + 1 < K_STEPS) {
                        let to_last = comptime!(K_STEPS - 1 - c);
                        block = between_columns(block, to_last, self.weights.blueprint.target);
                    }
                    sums[comptime!(of_tile + 2)] = add_scaled(
                        sums[comptime!(of_tile + 2)],
                        block,
                        f32::reinterpret(scales[comptime!(c as usize - 1)]),
                        f32::reinterpret(scales[comptime!((K_STEPS + c) as usize - 1)]),
                    );
                    sums[of_tile] = Vector::new(0.0f32);
                    sums[comptime!(of_tile + 1)] = Vector::new(0.0f32);
                }
            } else if comptime!(spread && c + 1 < K_STEPS) {
                #[unroll]
                for m in 0..2usize {
                    sums[m] = between_columns(
                        sums[m],
                        comptime!(c ^ (c + 1)),
                        self.weights.blueprint.target,
                    );
                }
            }
        }
        let mut products = zero_sums(x_tiles);
        #[unroll]
        for tile in 0..comptime!(x_tiles as usize) {
            let of_tile = comptime!(ACCUMULATORS as usize * tile);
            products[tile] = if comptime!(format == WeightFormat::Fp8) {
                sums[comptime!(of_tile + 2)]
            } else {
                sums[of_tile] + sums[comptime!(of_tile + 1)]
            };
        }
        products
    }

    /// Undoes the scaling of `x` in the sums of a block of columns by a tile of `x`, by the factors
    /// that are stored with its rows in shared memory, or with its operands. The block ends with
    /// K-step `c` of the K-block in which the lane has columns from `first` on.
    fn unscaled(
        &self,
        x: &[Vector<u32, Const<4>>],
        sums: Vector<f32, Const<4>>,
        first: u32,
        #[comptime] tile: u32,
        #[comptime] c: u32,
    ) -> Vector<f32, Const<4>> {
        let x_rows = comptime!(self.blueprint.x_rows);
        if comptime!(self.blueprint.x_in_registers) {
            let (first, second) = self.operands.factors_of(tile, comptime!(c / BLOCK_STEPS));
            unscaled(sums, first, second)
        } else {
            let block = (first + comptime!(c * self.blueprint.input.format.k_step())) / 128;
            let block = if comptime!(self.blueprint.x_loads() > 1) {
                block % comptime!(self.blueprint.x_columns() / 128)
            } else {
                block
            };
            let x_row = modulo(self.quarter * 2, x_rows) + comptime!(8 * tile);
            let first = x_scale(x, x_row, block, self.blueprint);
            let second = if comptime!(x_rows > 1) {
                x_scale(x, x_row + 1, block, self.blueprint)
            } else {
                first
            };
            unscaled(sums, first, second)
        }
    }
}
