//! Kernels of a Markov head. They use no Burn types.

use cubecl::prelude::*;

use crate::argmax::{LOWEST_RANK, best_of_units, is_better, rank};
use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::group_sum;

/// Columns whose rows a plane reads before it sums any, so that several reads are on their way.
pub(super) const UNROLL: u32 = 4;

/// How [`markov_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MarkovBlueprint {
    /// Lanes of a plane, and planes of a cube.
    pub plane: u32,
    pub planes: u32,
    /// Vectors of a row that each lane of a plane reads.
    pub steps: u32,
    /// Texts of a cube, for which it reads a row once.
    pub texts: u32,
    pub target: Target,
}

/// Sizes, and which place it is.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct MarkovShape {
    pub texts: u32,
    pub places: u32,
    pub columns: u32,
    pub vocabulary: u32,
    /// Vectors of a row of the matrices.
    pub vectors: u32,
    /// The place that is chosen for.
    pub place: u32,
    /// Winners of a text, one of each cube that the kernel has in this dimension.
    pub cubes: u32,
}

/// What is chosen among.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MarkovCandidates {
    /// `[texts, places, columns]`, if the columns are not the vocabulary.
    ids: ComptimeOption<Box<[i32]>>,
    shape: MarkovShape,
}

/// What a place is chosen by.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MarkovOperands<I: Int, E: Float, W: Float, N: Size> {
    /// `[texts, places, columns]`
    pub logits: Box<[f32]>,
    /// `[texts]`, before the first place
    pub tokens: Box<[I]>,
    pub embedding: Box<[Vector<E, N>]>,
    pub output: Box<[Vector<W, N>]>,
}

/// Finds the winner of each cube among its columns, for one place, and writes what came of the
/// place before. Cubes along x share the columns, those along y have texts of their own.
///
/// - `before`: the winners of the place before, if it is not the first, as `winners`
/// - `winners`: `[2, texts, cubes]`, ranks and columns
/// - `drafts`: `[texts, places]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn markov_kernel<I: Int, E: Float, W: Float, N: Size>(
    operands: &MarkovOperands<I, E, W, N>,
    candidates: &MarkovCandidates,
    before: ComptimeOption<&[u32]>,
    winners: &mut [u32],
    drafts: &mut [i32],
    #[comptime] blueprint: MarkovBlueprint,
    #[define(I, E, W)] _dtypes: [ElemType; 3],
) {
    let MarkovBlueprint {
        plane,
        planes,
        steps,
        texts,
        target,
    } = comptime!(blueprint);
    let shape = &candidates.shape;
    let size = N::value();
    let held = comptime!(steps as usize * size);
    let first_text = CUBE_POS_Y * texts;

    // The part of the embeddings that this lane multiplies by.
    let mut own = Array::<f32>::new(comptime!(texts as usize * held));
    #[unroll]
    for text in 0..texts {
        // Texts past the last repeat it.
        let number = min(first_text + text, shape.texts - 1);
        let mut token = 0u32;
        #[comptime]
        if let ComptimeOption::Some(before) = before {
            let column = winner_of(before, number, shape, comptime!(plane * planes));
            let id = candidates.draft_of(column, number, shape.place - 1);
            if CUBE_POS_X == 0 && UNIT_POS == 0 {
                drafts[(number * shape.places + shape.place - 1) as usize] = id;
            }
            token = u32::cast_from(clamp(id, 0i32, i32::cast_from(shape.vocabulary - 1)));
        }
        if comptime!(before.is_none()) {
            let last = I::cast_from(shape.vocabulary - 1);
            token = u32::cast_from(clamp(operands.tokens[number as usize], I::new(0), last));
        }
        #[unroll]
        for step in 0..steps {
            let vector = comptime!(step * plane) + UNIT_POS_X;
            let inside = vector < shape.vectors;
            let at = token * shape.vectors + select(inside, vector, 0u32);
            let values = Vector::<f32, N>::cast_from(operands.embedding[at as usize]);
            let values = select(inside, values, Vector::new(0.0f32));
            #[unroll]
            for j in 0..size {
                own[comptime!(text as usize * held + step as usize * size + j)] = values.extract(j);
            }
        }
    }

    let mut ranks = Array::<u32>::new(texts as usize);
    let mut columns = Array::<u32>::new(texts as usize);
    #[unroll]
    for text in 0..comptime!(texts as usize) {
        ranks[text] = LOWEST_RANK.runtime();
        columns[text] = u32::MAX.runtime();
    }
    let mut first = (CUBE_POS_X * planes + UNIT_POS_Y) * UNROLL;
    while first < shape.columns {
        let mut rows = Array::<Vector<W, N>>::new(comptime!((UNROLL * steps) as usize));
        #[unroll]
        for column in 0..UNROLL {
            let at = min(first + column, shape.columns - 1);
            let mut row = at;
            #[comptime]
            if let ComptimeOption::Some(ids) = &candidates.ids {
                // A cube has one text then.
                let number = min(first_text, shape.texts - 1);
                let place = number * shape.places + shape.place;
                let id = ids[place as usize * shape.columns as usize + at as usize];
                row = u32::cast_from(clamp(id, 0i32, i32::cast_from(shape.vocabulary - 1)));
            }
            #[unroll]
            for step in 0..steps {
                let vector = comptime!(step * plane) + UNIT_POS_X;
                let inside = vector < shape.vectors;
                let vector = select(inside, vector, 0u32);
                let at = row as usize * shape.vectors as usize + vector as usize;
                let zeros = Vector::new(W::new(0.0));
                rows[comptime!((column * steps + step) as usize)] =
                    select(inside, operands.output[at], zeros);
            }
        }
        #[unroll]
        for column in 0..UNROLL {
            // The last column may be compared again, which changes nothing.
            let at = min(first + column, shape.columns - 1);
            #[unroll]
            for text in 0..texts {
                let mut sum = 0.0f32;
                #[unroll]
                for step in 0..steps {
                    let row = rows[comptime!((column * steps + step) as usize)];
                    let row = Vector::<f32, N>::cast_from(row);
                    #[unroll]
                    for j in 0..size {
                        let held = comptime!(text as usize * held + step as usize * size + j);
                        sum = fma(row.extract(j), own[held], sum);
                    }
                }
                let sum = group_sum(sum, plane, target);
                let number = min(first_text + text, shape.texts - 1);
                let place = number * shape.places + shape.place;
                let logit = operands.logits[place as usize * shape.columns as usize + at as usize];
                let score = rank(logit + sum);
                let index = comptime!(text as usize);
                let wins = is_better(score, at, ranks[index], columns[index]);
                ranks[index] = select(wins, score, ranks[index]);
                columns[index] = select(wins, at, columns[index]);
            }
        }
        first += CUBE_COUNT_X * planes * UNROLL;
    }

    let places = comptime!((texts * planes) as usize);
    let mut all_ranks = Shared::<[u32]>::new_slice(places);
    let mut all_columns = Shared::<[u32]>::new_slice(places);
    if UNIT_POS_X == 0 {
        #[unroll]
        for text in 0..texts {
            let at = (text * planes + UNIT_POS_Y) as usize;
            all_ranks[at] = ranks[comptime!(text as usize)];
            all_columns[at] = columns[comptime!(text as usize)];
        }
    }
    sync_cube();
    let number = first_text + UNIT_POS;
    if UNIT_POS < texts && number < shape.texts {
        let mut best = LOWEST_RANK.runtime();
        let mut winner = u32::MAX.runtime();
        for other in 0..planes {
            let at = (UNIT_POS * planes + other) as usize;
            let wins = is_better(all_ranks[at], all_columns[at], best, winner);
            best = select(wins, all_ranks[at], best);
            winner = select(wins, all_columns[at], winner);
        }
        let at = number * shape.cubes + CUBE_POS_X;
        winners[at as usize] = best;
        winners[(shape.texts * shape.cubes + at) as usize] = winner;
    }
}

