use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::STEP;
use super::blueprint::FewBlueprint;
use super::decode::Format;
use super::halves::scale_at;
use super::pairs::{add_scaled, rare_bits, unscaled, weight_pair};
use super::weights::Weights;
use crate::intrinsics::{await_copies, ballot, byte, commit_copies, multiply_tiles};

/// Weights on their way to a plane of a few rows' kernel, through shared memory: while it multiplies a stretch of two rows to a lane, the
/// next stretch comes.
#[derive(CubeType)]
pub(crate) struct Stream<'a, S: Size> {
    weights: Weights<'a, S>,
    /// For each plane and two stretches, 16 bytes of each lane of every chunk of the lower row, then of the upper one.
    ring: Shared<[Vector<u32, Const<4>>]>,
    /// Where the lane's share of the stretch begins that was fetched last.
    pub own: usize,
    /// FP4: words with the scales of every chunk, of the lower row and then of the upper one. FP8: scales of every second chunk, likewise.
    scales: Array<u32>,
    /// The first chunk of `x`, if that was fetched.
    columns: Array<Vector<u32, Const<4>>>,
    /// Where the lane's share of the stretch starts, in each row: in words, in scales, which are those of whole rows; its first
    /// column; and its unit in `x`.
    low: usize,
    high: usize,
    low_scale: usize,
    high_scale: usize,
    pub first: u32,
    pub x_at: usize,
    quarter: u32,
    /// The cut, which says whether `x` is in `f16`.
    #[cube(comptime)]
    blueprint: FewBlueprint,
}

/// Vectors of a lane of a stretch.
const VECTORS: u32 = 2 * STEP;
/// Vectors of 16 bytes of shared memory of a plane's stream.
const RING_VECTORS: u32 = 2 * VECTORS * 32;
/// The same in bytes.
pub(super) const RING_BYTES: usize = RING_VECTORS as usize * 16;
/// Bytes of all banks of shared memory.
const BANKS_BYTES: usize = 128;

/// Shared memory for a stream of each of so many planes. It begins at the first bank: what eight lanes copy there asynchronously would
/// else be written as two lines.
#[cube]
pub(super) fn new_ring(#[comptime] planes: u32) -> Shared<[Vector<u32, Const<4>>]> {
    Shared::new_aligned_slice(comptime!((planes * RING_VECTORS) as usize), BANKS_BYTES)
}

#[cube]
impl<'a, S: Size> Stream<'a, S> {
    /// `ring` is [for](new_ring) all planes of the cube.
    pub fn new(
        weights: Weights<'a, S>,
        quarter: u32,
        ring: Shared<[Vector<u32, Const<4>>]>,
        #[comptime] blueprint: FewBlueprint,
    ) -> Stream<'a, S> {
        let units = comptime!(weights.format.units());
        Stream::<'a, S> {
            weights,
            ring,
            own: (UNIT_POS_Y * RING_VECTORS + UNIT_POS_X) as usize,
            scales: Array::new(comptime!(VECTORS as usize)),
            columns: Array::new(comptime!(units as usize)),
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

    /// Chooses the stretch that comes next: of two rows of a matrix, from column `first` on, and a row of `x` in units.
    pub fn aim(&mut self, matrix: u32, low: u32, high: u32, first: u32, x_row: usize) {
        let format = comptime!(self.weights.format);
        let tile = self.weights.tile(matrix, low, high);
        let at = (first / comptime!(format.columns()) + self.quarter) as usize;
        self.low = tile.low + at;
        self.high = tile.high + at;
        self.low_scale = tile.low_scale;
        self.high_scale = tile.high_scale;
        self.first = first + self.quarter * comptime!(format.columns());
        self.x_at = x_row + (first / 8 + self.quarter) as usize;
    }

    /// Begins to read its weights.
    pub fn fetch(&mut self) {
        self.own ^= comptime!((VECTORS * 32) as usize);
        #[unroll]
        for c in 0..STEP {
            self.fetch_chunk(c);
            commit_copies();
        }
        self.fetch_scales();
    }

