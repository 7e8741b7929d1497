//! Weights as fragments of `bf16` in registers, and their products.

use cubecl::prelude::*;

use super::blueprint::WgmmaBlueprint;
use super::ring::{StageRange, Stages, chunk_place};
use super::tile::Tile;
use crate::gemm::kernel::input::{bf16_pair, term_of};
use crate::gemm::kernel::weights::{
    MatrixStack, ReaderBlueprint, TwoRows, WeightFormat, WeightReader, fp4_bf16x2,
    fp4_first_factor, fp4_second_factor, fp8_bf16x2, fp8_factor, fp8_first_factor,
    fp8_second_factor, is_rare_scale,
};
use crate::intrinsics::{ballot, multiply_bf16x2};
use crate::warpgroup::{
    Ring, TileLayout, arrive, await_products, bytes_of, commit_products, fence_registers, multiply,
    read_half_word,
};

/// What pairs of FP8 weights are to be multiplied by, `2^120` in `bf16`, twice in a word.
const FP8_UNIT: u32 = 0x7b80_7b80;
/// Terms of a product of a weight and a scale of any bits.
const SCALED_TERMS: u32 = 3;

/// The rows of a lane's fragments, 8 apart in a tile.
#[derive(CubeType)]
pub(super) struct LaneRows<'a> {
    reader: WeightReader<'a>,
    rows: TwoRows,
    /// The row of the tile that is the lower one.
    row: u32,
    /// Bits that are set by the codes of FP8 that are NaN, in each of the rows.
    low_nan: u32,
    high_nan: u32,
}

/// Scales of both rows: a code (FP4), or the bits of an `f32` (FP8).
#[derive(CubeType, Clone, Copy)]
struct Scales {
    low: u32,
    high: u32,
}

#[cube]
impl Scales {
    /// Whether the plane has codes of FP4 scales above two, or rare scales of 32x32.
    fn are_rare(&self, #[comptime] blueprint: WgmmaBlueprint) -> bool {
        if comptime!(blueprint.format().is_fp4()) {
            ballot((self.low | self.high) & 0x80 != 0, blueprint.target) != 0
        } else if comptime!(blueprint.format() == WeightFormat::Fp8Blocks32) {
            let rare = is_rare_scale(self.low) || is_rare_scale(self.high);
            ballot(rare, blueprint.target) != 0
        } else {
            false.runtime()
        }
    }

    /// Pairs of weights times scales that are short.
    fn times(
        &self,
        pairs: &Array<u32>,
        rare: bool,
        #[comptime] blueprint: WgmmaBlueprint,
    ) -> Array<u32> {
        let (low, high) = if comptime!(blueprint.format().is_fp4()) {
            (fp4_first_factor(self.low), fp4_first_factor(self.high))
        } else if comptime!(blueprint.format() == WeightFormat::Fp8Blocks32) {
            (fp8_first_factor(self.low), fp8_first_factor(self.high))
        } else {
            (fp8_factor(self.low), fp8_factor(self.high))
        };
        let mut fragments = multiplied(pairs, low, high);
        if rare {
            let (low, high) = if comptime!(blueprint.format() == WeightFormat::Fp8Blocks32) {
                (fp8_second_factor(self.low), fp8_second_factor(self.high))
            } else {
                (fp4_second_factor(self.low), fp4_second_factor(self.high))
            };
            let rest = multiplied(&fragments, low, high);
            #[unroll]
            for i in 0..8usize {
                fragments[i] = rest[i];
            }
        }
        fragments
    }

    /// A term of pairs of FP8 weights times scales, in `f32`.
    fn term_of_times(&self, pairs: &Array<u32>, term: u32) -> Array<u32> {
        let (low, high) = (f32::reinterpret(self.low), f32::reinterpret(self.high));
        let mut fragments = Array::<u32>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            let scale = if comptime!(i % 2 == 0) { low } else { high };
            let pair = multiply_bf16x2(pairs[i], FP8_UNIT);
            let first = f32::reinterpret(pair << 16) * scale;
            let second = f32::reinterpret(pair & 0xffff_0000u32) * scale;
            fragments[i] = bf16_pair(term_of(first, term), term_of(second, term));
        }
        fragments
    }
}

