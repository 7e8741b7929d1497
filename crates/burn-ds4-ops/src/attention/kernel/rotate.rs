//! Rotary position embedding.

use cubecl::prelude::*;

use super::Blocks;

/// Every unit has a vector of a row, of which it turns the pairs if they are among the last channels, and copies them otherwise.
///
/// - `x`: rows of heads of positions of sequences, `strides` vectors apart
/// - `cos`, `sin`: of each position, for each of the last channels
/// - `output`: `[batch, positions, heads, vectors]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn rotate_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    cos: &[f32],
    sin: &[f32],
    output: &mut [Vector<F, N>],
    outputs: usize,
    positions: usize,
    heads: usize,
    vectors: usize,
    kept: usize,
    strides: Blocks,
    #[define(F)] _dtype: ElemType,
) {
    let size = N::value();
    let own = CUBE_POS * CUBE_DIM as usize + UNIT_POS as usize;
    if own < outputs {
        let vector = own % vectors;
        let head = own / vectors % heads;
        let token = own / vectors / heads;
        let from = token / positions * strides.sequence
            + token % positions * strides.block
            + head * strides.slot
            + vector;
        let value = x[from];
        let mut turned = Vector::<f32, N>::cast_from(value);
        if vector >= kept {
            let first = (token * (vectors - kept) + (vector - kept)) * size;
            let wide = Vector::<f32, N>::cast_from(value);
            #[unroll]
            for i in 0..size {
                let other = wide.extract(comptime!(i ^ 1));
                let product = other * sin[first + i];
                turned.insert(i, fma(wide.extract(i), cos[first + i], product));
            }
        }
        output[own] = Vector::cast_from(turned);
    }
}

/// The table of all positions' angles: cosines of all pairs, then their sines, in rows that are `row` elements apart.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Table {
    /// Positions that it has.
    pub known: u32,
    pub row: usize,
    pub pairs: usize,
}

#[cube]
impl Table {
    /// Where the angles of position number `i` of a sequence begin: those of the nearest position that there is.
    pub fn at<I: Int>(&self, start: I, i: u32) -> usize {
        let last = self.known - 1;
        let inside = start < I::cast_from(self.known);
        let first = select(inside, u32::cast_from(start), last);
        let first = select(start < I::from_int(0), 0u32, first);
        min(first + i, last) as usize * self.row
    }
}

/// A vector whose pairs are turned by the angles from `first` on, or back by them.
#[cube]
pub(super) fn turn<N: Size>(
    value: Vector<f32, N>,
    angles: &[f32],
    first: usize,
    pairs: usize,
    #[comptime] inverse: bool,
) -> Vector<f32, N> {
    let mut turned = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        let pair = first + comptime!(i / 2);
        let (cos, sin) = (angles[pair], angles[pair + pairs]);
        // Of an even channel for one direction, of an odd one for the other.
        let sin = if comptime!((i % 2 == 0) == inverse) {
            sin
        } else {
            -sin
        };
        let product = value.extract(comptime!(i ^ 1)) * sin;
        turned.insert(i, fma(value.extract(i), cos, product));
    }
    turned
}

/// [`rotate_kernel`] by the angles of positions that follow on each other from the `start` of their sequence.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn rotate_at_kernel<F: Float, I: Int, N: Size>(
    x: &[Vector<F, N>],
    angles: &[f32],
    start: &[I],
    output: &mut [Vector<F, N>],
    outputs: usize,
    positions: usize,
    heads: usize,
    vectors: usize,
    kept: usize,
    strides: Blocks,
    table: Table,
    #[comptime] inverse: bool,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let size = N::value();
    let own = CUBE_POS * CUBE_DIM as usize + UNIT_POS as usize;
    if own < outputs {
        let vector = own % vectors;
        let head = own / vectors % heads;
        let token = own / vectors / heads;
        let sequence = token / positions;
        let position = token % positions;
        let from =
            sequence * strides.sequence + position * strides.block + head * strides.slot + vector;
        let value = x[from];
        let mut turned = Vector::<f32, N>::cast_from(value);
        if vector >= kept {
            let first = table.at::<I>(start[sequence], position as u32);
            let first = first + (vector - kept) * size / 2;
            turned = turn::<N>(
                Vector::cast_from(value),
                angles,
                first,
                table.pairs,
                inverse,
            );
        }
        output[own] = Vector::cast_from(turned);
    }
}