    /// Takes turns with another stream of the same plane, whose last stretch `own` was.
    pub fn follow(&mut self, own: usize) {
        self.own = own;
    }

    /// Instead of [`fetch`](Self::fetch), where nothing comes next.
    pub fn fetch_nothing(&self) {
        #[unroll]
        for _ in 0..STEP {
            commit_copies();
        }
    }

    fn fetch_chunk(&mut self, #[comptime] c: u32) {
        let ahead = comptime!((c * 4) as usize);
        let mut low = self.low + ahead;
        let mut high = self.high + ahead;
        if comptime!(!self.weights.even) {
            // Past the end, what is read is not used.
            let format = comptime!(self.weights.format);
            let inside = self.first + comptime!(c * format.chunk()) < self.weights.stack.columns;
            low = select(inside, low, 0usize);
            high = select(inside, high, 0usize);
        }
        let to = self.own + comptime!((c * 32) as usize);
        let next = to + comptime!((STEP * 32) as usize);
        copy_async(
            &self.weights.words[low..low + 1],
            &mut self.ring[to..to + 1],
            4u32,
        );
        copy_async(
            &self.weights.words[high..high + 1],
            &mut self.ring[next..next + 1],
            4u32,
        );
    }

    /// What has come of a row's chunk, zeros past the end.
    fn take(&self, own: usize, first: u32, #[comptime] vector: u32) -> Vector<u32, Const<4>> {
        let words = self.ring[own + comptime!((vector * 32) as usize)];
        if comptime!(self.weights.even) {
            words
        } else {
            let column = first + comptime!(vector % STEP * self.weights.format.chunk());
            select(
                column < self.weights.stack.columns,
                words,
                Vector::new(0u32),
            )
        }
    }

    fn fetch_scales(&mut self) {
        let format = comptime!(self.weights.format);
        if comptime!(format == Format::Fp4) {
            let size = S::value();
            if comptime!(size == 4) {
                let mut at = self.first / 512;
                if comptime!(!self.weights.even) {
                    at = min(at, self.weights.stack.columns / 512 - 1);
                }
                let at = at as usize;
                let low = self.weights.scales[self.low_scale / 16 + at];
                let high = self.weights.scales[self.high_scale / 16 + at];
                #[unroll]
                for c in 0..STEP {
                    self.scales[c as usize] = low.extract(comptime!(c as usize));
                    self.scales[comptime!((STEP + c) as usize)] =
                        high.extract(comptime!(c as usize));
                }
            } else {
                #[unroll]
                for c in 0..STEP {
                    let column = self.first + comptime!(c * 128);
                    self.scales[c as usize] = self.weights.scale_word(self.low_scale, column);
                    self.scales[comptime!((STEP + c) as usize)] =
                        self.weights.scale_word(self.high_scale, column);
                }
            }
        }
        if comptime!(format == Format::Fp8) {
            #[unroll]
            for c in 0..comptime!(STEP / 2) {
                let column = self.first + comptime!(c * 128);
                self.scales[comptime!(2 * c as usize)] =
                    u32::reinterpret(self.weights.scale(self.low_scale, column));
                self.scales[comptime!((STEP + 2 * c) as usize)] =
                    u32::reinterpret(self.weights.scale(self.high_scale, column));
            }
        }
    }

    /// Reads the first chunk of its `x`.
    pub fn fetch_columns(&mut self, x: &[Vector<u32, Const<4>>]) {
        #[unroll]
        for u in 0..comptime!(self.weights.format.units()) {
            self.columns[u as usize] = self.unit(x, self.x_at, self.first, u);
        }
    }

    /// Unit `u` of the lane's 16 bytes of a chunk that starts at unit `at` of `x` and at `column` of the weights; zeros past the end.
    fn unit(
        &self,
        x: &[Vector<u32, Const<4>>],
        at: usize,
        column: u32,
        #[comptime] u: u32,
    ) -> Vector<u32, Const<4>> {
        let at = at + comptime!((u * 4) as usize);
        if comptime!(self.weights.even) {
            x[at]
        } else {
            let inside = column + comptime!(u * 8) < self.weights.stack.columns;
            select(inside, x[select(inside, at, 0usize)], Vector::new(0u32))
        }
    }

