use cubecl::prelude::*;

use super::radix_select::RadixSelect;
use super::registers::{RowRegisters, first_vector_of};
use super::row::{LogitRows, TopkIds, write_all_columns};
use super::window::WindowArgs;
use crate::select::CubeUnits;

/// How [`whole_row_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WholeRowBlueprint {
    /// Vectors of each unit, a power of two. All units together hold the whole row.
    pub vectors: u32,
    /// The units of a cube.
    pub units: CubeUnits,
}

/// Selects the columns of the `k` largest entries of each row's window, where a row fits into the
/// registers of a cube.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn whole_row_kernel<F: Float, I: Int, N: Size>(
    rows: u32,
    logits: &LogitRows<Vector<F, N>>,
    windows: &WindowArgs<I>,
    output: &mut TopkIds,
    #[comptime] blueprint: WholeRowBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(blueprint.units);
    let index = CUBE_POS as u32;
    if index < rows {
        let size = N::value() as u32;
        let length = N::value();
        let own = blueprint.vectors;
        let first = first_vector_of(own, units);
        // The row is read without waiting for the window. Elements outside of it are dropped later.
        let mut values = Array::<Vector<F, N>>::new(comptime!(own as usize));
        let row_first = index as usize * logits.stride;
        let vectors = logits.columns.div_ceil(size);
        #[unroll]
        for i in 0..own {
            let vector = first + i * units.plane;
            let vector = select(vector < vectors, vector, 0u32);
            values[i as usize] = logits.elements[row_first + vector as usize];
        }
        let window = windows.window(index, logits.columns);
        let mut search = RadixSelect::new(units);
        let mut registers = RowRegisters::new(own, comptime!(length as u32), units);
        #[unroll]
        for i in 0..own {
            let mask = window.mask((first + i * units.plane) * size, comptime!(length as u32));
            registers.set::<F, N>(i, values[i as usize], mask);
        }
        // The counters must be zero before anything is counted.
        sync_cube();

        let out = index as usize * output.k as usize;
        if window.length() <= output.k {
            write_all_columns(output, out, window.length(), units);
        } else {
            search.begin(output.k);
            while search.needs_pass_to_rank() {
                registers.add_to(&mut search);
                search.advance();
            }
            let taken = registers.taken(&mut search);
            let before = registers.in_order(taken, &mut search.scanner);
            #[unroll]
            for i in 0..own {
                let mut at = out + before.vectors[i as usize] as usize;
                let column = (first + i * units.plane) * size - window.start;
                #[unroll]
                for j in 0..length {
                    let bit = comptime!(1u32 << (i * length as u32 + j as u32));
                    if taken & bit != 0 {
                        output.ids[at] = (column + j as u32) as i32;
                        at += 1;
                    }
                }
            }
        }
    }
}
