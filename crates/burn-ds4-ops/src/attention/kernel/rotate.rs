//! Rotary position embedding.

use cubecl::prelude::*;

use super::pool::SlotStrides;
use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::read_ordered;

/// Sizes of the rows that are rotated: those of heads of positions of sequences.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RotationSizes {
    /// Vectors of all rows.
    pub outputs: usize,
    pub positions: usize,
    pub heads: usize,
    /// Vectors of a row, and the number of those in front that are not rotated.
    pub vectors: usize,
    pub unrotated: usize,
    /// Strides of the input, in vectors.
    pub strides: SlotStrides,
}

/// The table of the angles of all positions: the cosines of all pairs, then their sines, in rows
/// that are `row` elements apart.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct AngleTable {
    pub angles: Box<[f32]>,
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

/// The positions at which sequences start, and the angles of all positions.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Positions<I: Int> {
    pub start: Box<[I]>,
    pub table: AngleTable,
}

/// The rotation of a row: the offset of its angles, and the number of vectors in front that are not
/// rotated.
#[derive(CubeType)]
pub(super) struct RowRotation<'a> {
    table: &'a AngleTable,
    angle: usize,
    #[cube(comptime)]
    pub unrotated: u32,
}

#[cube]
impl<'a> RowRotation<'a> {
    pub fn new(table: &'a AngleTable, angle: usize, #[comptime] unrotated: u32) -> RowRotation<'a> {
        RowRotation::<'a> {
            table,
            angle,
            unrotated,
        }
    }

    /// Rotates the pairs of one of the vectors from `unrotated` on, or rotates them back.
    pub fn rotate<N: Size>(
        &self,
        value: Vector<f32, N>,
        vector: u32,
        #[comptime] inverse: bool,
    ) -> Vector<f32, N> {
        let pairs = (vector - comptime!(self.unrotated)) * N::value() as u32 / 2;
        rotate_vector::<N>(value, self.table, self.angle + pairs as usize, inverse)
    }
}

/// Rotates the pairs of a vector by the angles from `first` on, or back by them.
#[cube]
pub(super) fn rotate_vector<N: Size>(
    value: Vector<f32, N>,
    table: &AngleTable,
    first: usize,
    #[comptime] inverse: bool,
) -> Vector<f32, N> {
    let (cosines, sines) = read_angles::<N>(table, first);
    rotate_by::<N>(value, cosines, sines, inverse)
}

/// Reads the cosines and sines of the pairs from `first` on, each of them twice.
#[cube]
pub(super) fn read_angles<N: Size>(
    table: &AngleTable,
    first: usize,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let mut cosines = Vector::<f32, N>::new(0.0f32);
    let mut sines = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        let pair = first + comptime!(i / 2);
        cosines.insert(i, table.angles[pair]);
        sines.insert(i, table.angles[pair + table.pairs]);
    }
    (cosines, sines)
}

/// [`read_angles`], requested in the order of the code.
#[cube]
pub(super) fn read_angles_in_order<N: Size>(
    table: &AngleTable,
    first: usize,
    #[comptime] target: Target,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let mut cosines = Vector::<f32, N>::new(0.0f32);
    let mut sines = Vector::<f32, N>::new(0.0f32);
    let size = N::value();
    #[unroll]
    for pair in 0..comptime!(size / 2) {
        let cosine = read_ordered(&table.angles, first + pair, target);
        let sine = read_ordered(&table.angles, first + pair + table.pairs, target);
        #[unroll]
        for i in 0..2usize {
            cosines.insert(comptime!(2 * pair + i), cosine);
            sines.insert(comptime!(2 * pair + i), sine);
        }
    }
    (cosines, sines)
}

/// Rotates the pairs of a vector by angles as [`read_angles`] gives them, or back by them.
#[cube]
pub(super) fn rotate_by<N: Size>(
    value: Vector<f32, N>,
    cosines: Vector<f32, N>,
    sines: Vector<f32, N>,
    #[comptime] inverse: bool,
) -> Vector<f32, N> {
    let mut rotated = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        let sin = sines.extract(i);
        // A rotation negates the sine for even channels, the inverse rotation for odd ones.
        let sin = if comptime!((i % 2 == 0) == inverse) {
            sin
        } else {
            -sin
        };
        let product = value.extract(comptime!(i ^ 1)) * sin;
        rotated.insert(i, fma(value.extract(i), cosines.extract(i), product));
    }
    rotated
}

/// The angles of rows, in one of two ways.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RowAngles<I: Int> {
    /// For each position, the values of each of the last channels.
    pub given: ComptimeOption<GivenAngles>,
    /// Consecutive positions from the start of each sequence on.
    pub positions: ComptimeOption<Positions<I>>,
}

/// Cosines, and sines that are negated for even channels.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct GivenAngles {
    pub cos: Box<[f32]>,
    pub sin: Box<[f32]>,
}

/// Rotates the last channels of rows. Every unit has a vector of a row. It rotates the vector's
/// pairs if they are among the last channels, and copies them otherwise.
///
/// - `x`: rows of heads of positions of sequences
/// - `output`: `[batch, positions, heads, vectors]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn rotate_kernel<F: Float, I: Int, N: Size>(
    x: &[Vector<F, N>],
    angles: &RowAngles<I>,
    output: &mut [Vector<F, N>],
    sizes: RotationSizes,
    #[comptime] inverse: bool,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let size = N::value();
    let own = CUBE_POS * CUBE_DIM as usize + UNIT_POS as usize;
    if own < sizes.outputs {
        let vector = own % sizes.vectors;
        let head = own / sizes.vectors % sizes.heads;
        let token = own / sizes.vectors / sizes.heads;
        let sequence = token / sizes.positions;
        let position = token % sizes.positions;
        let from = sequence * sizes.strides.sequence
            + position * sizes.strides.block
            + head * sizes.strides.slot
            + vector;
        let value = x[from];
        let mut rotated = Vector::<f32, N>::cast_from(value);
        if vector >= sizes.unrotated {
            let wide = Vector::<f32, N>::cast_from(value);
            #[comptime]
            if let ComptimeOption::Some(given) = &angles.given {
                let rotated_vectors = sizes.vectors - sizes.unrotated;
                let first = (token * rotated_vectors + (vector - sizes.unrotated)) * size;
                #[unroll]
                for i in 0..size {
                    let product = wide.extract(comptime!(i ^ 1)) * given.sin[first + i];
                    rotated.insert(i, fma(wide.extract(i), given.cos[first + i], product));
                }
            }
            #[comptime]
            if let ComptimeOption::Some(positions) = &angles.positions {
                let table = &positions.table;
                let first = table.at::<I>(positions.start[sequence], position as u32);
                let first = first + (vector - sizes.unrotated) * size / 2;
                rotated = rotate_vector::<N>(wide, table, first, inverse);
            }
        }
        output[own] = Vector::cast_from(rotated);
    }
}
