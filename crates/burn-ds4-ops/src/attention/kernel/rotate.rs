//! Rotary position embedding.

use cubecl::prelude::*;

use super::SlotStrides;

/// Rotates the last channels of rows by given angles. Every unit has a vector of a row. It rotates
/// the vector's pairs if they are among the last channels, and copies them otherwise.
///
/// - `x`: rows of heads of positions of sequences, with `strides` in vectors
/// - `cos`, `sin`: for each position, the values of each of the last channels
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
    unrotated: usize,
    strides: SlotStrides,
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
        let mut rotated = Vector::<f32, N>::cast_from(value);
        if vector >= unrotated {
            let first = (token * (vectors - unrotated) + (vector - unrotated)) * size;
            let wide = Vector::<f32, N>::cast_from(value);
            #[unroll]
            for i in 0..size {
                let other = wide.extract(comptime!(i ^ 1));
                let product = other * sin[first + i];
                rotated.insert(i, fma(wide.extract(i), cos[first + i], product));
            }
        }
        output[own] = Vector::cast_from(rotated);
    }
}

/// The table of the angles of all positions: the cosines of all pairs, then their sines, in rows
/// that are `row` elements apart.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct AngleTable {
    /// Positions of the table.
    pub positions: u32,
    pub row: usize,
    pub pairs: usize,
}

#[cube]
impl AngleTable {
    /// The offset of the angles of position `start + i`, or of the nearest position in the table.
    pub fn at<I: Int>(&self, start: I, i: u32) -> usize {
        let last = self.positions - 1;
        let inside = start < I::cast_from(self.positions);
        let first = select(inside, u32::cast_from(start), last);
        let first = select(start < I::from_int(0), 0u32, first);
        min(first + i, last) as usize * self.row
    }
}

/// Rotates the pairs of a vector by the angles from `first` on, or back by them.
#[cube]
pub(super) fn rotate_vector<N: Size>(
    value: Vector<f32, N>,
    angles: &[f32],
    first: usize,
    pairs: usize,
    #[comptime] inverse: bool,
) -> Vector<f32, N> {
    let mut rotated = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        let pair = first + comptime!(i / 2);
        let (cos, sin) = (angles[pair], angles[pair + pairs]);
        // A rotation negates the sine for even channels, the inverse rotation for odd ones.
        let sin = if comptime!((i % 2 == 0) == inverse) {
            sin
        } else {
            -sin
        };
        let product = value.extract(comptime!(i ^ 1)) * sin;
        rotated.insert(i, fma(value.extract(i), cos, product));
    }
    rotated
}

/// Computes [`rotate_kernel`] by the angles of consecutive positions from the `start` of each
/// sequence.
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
    unrotated: usize,
    strides: SlotStrides,
    table: AngleTable,
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
        let mut rotated = Vector::<f32, N>::cast_from(value);
        if vector >= unrotated {
            let first = table.at::<I>(start[sequence], position as u32);
            let first = first + (vector - unrotated) * size / 2;
            rotated = rotate_vector::<N>(
                Vector::cast_from(value),
                angles,
                first,
                table.pairs,
                inverse,
            );
        }
        output[own] = Vector::cast_from(rotated);
    }
}
