use cubecl::prelude::*;

use super::super::layout::{FARTHEST, MINIMUM, RATE, TOP_K, TOP_P, WIDTH};
use super::row::FilterArgs;

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

    /// The filter of a lane. Its rate is 0 where the temperature is.
    pub fn filter(&self, lane: u32) -> FilterArgs {
        FilterArgs {
            rate: self.float(lane, RATE),
            farthest: self.float(lane, FARTHEST),
            top_k: self.word(lane, TOP_K),
            top_p: self.word(lane, TOP_P),
            minimum_high: self.word(lane, comptime!(MINIMUM[1])),
            minimum_low: self.word(lane, comptime!(MINIMUM[0])),
        }
    }
}
