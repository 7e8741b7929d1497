//! What becomes of the sums of a tile.

use cubecl::prelude::*;

use super::blueprint::WgmmaBlueprint;
use super::tile::{Tile, padded};
use crate::comptime_option::ComptimeOption;
use crate::gemm::kernel::epilogue::swiglu;
use crate::gemm::kernel::large_m::problem::LargeMPairs;
use crate::intrinsics::pack_bf16;
use crate::warpgroup::{exchange_words, sum, transpose_tile};

/// Where the sums of a lane are: in row `row` of the tile and 8 rows below, for rows of `x` `2 * q`
/// and `2 * q + 1` of every eight.
#[derive(CubeType)]
pub(super) struct LaneSums<'a> {
    pairs: &'a LargeMPairs,
    tile: &'a Tile,
    row: u32,
    low_nan: bool,
    high_nan: bool,
    #[cube(comptime)]
    blueprint: WgmmaBlueprint,
}

#[cube]
impl<'a> LaneSums<'a> {
    /// `nan` says whether the sums of each row are NaN.
    pub fn new(
        pairs: &'a LargeMPairs,
        tile: &'a Tile,
        row: u32,
        nan: (bool, bool),
        #[comptime] blueprint: WgmmaBlueprint,
    ) -> LaneSums<'a> {
        LaneSums::<'a> {
            pairs,
            tile,
            row,
            low_nan: nan.0,
            high_nan: nan.1,
            blueprint,
        }
    }

    /// A sum of the lower row, or of the one below.
    fn sum(&self, #[comptime] index: u32) -> f32 {
        let nan = if comptime!(index / 2 % 2 == 0) {
            self.low_nan
        } else {
            self.high_nan
        };
        select(nan, f32::NAN, sum(index))
    }

    /// Writes `[K-splits, pairs, outputs]`, an element at a time.
    pub fn write<Y: Float, N: Size>(&self, output: &mut [Vector<Y, N>], outputs: u32) {
        let problem = &self.tile.problem;
        let own = self.tile.first + self.row;
        #[unroll]
        for i in 0..comptime!(self.blueprint.columns / 4) {
            let column = UNIT_POS % 4 * 2 + comptime!(i / 2 * 8 + i % 2);
            if column < problem.count {
                let pair = self.pairs.at(problem, problem.start + column);
                let row = (CUBE_POS_Y * self.pairs.count * self.pairs.matrix_count + pair) as usize;
                let start = row * outputs as usize + own as usize;
                let low = comptime!(i / 2 * 4 + i % 2);
                if own < outputs {
                    output[start] = Vector::cast_from(self.sum(low));
                }
                if own + 8 < outputs {
                    output[start + 8] = Vector::cast_from(self.sum(comptime!(low + 2)));
                }
            }
        }
    }

    /// Writes `[pairs, outputs]` in `bf16`, eight outputs at a time.
    pub fn write_vectors<Y: Float, N: Size>(&self, output: &mut [Vector<Y, N>], outputs: u32) {
        let problem = &self.tile.problem;
        let quarter = UNIT_POS % 4;
        let own = self.tile.first + self.row / 16 * 16 + quarter % 2 * 8;
        #[unroll]
        for part in 0..comptime!(self.blueprint.columns / 16) {
            let mut words = Array::<u32>::new(4usize);
            #[unroll]
            for i in 0..4u32 {
                let first = comptime!(part * 8 + i * 2);
                let word = pack_bf16(self.sum(first), self.sum(comptime!(first + 1)));
                words[i as usize] = transpose_tile(word);
            }
            let vector = exchange_words(&mut words, comptime!(self.blueprint.target));
            let column = comptime!(part * 16) + quarter / 2 * 8 + UNIT_POS % 32 / 4;
            if column < problem.count && own < outputs {
                let pair = self.pairs.at(problem, problem.start + column);
                let at = pair as usize * (outputs / 8) as usize + (own / 8) as usize;
                output[at] = Vector::reinterpret(vector);
            }
        }
    }

    /// Writes `[positions, outputs with padding]` in `bf16`: the activation of the lower row times
    /// the one below, times the score. The padding is zeros.
    pub fn write_gated<Y: Float, N: Size>(&self, output: &mut [Vector<Y, N>], outputs: u32) {
        let blueprint = comptime!(self.blueprint);
        let problem = &self.tile.problem;
        let quarter = UNIT_POS % 4;
        let first = self.tile.first + self.row / 16 * 8;
        let exists = self.tile.output_of(self.row, blueprint) < outputs;
        let vectors = match comptime!(blueprint.gated) {
            Option::Some(format) => padded(outputs, format) / 8,
            Option::None => outputs / 8,
        };
        #[unroll]
        for part in 0..comptime!(blueprint.columns / 32) {
            let mut words = Array::<u32>::new(4usize);
            #[unroll]
            for i in 0..4u32 {
                let mut values = Array::<f32>::new(2usize);
                #[unroll]
                for e in 0..2u32 {
                    let column = comptime!(part * 32 + i * 8 + e) + quarter * 2;
                    let low = comptime!(part * 16 + i * 4 + e);
                    let mut score = 1.0f32;
                    #[comptime]
                    if let ComptimeOption::Some(scores) = &self.pairs.scores {
                        let at = problem.start + min(column, problem.count - 1);
                        score = scores[self.pairs.at(problem, at) as usize];
                    }
                    let (gate, up) = (self.sum(low), self.sum(comptime!(low + 2)));
                    let value = swiglu(gate, up, self.pairs.limit, blueprint.target) * score;
                    values[e as usize] = select(exists, value, 0.0f32);
                }
                words[i as usize] = transpose_tile(pack_bf16(values[0], values[1]));
            }
            let vector = exchange_words(&mut words, comptime!(self.blueprint.target));
            let column = comptime!(part * 32) + quarter * 8 + UNIT_POS % 32 / 4;
            if column < problem.count && first / 8 < vectors {
                let position = (problem.start + column) as usize;
                let at = position * vectors as usize + (first / 8) as usize;
                output[at] = Vector::reinterpret(vector);
            }
        }
    }
}