#[cube]
impl<'a> LaneRows<'a> {
    pub fn new(
        stack: &'a MatrixStack<Vector<u32, Const<4>>>,
        tile: &Tile,
        row: u32,
        #[comptime] blueprint: WgmmaBlueprint,
    ) -> LaneRows<'a> {
        let reader = WeightReader::new(
            stack,
            comptime!(ReaderBlueprint {
                format: blueprint.format(),
                k_aligned: false,
                scale_vectors: false,
                in_parts: true,
                target: blueprint.target,
            }),
        );
        let low = tile.matrix_row(row, stack.layout.rows, blueprint);
        let high = tile.matrix_row(row + 8, stack.layout.rows, blueprint);
        let rows = reader.two_rows(tile.problem.matrix, low, high);
        LaneRows::<'a> {
            reader,
            rows,
            row,
            low_nan: 0u32.runtime(),
            high_nan: 0u32.runtime(),
        }
    }

    /// Whether a weight of the lower row is NaN, and of the upper one. Every lane must call this.
    pub fn nan(&self, #[comptime] blueprint: WgmmaBlueprint) -> (bool, bool) {
        let quad = 15u32 << (UNIT_POS % 32 / 4 * 4);
        let low = ballot(self.low_nan & 0x0800_0800u32 != 0, blueprint.target);
        let high = ballot(self.high_nan & 0x0800_0800u32 != 0, blueprint.target);
        (low & quad != 0, high & quad != 0)
    }

    /// Reads the scales of a step from its stage, or from memory where they are not words.
    fn scales(
        &self,
        stages: &Stages,
        first: u32,
        step: u32,
        #[comptime] blueprint: WgmmaBlueprint,
    ) -> Scales {
        if comptime!(blueprint.scale_words) {
            let at = (first + self.row) as usize;
            let (low, high) = (stages.scales[at], stages.scales[at + 8]);
            if comptime!(blueprint.format().is_fp4()) {
                let shift = UNIT_POS % 4 * 8;
                Scales {
                    low: (low >> shift) & 255,
                    high: (high >> shift) & 255,
                }
            } else {
                Scales { low, high }
            }
        } else {
            let column = step * comptime!(blueprint.operands.k_block()) + UNIT_POS % 4 * 32;
            let (low, high) = (self.rows.low_scale, self.rows.high_scale);
            let low_word = self.reader.scale_word(low, column);
            let high_word = self.reader.scale_word(high, column);
            Scales {
                low: (low_word >> self.reader.scale_shift(low, column)) & 255,
                high: (high_word >> self.reader.scale_shift(high, column)) & 255,
            }
        }
    }

    /// Multiplies the stages of a tile as they become full, by the first `columns` rows of `x`.
    pub fn multiply(
        &mut self,
        ring: &mut Ring,
        stages: &Stages,
        width: u32,
        #[comptime] columns: u32,
        #[comptime] blueprint: WgmmaBlueprint,
    ) {
        // Codes of FP4, which are few, are on their way while products are made.
        let ahead = comptime!(blueprint.permuted());
        let range = StageRange::new(width, blueprint);
        let mut codes = Array::<u32>::new(comptime!(blueprint.parts() * blueprint.part_codes()));
        let mut scales = Scales {
            low: 0u32.runtime(),
            high: 0u32.runtime(),
        };
        if comptime!(ahead) {
            self.read(
                ring,
                stages,
                range.first,
                &mut codes,
                &mut scales,
                blueprint,
            );
        }
        let mut last = ring.free();
        for step in range.first..range.end {
            if comptime!(!ahead) {
                self.read(ring, stages, step, &mut codes, &mut scales, blueprint);
            }
            let rare = scales.are_rare(blueprint);
            let short = if comptime!(blueprint.format() != WeightFormat::Fp8) {
                true.runtime()
            } else {
                is_short(scales.low) && is_short(scales.high)
            };
            #[unroll]
            for part in 0..comptime!(blueprint.parts()) {
                let tile = stages.x_descriptor(ring.slot, part);
                let pairs = self.pairs(&codes, part, blueprint);
                let rare = if comptime!(part > 0 && blueprint.operands.row_scales() > 1) {
                    let before = comptime!(part as u32 * blueprint.rows());
                    let at = (stages.scale(ring.slot) + before + self.row) as usize;
                    scales.low = stages.scales[at];
                    scales.high = stages.scales[at + 8];
                    scales.are_rare(blueprint)
                } else {
                    rare
                };
                // Fragments may be written once the products that read them are finished.
                await_products(1u32);
                if comptime!(part == 1) && step > range.first {
                    arrive(last);
                }
                let adds = if comptime!(part == 0) {
                    step - range.first
                } else {
                    1u32.runtime()
                };
                if short {
                    let fragments = scales.times(&pairs, rare, blueprint);
                    start(&fragments, tile, adds, columns);
                } else {
                    for term in 0..SCALED_TERMS {
                        await_products(0u32);
                        let fragments = scales.term_of_times(&pairs, term);
                        start(&fragments, tile, adds + term, columns);
                    }
                }
            }
            last = ring.free();
            ring.next();
            if comptime!(ahead) && step + 1 < range.end {
                self.read(ring, stages, step + 1, &mut codes, &mut scales, blueprint);
            }
        }
        await_products(0u32);
        arrive(last);
    }

    /// Reads the lane's codes and scales of a stage once it is full: for each part, codes of the
    /// lower row and of the upper one by turns. A word has 8 neighbouring columns (FP4), or two of
    /// every 8 (FP8).
    fn read(
        &self,
        ring: &mut Ring,
        stages: &Stages,
        step: u32,
        codes: &mut Array<u32>,
        scales: &mut Scales,
        #[comptime] blueprint: WgmmaBlueprint,
    ) {
        ring.wait_full();
        let low_row = if comptime!(blueprint.weight_boxes() == 2) {
            self.row / 16 * 8 + self.row % 8
        } else {
            self.row
        };
        let row = low_row * comptime!(blueprint.operands.row_chunks());
        let distance = comptime!(blueprint.row_distance() * blueprint.operands.row_chunks());
        if comptime!(blueprint.format().is_fp4()) {
            let first = stages.weights_vector(ring.slot) + row;
            let at = (first + chunk_place(low_row, UNIT_POS % 4)) as usize;
            let (low, high) = (stages.weights[at], stages.weights[at + distance as usize]);
            #[unroll]
            for part in 0..4usize {
                codes[comptime!(2 * part)] = low.extract(part);
                codes[comptime!(2 * part + 1)] = high.extract(part);
            }
        } else {
            let first = stages.weights_address(ring.slot) + row * 16 + UNIT_POS % 4 * 2;
            #[unroll]
            for group in 0..8u32 {
                let chunk = chunk_place(low_row, comptime!(group / 2));
                let at = first + chunk * 16;
                #[unroll]
                for row in 0..2u32 {
                    let pair = read_half_word(at, comptime!(group % 2 * 8 + row * distance * 16));
                    // Two codes, each in the upper half of 16 bits.
                    codes[comptime!((2 * group + row) as usize)] = bytes_of(pair, 0u32, 0x1404u32);
                }
            }
        }
        let next = self.scales(stages, stages.scale(ring.slot), step, blueprint);
        scales.low = next.low;
        scales.high = next.high;
    }

    /// Two fragments of a part without their scales, times `2^-126` (FP4) or `2^-120` (FP8).
    fn pairs(
        &mut self,
        codes: &Array<u32>,
        #[comptime] part: usize,
        #[comptime] blueprint: WgmmaBlueprint,
    ) -> Array<u32> {
        let mut pairs = Array::<u32>::new(8usize);
        let first = comptime!(part * blueprint.part_codes());
        #[unroll]
        for i in 0..8usize {
            if comptime!(blueprint.format().is_fp4()) {
                let word = codes[comptime!(first + i % 2)];
                pairs[i] = fp4_bf16x2(word, comptime!(i / 2), comptime!(blueprint.format()));
            } else {
                let pair = fp8_bf16x2(codes[comptime!(first + i)], 1usize);
                // The largest magnitude, which is NaN, has a carry.
                let carry = (pair & 0x07f0_07f0u32) + 0x0010_0010u32;
                if comptime!(i % 2 == 0) {
                    self.low_nan |= carry;
                } else {
                    self.high_nan |= carry;
                }
                pairs[i] = pair;
            }
        }
        pairs
    }
}

/// Pairs of both rows times the factor of each, twice in a word.
#[cube]
fn multiplied(pairs: &Array<u32>, low: u32, high: u32) -> Array<u32> {
    let mut products = Array::<u32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        let factor = if comptime!(i % 2 == 0) { low } else { high };
        products[i] = multiply_bf16x2(pairs[i], factor);
    }
    products
}

/// Starts the products of two fragments, as a group.
#[cube]
fn start(fragments: &Array<u32>, tile: u32, adds: u32, #[comptime] columns: u32) {
    fence_registers();
    let layout = comptime!(TileLayout::Rows);
    multiply(fragments, 0usize, tile, adds, columns, layout, "bf16");
    multiply(
        fragments,
        1usize,
        tile + 2,
        1u32.runtime(),
        columns,
        layout,
        "bf16",
    );
    commit_products();
}

/// Whether weights times this scale are `bf16` values: it has no more than four digits, and is
/// neither very large nor very small.
#[cube]
fn is_short(scale: u32) -> bool {
    let exponent = (scale >> 23) & 255;
    scale & 0x000f_ffffu32 == 0 && exponent > 26 && exponent < 134
}
