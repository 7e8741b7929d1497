use super::problem::StreamProblem;
use super::{Grouping, SortedPairs};
use crate::gemm::kernel::{CubeSplitLaunch, GroupSplitLaunch};

/// How the cubes of a launch are divided between its problems, and among their tiles.
pub(super) struct CubeDivision {
    pub cubes: usize,
    /// The work of the second problem, relative to that of one matrix of the first.
    second_work: f32,
    second_cubes: usize,
    /// Cubes of each group of the first problem, where a cube has no tiles of two groups.
    group_cubes: Option<usize>,
}

impl CubeDivision {
    /// For `cubes` at most, and at least one for each problem.
    pub fn new(
        first: &StreamProblem<'_>,
        second: Option<&StreamProblem<'_>>,
        cubes: usize,
    ) -> Self {
        let tiles = first.tiles() + second.map_or(0, StreamProblem::tiles);
        // At least one cube for each problem.
        let least = 1 + usize::from(second.is_some());
        let cubes = cubes.min(tiles).max(least);
        let second_work = second.map_or(0.0, |second| second.work() / first.work()) as f32;
        // As the kernel computes it, if all groups are there.
        let reads = match first.product.grouping {
            Grouping::Every => 1,
            _ => first.groups(),
        };
        let part = second_work / (reads as f32 + second_work);
        let second_cubes = second.map_or(0, |_| (cubes as f32 * part + 0.5) as usize);
        let second_cubes = second_cubes.clamp(usize::from(second.is_some()), cubes - 1);
        Self {
            cubes,
            second_work,
            second_cubes,
            group_cubes: first.group_cubes(cubes - second_cubes),
        }
    }

    /// Tiles of each plane, at most, of both problems.
    pub fn plane_tiles(
        &self,
        first: &StreamProblem<'_>,
        second: Option<&StreamProblem<'_>>,
    ) -> [usize; 2] {
        let own = match self.group_cubes {
            Some(cubes) => first.matrix_tiles().div_ceil(cubes),
            None => first.tiles().div_ceil(self.cubes - self.second_cubes),
        };
        let of_plane = |problem: &StreamProblem<'_>, tiles: usize| {
            tiles.div_ceil(problem.blueprint.concurrent_tiles as usize)
        };
        let rest = match self.group_cubes {
            Some(own) => self.cubes - own * first.groups(),
            None => self.second_cubes,
        };
        let of_second = second.map(|second| of_plane(second, second.tiles().div_ceil(rest)));
        [of_plane(first, own), of_second.unwrap_or(0)]
    }

    pub fn arg(&self, first: &StreamProblem<'_>) -> CubeSplitLaunch {
        let (tiles, own) = (first.matrix_tiles(), self.group_cubes.unwrap_or(1));
        let groups = GroupSplitLaunch::new(
            self.group_cubes.map_or(u32::MAX, |_| first.groups() as u32),
            own as u32,
            (own * first.groups()) as u32,
            (tiles / own) as u32,
            (tiles % own) as u32,
        );
        let sorted = first.product.sorted().map(SortedPairs::arg);
        CubeSplitLaunch::new(self.cubes as u32, self.second_work, groups, sorted.into())
    }
}
