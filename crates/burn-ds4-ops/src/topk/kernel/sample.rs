//! What a few elements of a row say about all.

use cubecl::prelude::*;

use super::held::Held;
use super::row::Row;
use super::search::{Search, Units};

/// A key that about `rank` elements of a sample of the row, and so its largest elements for sure or nearly so, are not below; below
/// all where the window holds too little of the sample. All of the cube must be here.
#[cube]
pub(super) fn threshold<F: Float, N: Size>(
    row: &Row<'_, F, N>,
    sample: &Array<Vector<F, N>>,
    search: &mut Search,
    rank: u32,
    #[comptime] sample_vectors: u32,
    #[comptime] units: Units,
) -> u32 {
    let length = N::value();
    let size = N::value() as u32;
    let mut held = Held::new(sample_vectors, comptime!(length as u32), units);
    #[unroll]
    for i in 0..sample_vectors {
        let vector = sampled_vector(row.vectors, i, sample_vectors, units);
        let mask = row.window.mask(vector * size, comptime!(length as u32));
        held.set::<F, N>(i, sample[i as usize], mask);
    }
    search.begin(rank);
    let mut goes_on = true;
    while goes_on {
        held.add_to(search);
        search.advance();
        // Another division is worth it only if it leaves out much.
        goes_on = search.goes_on() && !search.whole && search.inside - search.needed > rank / 8 + 4;
    }
    search.low
}

/// The vectors of a sample: as many at once as a plane has lanes, at even distances.
#[cube]
pub(super) fn sampled_vector(
    vectors: u32,
    i: u32,
    #[comptime] sample: u32,
    #[comptime] units: Units,
) -> u32 {
    let plane = comptime!(units.plane);
    let groups = comptime!(units.cube / plane * sample);
    let group = UNIT_POS / plane + i * comptime!(units.cube / plane);
    group * (vectors / groups) + UNIT_POS % plane
}
