use cubecl::prelude::*;

use super::candidates::{Candidates, LongRowBlueprint};
use super::key::NONE;
use super::map::Map;
use super::row::{Row, take_all};
use super::sample::{sampled_vector, threshold};
use super::search::Search;
use super::window::{Tokens, Window};

/// The columns of the `k` largest entries of each row's window, a row to a cube.
///
/// - `logits`: rows of `columns` elements, `row_vectors` vectors apart, all of whose vectors can be read; `elements`: the same
/// - `starts`, `ends`: see [`Window::of`]
/// - `ids`: `[rows, k]`
/// - `rank`: the place in a sample of the row from which on elements are candidates
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn long_row_kernel<F: Float, I: Int, N: Size>(
    logits: &[Vector<F, N>],
    elements: &[F],
    starts: ComptimeOption<&[I]>,
    ends: ComptimeOption<&[I]>,
    ids: &mut [i32],
    rows: u32,
    columns: u32,
    row_vectors: usize,
    tokens: Tokens,
    k: u32,
    rank: u32,
    #[comptime] blueprint: LongRowBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(blueprint.units);
    let index = CUBE_POS as u32;
    if index < rows {
        let vectors = columns.div_ceil(N::value() as u32);
        let first = index as usize * row_vectors;
        let out = index as usize * k as usize;
        // The window is not waited for, only afterwards is what it leaves out dropped.
        let mut sample = Array::<Vector<F, N>>::new(comptime!(blueprint.sample as usize));
        #[unroll]
        for i in 0..blueprint.sample {
            let vector = sampled_vector(vectors, i, blueprint.sample, units);
            sample[i as usize] = logits[first + vector as usize];
        }
        let window = Window::of::<I>(starts, ends, index, columns, &tokens);
        let row = Row::<F, N>::new(logits, elements, first, vectors, window);
        let mut search = Search::new(units);
        let mut candidates = Candidates::new(blueprint);
        let mut map = Map::new(blueprint.words, units);
        sync_cube();

        let length = row.window.length();
        if length <= k {
            take_all(ids, out, length, k, units);
        } else {
            let mut lowest = NONE.runtime();
            if length > blueprint.capacity && k <= blueprint.capacity {
                lowest = threshold(&row, &sample, &mut search, rank, blueprint.sample, units);
            }
            let mut count = 0u32;
            if k <= blueprint.capacity {
                candidates.collect(&row, row.first_vector(), row.end_vector(), lowest);
                sync_cube();
                count = candidates.count();
            }
            if count >= k && count <= blueprint.capacity {
                candidates.choose(&mut search, &mut map, count, length, ids, out, k);
            } else {
                row.choose_from_all(&mut search, ids, out, k, units);
            }
        }
    }
}