    /// The scales of the stretch that was read, as codes (FP4).
    pub fn take_scales(&self, scales: &mut Array<u32>) {
        let size = S::value();
        #[unroll]
        for c in 0..STEP {
            let low = self.scales[c as usize];
            let high = self.scales[comptime!((STEP + c) as usize)];
            if comptime!(self.weights.format != Format::Fp4) {
                scales[c as usize] = low;
                scales[comptime!((STEP + c) as usize)] = high;
            } else if comptime!(size == 4) {
                scales[c as usize] = byte(low, self.quarter);
                scales[comptime!((STEP + c) as usize)] = byte(high, self.quarter);
            } else {
                let column = self.first + comptime!(c * 128);
                let low_byte = self.weights.scale_byte(self.low_scale, column) % 4;
                let high_byte = self.weights.scale_byte(self.high_scale, column) % 4;
                scales[c as usize] = byte(low, low_byte as u32);
                scales[comptime!((STEP + c) as usize)] = byte(high, high_byte as u32);
            }
        }
    }

    /// Products of the stretch that was fetched, which started at `first` and at the unit `x_at` of `x`; meanwhile fetches the one that
    /// was aimed at, if there is one. `ahead`, `x` is read a chunk before it is needed, as is the first chunk of the next. Every lane has
    /// four sums of 16 rows by 8 columns. All lanes of the plane must be here.
    pub fn multiply(
        &mut self,
        x: &[Vector<u32, Const<4>>],
        x_at: usize,
        first: u32,
        scales: &Array<u32>,
        goes_on: bool,
        #[comptime] ahead: bool,
    ) -> Vector<f32, Const<4>> {
        let own = self.own + 0usize;
        if goes_on {
            self.fetch();
        } else {
            self.fetch_nothing();
        }
        self.products(own, x, x_at, first, scales, goes_on, ahead)
    }

