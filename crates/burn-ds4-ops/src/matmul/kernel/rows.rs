//! Products of a few rows of `x` by weights of any float dtype, on any device.

use cubecl::prelude::*;

use super::group::{Located, Picks};
use crate::intrinsics::{Target, group_sum};

/// How [`rows_kernel`] is compiled.
///
/// The planes of a cube share some rows of weights: lanes multiply by every so manieth vector of columns. That depends on the columns
/// alone, so a row's result depends neither on the other rows of `x`, nor on other weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowsBlueprint {
    /// Rows of `x` of a cube.
    pub tile: u32,
    /// Rows of weights of a cube.
    pub height: u32,
    /// Vectors of each that a lane reads at once.
    pub chunk: u32,
    pub planes: u32,
    pub plane: u32,
    pub target: Target,
}

/// Multiplies rows of `x` by all rows of some matrices.
///
/// - `x`: rows of vectors, `x_vectors` from one to the next
/// - `words`, `heights`: matrices of rows of as many `vectors` as those of `x`, and their numbers of rows
/// - `output`: the products with each matrix, `[rows, height]`, at `starts`
/// - `picks`: if there are any, `output` is the products with the rows picked, of the one matrix
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn rows_kernel<X: Float, W: Float, Y: Float, N: Size>(
    x: &[Vector<X, N>],
    words: &Sequence<Box<[Vector<W, N>]>>,
    output: &mut [Y],
    rows: u32,
    x_vectors: usize,
    vectors: u32,
    all: u32,
    heights: &Sequence<u32>,
    starts: &Sequence<usize>,
    picks: &Picks,
    #[comptime] blueprint: RowsBlueprint,
    #[define(X, W, Y)] _dtypes: [ElemType; 3],
) {
    let RowsBlueprint {
        tile,
        height,
        planes,
        plane,
        ..
    } = comptime!(blueprint);
    let count = comptime!((tile * height) as usize);
    let mut stage = Shared::<[f32]>::new_slice(comptime!(planes as usize * count));
    let own = CUBE_POS_X + CUBE_POS_Y * CUBE_COUNT_X;
    if own < all {
        let located = Located::new(own, picks.read(own, height), heights, picks, height);
        // With picks, a cube has one row of `x`.
        let first = CUBE_POS_Z * tile + located.of;
        let mut sums = Array::<f32>::new(count);
        #[unroll]
        for i in 0..count {
            sums[i] = 0.0f32;
        }
        #[unroll]
        for i in 0..words.len() {
            if comptime!(words.len() == 1) || located.which == comptime!(i as u32) {
                add_products(
                    x,
                    &words.index(i)[..],
                    first,
                    rows,
                    x_vectors,
                    vectors,
                    &located,
                    &mut sums,
                    blueprint,
                );
            }
        }
        #[unroll]
        for i in 0..count {
            let sum = group_sum(sums[i], plane, blueprint.target);
            if UNIT_POS_X == 0 {
                stage[UNIT_POS_Y as usize * count + i] = sum;
            }
        }
        sync_cube();
        let mut at = UNIT_POS;
        while at < comptime!(count as u32) {
            let mut total = stage[at as usize];
            #[unroll]
            for p in 1..planes {
                total += stage[(at + comptime!(p * count as u32)) as usize];
            }
            let of = first + at / height;
            let row = located.row + at % height;
            if located.has(of, rows, row, picks) {
                let to = located.place(of, row, starts, picks);
                output[to] = Y::cast_from(total);
            }
            at += CUBE_DIM;
        }
    }
}

/// Adds a lane's products of some rows of `x` with some of weights.
#[cube]
#[allow(clippy::too_many_arguments)]
fn add_products<X: Float, W: Float, N: Size>(
    x: &[Vector<X, N>],
    words: &[Vector<W, N>],
    first: u32,
    rows: u32,
    x_vectors: usize,
    vectors: u32,
    located: &Located,
    sums: &mut Array<f32>,
    #[comptime] blueprint: RowsBlueprint,
) {
    let RowsBlueprint {
        tile,
        height,
        chunk,
        planes,
        plane,
        ..
    } = comptime!(blueprint);
    let size = N::value();
    let step = comptime!(plane * planes);
    let mut at = UNIT_POS_Y * plane + UNIT_POS_X;
    while at < vectors {
        let mut weights = Array::<Vector<f32, N>>::new(comptime!((chunk * height) as usize));
        #[unroll]
        for c in 0..chunk {
            let vector = at + comptime!(c * step);
            let inside = vector < vectors;
            #[unroll]
            for r in 0..height {
                let row = min(located.row + r, located.rows - 1);
                let from = row as usize * vectors as usize + select(inside, vector, 0u32) as usize;
                let values = Vector::<f32, N>::cast_from(words[from]);
                weights[comptime!((c * height + r) as usize)] =
                    select(inside, values, Vector::new(0.0f32));
            }
        }
        #[unroll]
        for c in 0..chunk {
            let vector = at + comptime!(c * step);
            let inside = vector < vectors;
            #[unroll]
            for t in 0..tile {
                let row = min(first + t, rows - 1);
                let from = row as usize * x_vectors + select(inside, vector, 0u32) as usize;
                let values = Vector::<f32, N>::cast_from(x[from]);
                // Times 0 that is -0, which changes no sum.
                let values = select(inside, values, Vector::new(-0.0f32));
                #[unroll]
                for r in 0..height {
                    let to = comptime!((t * height + r) as usize);
                    let weights = weights[comptime!((c * height + r) as usize)];
                    #[unroll]
                    for j in 0..size {
                        // A product and a sum of their own could be rounded differently in another kernel.
                        sums[to] = fma(weights.extract(j), values.extract(j), sums[to]);
                    }
                }
            }
        }
        at += comptime!(chunk * step);
    }
}
