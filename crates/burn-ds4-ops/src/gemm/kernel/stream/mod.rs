//! The schedule for a small number of rows of `x`: weights are streamed.

mod blueprint;
mod load;
mod operands;
mod pass;
mod pipeline;
mod place;
mod row_words;
mod rows;
mod sum;
mod tiles;

use cubecl::prelude::*;

use crate::comptime_option::ComptimeOption;

use cubecl::std::{FastDivmod, FastDivmodExpand};

use super::groups::{Groups, Pairing, SortedProblems};
use pass::TileRange;
use rows::prefetch_rows;
use tiles::multiply_tiles_of;

pub(crate) use blueprint::StreamBlueprint;
pub(crate) use sum::{SumProblemLaunch, slot_sum_kernel};
pub(crate) use tiles::StreamProblemLaunch;
pub(super) use tiles::{SharedStorage, StreamProblem};

/// How the cubes of a launch, or the first of them, are divided.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct CubeSplit {
    /// Number of cubes.
    pub cubes: FastDivmod<u32>,
    /// The work of the second problem, relative to that of reading one matrix of the first. Not
    /// read where there is no second one.
    pub second_work: f32,
    /// Cubes of each group, if there are as many groups as is likely.
    pub groups: GroupSplit,
    /// The groups, where they are [sorted](Pairing::Sorted).
    pub sorted: ComptimeOption<SortedProblems>,
}

#[cube]
impl CubeSplit {
    /// The number of cubes.
    pub(in crate::gemm::kernel) fn count(&self) -> u32 {
        match &self.cubes {
            FastDivmod::Fast { divisor, .. } => *divisor,
            FastDivmod::Fallback { divisor } => *divisor,
        }
    }
}

/// Cubes for each group of the first problem, where no cube would have fewer tiles if some had
/// tiles of two groups. Between two groups, a cube waits for the first weights of the second.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct GroupSplit {
    /// For how many groups this is; more than there can be where it does not pay.
    pub groups: u32,
    /// Cubes of a group, and of all of them.
    pub cubes: FastDivmod<u32>,
    pub all_cubes: u32,
    /// Tiles of each cube, where the first `more` of a group have one more.
    pub least: u32,
    pub more: u32,
}

/// Multiplies a small number of rows of `x` by matrices: `x · Wᵀ`, or with half of the rows as a
/// gate. With a second problem, each has cubes of its own, in proportion to its work: a cube with
/// both kinds of work would have to start up twice. The second one has no ids.
///
/// Nothing is fetched from memory before a cube knows what is its part. So divisions by numbers
/// that are known at run time only are by numbers that the host has prepared.
///
/// - `x`: rows of vectors; pair `p` has row `p / slots`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn stream_kernel<X: Float, I: Int, Y: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    mut first: StreamProblem<I, Y>,
    second: ComptimeOption<StreamProblem<I, Y>>,
    split: &CubeSplit,
    #[comptime] blueprint: StreamBlueprint,
    #[comptime] second_blueprint: Option<StreamBlueprint>,
    #[define(X, I, Y)] _dtypes: [ElemType; 3],
) {
    let other_blueprint = comptime!(second_blueprint.unwrap_or(blueprint));
    let mut storage = SharedStorage::new(blueprint, other_blueprint);
    multiply_problems::<X, I, Y, N>(
        x,
        x_vectors,
        &mut first,
        second,
        split,
        &mut storage,
        blueprint,
        second_blueprint,
    );
}

/// Multiplies what is this cube's part of the work of the first cubes of a launch, as many as
/// `split` says. Every unit of the cube must call this.
#[cube]
pub(super) fn multiply_problems<X: Float, I: Int, Y: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    first: &mut StreamProblem<I, Y>,
    second: ComptimeOption<StreamProblem<I, Y>>,
    split: &CubeSplit,
    storage: &mut SharedStorage,
    #[comptime] blueprint: StreamBlueprint,
    #[comptime] second_blueprint: Option<StreamBlueprint>,
) {
    let other_blueprint = comptime!(second_blueprint.unwrap_or(blueprint));
    let matrices = first.matrices.layout.count;
    let expert = Groups::read::<I>(&first.ids, first.sizes, matrices, blueprint.groups());
    if comptime!(blueprint.pairing == Pairing::Ids) {
        // All cubes wait for `x`, so it is fetched while they group the pairs.
        let columns = first.matrices.layout.columns;
        prefetch_rows(x, first.sizes.tokens, columns, x_vectors, blueprint);
    }
    let sorted = split.sorted.as_ref();
    let groups = Groups::of(expert, sorted, first.sizes, matrices, blueprint.groups());
    let cubes = split.count();
    let by_groups = if comptime!(blueprint.pairing == Pairing::One) {
        false.runtime()
    } else {
        groups.count() == split.groups.groups
    };
    let mut first_cubes = cubes;
    if comptime!(second_blueprint.is_some()) {
        // Without ids, a matrix has all rows of `x` and may be read repeatedly, which the work of
        // the second problem is relative to.
        let by_ids = comptime!(matches!(blueprint.pairing, Pairing::Ids | Pairing::Sorted));
        let reads = if comptime!(by_ids) {
            groups.count()
        } else {
            1u32.runtime()
        };
        // Every cube computes the same number.
        let part = split.second_work / (f32::cast_from(reads) + split.second_work);
        let second_cubes = u32::cast_from(f32::cast_from(cubes) * part + 0.5f32);
        first_cubes = cubes - min(max(second_cubes, 1u32), cubes - 1);
        if by_groups {
            first_cubes = split.groups.all_cubes;
        }
    }
    // A constant where there is no second problem, whose code is then left out.
    let has_first = if comptime!(second_blueprint.is_some()) {
        CUBE_POS_X < first_cubes
    } else {
        true.runtime()
    };
    if has_first {
        let tiles = first.tiles_of(&groups, blueprint);
        let (mut index, mut least, mut more) = (CUBE_POS_X, 0u32, 0u32);
        let mut before = 0u32;
        if by_groups {
            let (group, of_group) = split.groups.cubes.div_mod(CUBE_POS_X);
            if CUBE_POS_X < split.groups.all_cubes {
                index = of_group;
                least = split.groups.least;
                more = split.groups.more;
                before = group * first.matrix_tiles(blueprint);
            }
        } else if comptime!(second_blueprint.is_none()) {
            (least, more) = split.cubes.div_mod(tiles);
        } else {
            least = tiles / first_cubes;
            more = tiles - least * first_cubes;
        }
        let range = TileRange::new(index, least, more).after(before);
        multiply_tiles_of::<X, I, Y, N>(x, x_vectors, first, &groups, range, storage, blueprint);
    } else {
        let mut second = second.unwrap();
        let unsorted = ComptimeOption::<&SortedProblems>::new_None();
        let no_ids = Groups::of(0u32, unsorted, second.sizes, 1u32, other_blueprint.groups());
        let tiles = second.tiles_of(&no_ids, other_blueprint);
        let range = TileRange::of(CUBE_POS_X - first_cubes, cubes - first_cubes, tiles);
        multiply_tiles_of::<X, I, Y, N>(
            x,
            x_vectors,
            &mut second,
            &no_ids,
            range,
            storage,
            other_blueprint,
        );
    }
}