    /// [`multiply`](Self::multiply) for the stretch at `own`, after something has been fetched behind it, or nothing.
    #[allow(clippy::too_many_arguments)]
    pub fn products(
        &mut self,
        own: usize,
        x: &[Vector<u32, Const<4>>],
        x_at: usize,
        first: u32,
        scales: &Array<u32>,
        goes_on: bool,
        #[comptime] ahead: bool,
    ) -> Vector<f32, Const<4>> {
        let format = comptime!(self.weights.format);
        let halves = comptime!(self.blueprint.columns.halves);
        let units = comptime!(format.units());
        // Two sums, which take turns, so that a product need not wait for the one before; and FP8, that of the blocks.
        let mut sums = Array::<Vector<f32, Const<4>>>::new(3usize);
        #[unroll]
        for i in 0..3usize {
            sums[i] = Vector::new(0.0f32);
        }
        let mut columns = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * units as usize));
        if comptime!(ahead) {
            #[unroll]
            for u in 0..units {
                columns[u as usize] = self.columns[u as usize];
            }
        }
        let mut ordinary = true;
        if comptime!(format == Format::Fp4) {
            let mut rare = 0u32;
            #[unroll]
            for i in 0..comptime!(VECTORS as usize) {
                rare |= scales[i];
            }
            ordinary = ballot(rare & 0x80u32 != 0, self.weights.target) == 0;
        }
        #[unroll]
        for c in 0..STEP {
            await_copies(comptime!(2 * STEP - 1 - c));
            let low = self.take(own, first, c);
            let high = self.take(own, first, comptime!(STEP + c));
            let now = comptime!(if ahead { c % 2 * units } else { 0 });
            let wanted = comptime!(if ahead { c + 1 } else { c });
            if comptime!(wanted < STEP) {
                let at = x_at + comptime!((wanted * 4 * units) as usize);
                let column = first + comptime!(wanted * format.chunk());
                let to = comptime!(if ahead { units - now } else { 0 });
                #[unroll]
                for u in 0..units {
                    columns[comptime!((to + u) as usize)] = self.unit(x, at, column, u);
                }
            } else if goes_on {
                self.fetch_columns(x);
            }
            let low_scale = scales[c as usize];
            let high_scale = scales[comptime!((STEP + c) as usize)];
            if comptime!(format == Format::Fp8 && !halves) {
                let rare = rare_bits(low, low_scale, format) | rare_bits(high, high_scale, format);
                ordinary = ballot(rare != 0, self.weights.target) == 0;
            }
            if comptime!(format == Format::Dense || halves) {
                multiply_chunk(
                    low, high, low_scale, high_scale, &columns, now, &mut sums, format, halves,
                    false,
                );
            } else if ordinary {
                multiply_chunk(
                    low, high, low_scale, high_scale, &columns, now, &mut sums, format, halves,
                    false,
                );
            } else {
                multiply_chunk(
                    low, high, low_scale, high_scale, &columns, now, &mut sums, format, halves,
                    true,
                );
            }
            if comptime!(format == Format::Fp8 && c % 2 == 1) {
                let mut block = sums[0] + sums[1];
                if comptime!(halves) {
                    block = self.unscaled(x, block, (first + comptime!(c * format.chunk())) / 128);
                }
                sums[2] = add_scaled(
                    sums[2],
                    block,
                    f32::reinterpret(scales[comptime!(c as usize - 1)]),
                    f32::reinterpret(scales[comptime!((STEP + c) as usize - 1)]),
                );
                sums[0] = Vector::new(0.0f32);
                sums[1] = Vector::new(0.0f32);
            }
        }
        if comptime!(format == Format::Fp8) {
            sums[2]
        } else {
            sums[0] + sums[1]
        }
    }

    /// A block's sums divided by the scales that the columns of `x`, its rows in shared memory, have there.
    fn unscaled(
        &self,
        x: &[Vector<u32, Const<4>>],
        sums: Vector<f32, Const<4>>,
        block: u32,
    ) -> Vector<f32, Const<4>> {
        let lines = comptime!(self.blueprint.lines);
        let line = self.quarter * 2 % lines;
        let first = scale_of(x, line, block, self.blueprint);
        let second = if comptime!(lines > 1) {
            scale_of(x, line + 1, block, self.blueprint)
        } else {
            first
        };
        unscaled(sums, first, second)
    }
}

#[cube]
fn scale_of(
    x: &[Vector<u32, Const<4>>],
    line: u32,
    block: u32,
    #[comptime] blueprint: FewBlueprint,
) -> f32 {
    f32::reinterpret(x[scale_at(line, block, blueprint)].extract(0usize))
}

/// Adds the products of a chunk, whose units of `x` are `columns` from `first` on, to two sums in turns. `rare` is for what takes longer:
/// FP4 scales above two, FP8 codes that are NaN.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply_chunk(
    low: Vector<u32, Const<4>>,
    high: Vector<u32, Const<4>>,
    low_scale: u32,
    high_scale: u32,
    columns: &Array<Vector<u32, Const<4>>>,
    #[comptime] first: u32,
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] format: Format,
    #[comptime] halves: bool,
    #[comptime] rare: bool,
) {
    let dtype = comptime!(if halves { "f16" } else { "bf16" });
    #[unroll]
    for u in 0..comptime!(format.units() as usize) {
        #[unroll]
        for m in 0..2usize {
            let (i, j) = comptime!((2 * m, 2 * m + 1));
            sums[m] = multiply_tiles(
                weight_pair(low, low_scale, u, i, format, halves, rare),
                weight_pair(high, high_scale, u, i, format, halves, rare),
                weight_pair(low, low_scale, u, j, format, halves, rare),
                weight_pair(high, high_scale, u, j, format, halves, rare),
                columns[comptime!(first as usize + u)].extract(comptime!(2 * m)),
                columns[comptime!(first as usize + u)].extract(comptime!(2 * m + 1)),
                sums[m],
                dtype,
            );
        }
    }
}
