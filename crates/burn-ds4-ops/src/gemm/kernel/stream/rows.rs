//! Copies of rows of `x` to the caches and shared memory.

use cubecl::prelude::*;

use super::blueprint::StreamBlueprint;
use crate::intrinsics::prefetch;

/// Begins to bring `rows` rows of `width` columns of `x`, which all cubes will read, to the
/// second-level cache.
#[cube]
pub(super) fn prefetch_rows<X: Float, N: Size>(
    x: &[Vector<X, N>],
    rows: u32,
    width: u32,
    x_vectors: usize,
    #[comptime] blueprint: StreamBlueprint,
) {
    let row_lines =
        (width + comptime!(blueprint.cache_line_columns() - 1)) / blueprint.cache_line_columns();
    let mut row = UNIT_POS_Y;
    while row < rows {
        let mut line = UNIT_POS_X;
        while line < row_lines {
            let vector = line * comptime!(blueprint.cache_line_columns()) / N::value() as u32;
            let at = row as usize * x_vectors + vector as usize;
            prefetch(&x[at..at + 1]);
            line += CUBE_DIM_X;
        }
        row += CUBE_DIM_Y;
    }
}

/// Begins to read this unit's part of `rows` rows of `vec8s` each, which are in the order in which
/// lanes read them. Shared memory has the capacity for as many rows or more.
#[cube]
pub(super) fn read_rows(
    x: &[Vector<u32, Const<4>>],
    rows: u32,
    vec8s: usize,
    read: &mut Array<Vector<u32, Const<4>>>,
    #[comptime] count: u32,
    #[comptime] blueprint: StreamBlueprint,
) {
    #[unroll]
    for i in 0..count {
        let index = UNIT_POS + comptime!(i * blueprint.cube_units());
        let row = index / comptime!(blueprint.row_vec8s());
        let vec8 = index % comptime!(blueprint.row_vec8s());
        let inside = (vec8 as usize) < vec8s;
        // All cubes read these rows, so none of them is read twice.
        read[i as usize] = Vector::new(0u32);
        if row < rows {
            read[i as usize] = x[row as usize * vec8s + select(inside, vec8, 0u32) as usize];
        }
    }
}

/// Stores what has been [read](read_rows) in shared memory.
#[cube]
pub(super) fn store_rows(
    x_rows: &mut Shared<[Vector<u32, Const<4>>]>,
    read: &Array<Vector<u32, Const<4>>>,
    #[comptime] count: u32,
    #[comptime] blueprint: StreamBlueprint,
) {
    #[unroll]
    for i in 0..count {
        let index = UNIT_POS + comptime!(i * blueprint.cube_units());
        let row = index / comptime!(blueprint.row_vec8s());
        let vec8 = index % comptime!(blueprint.row_vec8s());
        if row < blueprint.x_rows {
            x_rows[(row * comptime!(blueprint.row_pitch()) + vec8) as usize] = read[i as usize];
        }
    }
}

/// The index of the scale of block `block` of a row of `x` in shared memory.
#[cube]
pub(super) fn scale_index(x_row: u32, block: u32, #[comptime] blueprint: StreamBlueprint) -> usize {
    (x_row * comptime!(blueprint.row_pitch()) + comptime!(blueprint.row_vec8s()) + block) as usize
}

/// That scale.
#[cube]
pub(super) fn x_scale(
    x: &[Vector<u32, Const<4>>],
    x_row: u32,
    block: u32,
    #[comptime] blueprint: StreamBlueprint,
) -> f32 {
    f32::reinterpret(x[scale_index(x_row, block, blueprint)].extract(0usize))
}
