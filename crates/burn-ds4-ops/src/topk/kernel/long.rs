use cubecl::prelude::*;

use super::bitmap::ColumnBitmap;
use super::candidates::{Candidates, LongRowBlueprint};
use super::radix_select::RadixSelect;
use super::row::{LogitRows, TopkIds, TopkRow, write_all_columns};
use super::sample::{sampled_vector, threshold};
use super::window::WindowArgs;
use crate::select::key::NONE;

/// Selects the columns of the `k` largest entries of each row's window, with one cube for each row.
///
/// - `elements`: the logits, element by element
/// - `rank`: the rank in a sample of the row from which on elements are candidates
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn long_row_kernel<F: Float, I: Int, N: Size>(
    rows: u32,
    logits: &LogitRows<Vector<F, N>>,
    elements: &[F],
    windows: &WindowArgs<I>,
    output: &mut TopkIds,
    rank: u32,
    #[comptime] blueprint: LongRowBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(blueprint.units);
    let index = CUBE_POS as u32;
    if index < rows {
        let k = output.k;
        let vectors = logits.columns.div_ceil(N::value() as u32);
        let first = index as usize * logits.stride;
        let out = index as usize * k as usize;
        // The sample is read without waiting for the window. Elements outside of it are dropped
        // later.
        let mut sample = Array::<Vector<F, N>>::new(comptime!(blueprint.sample as usize));
        #[unroll]
        for i in 0..blueprint.sample {
            let vector = sampled_vector(vectors, i, blueprint.sample, units);
            sample[i as usize] = logits.elements[first + vector as usize];
        }
        let window = windows.window(index, logits.columns);
        let row = TopkRow::<F, N>::new(logits, elements, first, vectors, window);
        let mut search = RadixSelect::new(units);
        let mut candidates = Candidates::new(blueprint);
        let mut bitmap = ColumnBitmap::new(blueprint.words, units);
        sync_cube();

        let length = row.window.length();
        if length <= k {
            write_all_columns(output, out, length, units);
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
                candidates.choose(&mut search, &mut bitmap, count, length, output, out);
            } else {
                row.choose_by_passes(&mut search, output, out, units);
            }
        }
    }
}
