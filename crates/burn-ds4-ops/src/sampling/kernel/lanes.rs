use cubecl::prelude::*;

use super::super::layout::{FARTHEST, MINIMUM, RATE, TOP_K, TOP_P, WIDTH};

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
    pub minimum_high: u32,
    pub minimum_low: u32,
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
            minimum_high: self.word(lane, comptime!(MINIMUM[1])),
            minimum_low: self.word(lane, comptime!(MINIMUM[0])),
        }
    }
}
