use cubecl::prelude::*;

use crate::comptime_option::ComptimeOption;

/// The problem of a cube: a matrix and rows of `x`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Problem {
    pub matrix: u32,
    /// First position in the order of groups, and number of positions.
    pub start: u32,
    pub count: u32,
}

/// How pairs find their rows of `x` and their matrices.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct LargeMPairs {
    /// The pairs, group by group; without it, each row has a pair with every matrix.
    pub order: ComptimeOption<Box<[u32]>>,
    /// Matrix, first position and number of positions of each problem; behind as many as the table
    /// has capacity for, the number of problems.
    pub problems: ComptimeOption<Box<[u32]>>,
    /// Factors of gated pairs.
    pub scores: ComptimeOption<Box<[f32]>>,
    /// Number of positions; without an order, those of each matrix.
    pub count: u32,
    /// Matrices that each row has a pair with, where there is no order.
    pub matrix_count: u32,
    /// Pairs that have one row of `x`. A permuted `x` has a row for each position and term.
    pub per_row: u32,
    /// The limit of gates.
    pub limit: f32,
}

#[cube]
impl LargeMPairs {
    /// The pair at a position of a problem.
    pub fn at(&self, problem: &Problem, position: u32) -> u32 {
        let mut pair = position * self.matrix_count + problem.matrix;
        #[comptime]
        if let ComptimeOption::Some(order) = &self.order {
            pair = order[position as usize];
        }
        pair
    }

    /// Number of problems, of at most `rows` rows of `x` each.
    pub fn problem_count(&self, capacity: u32, #[comptime] rows: u32) -> u32 {
        let mut count = self.count.div_ceil(rows) * self.matrix_count;
        #[comptime]
        if let ComptimeOption::Some(problems) = &self.problems {
            count = min(problems[capacity as usize * 3], capacity);
        }
        count
    }

    /// A problem; one of no rows past the end.
    pub fn problem(&self, index: u32, capacity: u32, #[comptime] rows: u32) -> Problem {
        let mut matrix = index % self.matrix_count;
        let mut start = index / self.matrix_count * rows;
        let mut count = min(self.count - min(start, self.count), rows);
        #[comptime]
        if let ComptimeOption::Some(problems) = &self.problems {
            let entry = index as usize * 3;
            count = 0u32;
            if index < problems[capacity as usize * 3] {
                matrix = problems[entry];
                start = problems[entry + 1];
                count = problems[entry + 2];
            }
        }
        Problem {
            matrix,
            start,
            count,
        }
    }
}
