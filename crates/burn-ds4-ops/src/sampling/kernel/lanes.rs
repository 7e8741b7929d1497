use cubecl::prelude::*;

use super::super::layout::{FARTHEST, LAST, RATE, SEED, TOP_K, TOP_P, WIDTH};
use super::wide::Wide;
use crate::random::philox_words;

/// [`WeightFilter`](crate::sampling::weight::WeightFilter) of a lane.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LaneFilter {
    /// 0 where the temperature is.
    pub rate: f32,
    pub farthest: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// In units of 2^-32; 0 keeps all.
    pub top_p: u32,
    /// The last exponent that min-p keeps.
    pub last: u32,
}

/// The parameters of all lanes; see [`layout`](crate::sampling::layout).
#[derive(CubeType, CubeLaunch)]
pub(crate) struct LaneTables {
    floats: Box<[f32]>,
    words: Box<[i32]>,
}

#[cube]
impl LaneTables {
    pub fn float(&self, lane: u32, #[comptime] column: usize) -> f32 {
        self.floats[lane as usize * WIDTH + column]
    }

    pub fn word(&self, lane: u32, #[comptime] column: usize) -> u32 {
        u32::cast_from(self.words[lane as usize * WIDTH + column])
    }

    /// Entry number `entry` of a list that begins at a column.
    pub fn float_at(&self, lane: u32, #[comptime] column: usize, entry: u32) -> f32 {
        self.floats[lane as usize * WIDTH + column + entry as usize]
    }

    pub fn word_at(&self, lane: u32, #[comptime] column: usize, entry: u32) -> u32 {
        u32::cast_from(self.words[lane as usize * WIDTH + column + entry as usize])
    }

    pub fn filter(&self, lane: u32) -> LaneFilter {
        LaneFilter {
            rate: self.float(lane, RATE),
            farthest: self.float(lane, FARTHEST),
            top_k: self.word(lane, TOP_K),
            top_p: self.word(lane, TOP_P),
            last: self.word(lane, LAST),
        }
    }
}

/// What the rows of lanes are drawn by.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Lanes<I: Int> {
    pub tables: LaneTables,
    /// Of the first row of each lane.
    positions: Box<[I]>,
}

#[cube]
impl<I: Int> Lanes<I> {
    /// The random number of a row, in units of 2^-64, where lanes have `lane_rows` rows each.
    pub(super) fn random_number(&self, row: u32, lane_rows: u32) -> Wide {
        let lane = row / lane_rows;
        let position = u32::cast_from(self.positions[lane as usize]) + row % lane_rows;
        let seed = (
            self.tables.word(lane, comptime!(SEED[0])),
            self.tables.word(lane, comptime!(SEED[1])),
        );
        let words = philox_words(position, seed);
        Wide::new(words.1, words.0)
    }
}
