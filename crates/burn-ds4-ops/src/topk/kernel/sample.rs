//! What a few elements of a row say about all of them.

use cubecl::prelude::*;

use super::radix_select::RadixSelect;
use super::registers::RowRegisters;
use super::row::TopkRow;
use crate::select::CubeUnits;

/// A key that about `rank` elements of a sample of the row are not below, so that almost certainly
/// none of its largest elements are below it either. It is below all keys where the window holds
/// too little of the sample. Every unit of the cube must call this.
#[cube]
pub(super) fn threshold<F: Float, N: Size>(
    row: &TopkRow<'_, F, N>,
    sample: &Array<Vector<F, N>>,
    search: &mut RadixSelect,
    rank: u32,
    #[comptime] sample_vectors: u32,
    #[comptime] units: CubeUnits,
) -> u32 {
    let length = N::value();
    let size = N::value() as u32;
    let mut registers = RowRegisters::new(sample_vectors, comptime!(length as u32), units);
    #[unroll]
    for i in 0..sample_vectors {
        let vector = sampled_vector(row.vectors, i, sample_vectors, units);
        let mask = row.window.mask(vector * size, comptime!(length as u32));
        registers.set::<F, N>(i, sample[i as usize], mask);
    }
    search.begin(rank);
    let mut needs_pass = true;
    while needs_pass {
        registers.add_to(search);
        search.advance();
        // Another pass is worth it only if it leaves out many elements.
        needs_pass =
            search.needs_pass() && !search.whole && search.inside - search.needed > rank / 8 + 4;
    }
    search.low
}

/// A vector of the sample. Each plane reads as many neighbouring vectors as it has lanes; the
/// planes' reads are spread evenly over the row.
#[cube]
pub(super) fn sampled_vector(
    vectors: u32,
    i: u32,
    #[comptime] sample: u32,
    #[comptime] units: CubeUnits,
) -> u32 {
    let plane = comptime!(units.plane);
    let groups = comptime!(units.cube / plane * sample);
    let group = UNIT_POS / plane + i * comptime!(units.cube / plane);
    group * (vectors / groups) + UNIT_POS % plane
}
