//! Rows of `x` on their way to a cube.

use cubecl::prelude::*;

use super::blueprint::FewBlueprint;
use crate::intrinsics::prefetch;

/// Begins to bring `x` to the second-level cache, of which all cubes will have `rows` rows of `width` columns.
#[cube]
pub(super) fn prefetch_rows<X: Float, N: Size>(
    x: &[Vector<X, N>],
    rows: u32,
    width: u32,
    x_vectors: usize,
    #[comptime] blueprint: FewBlueprint,
) {
    let row_lines = (width + comptime!(blueprint.line_columns() - 1)) / blueprint.line_columns();
    let mut early = UNIT_POS;
    while early < rows * row_lines {
        let vector = early % row_lines * comptime!(blueprint.line_columns()) / N::value() as u32;
        let at = (early / row_lines) as usize * x_vectors + vector as usize;
        prefetch(&x[at..at + 1]);
        early += CUBE_DIM;
    }
}

/// Begins to read a unit's share of `rows` rows of so many units, which are in the order in which lanes read them, to shared memory that has
/// room for as many or more.
#[cube]
pub(super) fn read_rows(
    x: &[Vector<u32, Const<4>>],
    rows: u32,
    units: usize,
    read: &mut Array<Vector<u32, Const<4>>>,
    #[comptime] count: u32,
    #[comptime] blueprint: FewBlueprint,
) {
    #[unroll]
    for i in 0..count {
        let place = UNIT_POS + comptime!(i * blueprint.units_of_cube());
        let of = min(place / comptime!(blueprint.units()), rows - 1);
        let u = place % comptime!(blueprint.units());
        let inside = (u as usize) < units;
        read[i as usize] = x[of as usize * units + select(inside, u, 0u32) as usize];
    }
}

/// Puts what has been [read](read_rows) there.
#[cube]
pub(super) fn keep_rows(
    lines: &mut Shared<[Vector<u32, Const<4>>]>,
    read: &Array<Vector<u32, Const<4>>>,
    #[comptime] count: u32,
    #[comptime] blueprint: FewBlueprint,
) {
    #[unroll]
    for i in 0..count {
        let place = UNIT_POS + comptime!(i * blueprint.units_of_cube());
        let of = place / comptime!(blueprint.units());
        let u = place % comptime!(blueprint.units());
        if of < blueprint.lines {
            lines[(of * comptime!(blueprint.pitch()) + u) as usize] = read[i as usize];
        }
    }
}
