use cubecl::prelude::*;

/// A lane's best scores in descending order, and how many were taken from the list.
#[derive(CubeType)]
pub(super) struct BestScores {
    pub scores: Array<f32>,
    /// The last score that was taken.
    pub last: f32,
    /// How many scores equal to it were taken.
    pub taken: u32,
    /// Whether the lane's part has no elements after the list.
    pub exhausted: bool,
}

/// The ranks whose ids a lane looks up.
#[derive(CubeType)]
pub(super) struct Ranks {
    pub scores: Array<f32>,
    /// Lane whose part the score is from.
    pub owners: Array<u32>,
    /// Number of earlier ranks with the same score.
    pub equals: Array<u32>,
    pub ids: Array<u32>,
}

#[cube]
impl BestScores {
    /// Inserts a score in order and drops the last one.
    pub fn insert(&mut self, score: f32, #[comptime] depth: u32) {
        let mut rest = score;
        #[unroll]
        for d in 0..depth {
            let current = self.scores[d as usize];
            self.scores[d as usize] = max(current, rest);
            rest = min(current, rest);
        }
    }

    pub fn clear(&mut self, none: f32, #[comptime] depth: u32) {
        #[unroll]
        for d in 0..depth {
            self.scores[d as usize] = none;
        }
    }

    /// Takes the first score from the list.
    pub fn pop(&mut self, none: f32, #[comptime] depth: u32) {
        let score = self.scores[0];
        self.taken = select(score == self.last, self.taken + 1, 1u32);
        self.last = score;
        #[unroll]
        for d in 1..depth {
            self.scores[comptime!(d as usize - 1)] = self.scores[d as usize];
        }
        self.scores[comptime!(depth as usize - 1)] = none;
    }
}