/// Writes what came of the last place, with one cube for each text.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn last_draft_kernel(
    candidates: &MarkovCandidates,
    before: &[u32],
    drafts: &mut [i32],
    #[comptime] units: u32,
) {
    let shape = &candidates.shape;
    // Cubes beyond the texts repeat the work of the last one.
    let text = min(CUBE_POS as u32, shape.texts - 1);
    let column = winner_of(before, text, shape, units);
    let id = candidates.draft_of(column, text, shape.place - 1);
    if UNIT_POS == 0 {
        drafts[(text * shape.places + shape.place - 1) as usize] = id;
    }
}

/// The column that won for a text, [`u32::MAX`] without one, in all units. Every unit of the cube
/// must call this.
#[cube]
fn winner_of(before: &[u32], text: u32, shape: &MarkovShape, #[comptime] units: u32) -> u32 {
    let mut ranks = Shared::<[u32]>::new_slice(units as usize);
    let mut columns = Shared::<[u32]>::new_slice(units as usize);
    let mut best = LOWEST_RANK.runtime();
    let mut winner = u32::MAX.runtime();
    let mut cube = UNIT_POS;
    while cube < shape.cubes {
        let at = text * shape.cubes + cube;
        let score = before[at as usize];
        let column = before[(shape.texts * shape.cubes + at) as usize];
        let wins = is_better(score, column, best, winner);
        best = select(wins, score, best);
        winner = select(wins, column, winner);
        cube += units;
    }
    ranks[UNIT_POS as usize] = best;
    columns[UNIT_POS as usize] = winner;
    best_of_units(&mut ranks, &mut columns, units);
    sync_cube();
    let winner = columns[0usize];
    // The shared memory may be used again.
    sync_cube();
    winner
}

#[cube]
impl MarkovCandidates {
    /// The candidate in a column of a text's place, -1 for a column that there is not.
    fn draft_of(&self, column: u32, text: u32, place: u32) -> i32 {
        let shape = &self.shape;
        let mut id = i32::cast_from(column);
        #[comptime]
        if let ComptimeOption::Some(ids) = &self.ids {
            let row = (text * shape.places + place) as usize * shape.columns as usize;
            let inside = select(column < shape.columns, column, 0u32);
            id = ids[row + inside as usize];
        }
        select(column < shape.columns, id, -1i32)
    }
}
