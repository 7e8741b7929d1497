//! Products of a small number of rows of `x` by weights of any float dtype, on any device.

use cubecl::prelude::*;

use super::tile_rows::{MatrixList, TileRows};
use crate::caps::Target;
use crate::intrinsics::{group_sum, modulo};

/// How [`rows_kernel`] is compiled.
///
/// The planes of a cube split K of some rows of weights: each lane multiplies a strided set of
/// vectors of columns. The split depends on the number of columns alone, so a row's result depends
/// neither on the other rows of `x` nor on other weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowsBlueprint {
    /// Rows of `x` of a cube.
    pub x_rows: u32,
    /// Rows of weights of a cube.
    pub height: u32,
    /// Vectors of each row that a lane reads at once.
    pub reads: u32,
    pub planes: u32,
    pub plane: u32,
    pub target: Target,
}

/// Multiplies rows of `x` by all rows of some matrices.
///
/// - `x`: rows of `vectors`, `x_vectors` from one to the next
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn rows_kernel<X: Float, W: Float, Y: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    rows: u32,
    vectors: u32,
    group: &MatrixList<Vector<W, N>>,
    output: &mut [Y],
    #[comptime] blueprint: RowsBlueprint,
    #[define(X, W, Y)] _dtypes: [ElemType; 3],
) {
    let (x_rows, height) = comptime!((blueprint.x_rows, blueprint.height));
    let planes = comptime!(blueprint.planes);
    let count = comptime!((x_rows * height) as usize);
    let mut partials = Shared::<[f32]>::new_slice(comptime!(planes as usize * count));
    let own = CUBE_POS_X + CUBE_POS_Y * CUBE_COUNT_X;
    if own < group.tiles {
        let tile_rows = TileRows::new(own, group.picks.read(own, height), group, height);
        // With picks, a cube has one row of `x`.
        let first = CUBE_POS_Z * x_rows + tile_rows.x_row;
        let mut sums = Array::<f32>::new(count);
        #[unroll]
        for i in 0..count {
            sums[i] = 0.0f32;
        }
        #[unroll]
        for i in 0..group.words.len() {
            if comptime!(group.words.len() == 1) || tile_rows.matrix == comptime!(i as u32) {
                let x_rows = XRows::<X, N>::new(x, x_vectors, first, rows, vectors);
                let words = &group.words.index(i)[..];
                x_rows.add_products::<W>(words, &tile_rows, &mut sums, blueprint);
            }
        }
        #[unroll]
        for i in 0..count {
            let sum = group_sum(sums[i], blueprint.plane, blueprint.target);
            if UNIT_POS_X == 0 {
                partials[UNIT_POS_Y as usize * count + i] = sum;
            }
        }
        sync_cube();
        let mut at = UNIT_POS;
        while at < comptime!(count as u32) {
            let mut total = partials[at as usize];
            #[unroll]
            for p in 1..planes {
                total += partials[(at + comptime!(p * count as u32)) as usize];
            }
            let x_row = first + at / height;
            let row = tile_rows.row + modulo(at, height);
            if tile_rows.contains(x_row, rows, row, group) {
                let to = tile_rows.output_index(x_row, row, group);
                output[to] = Y::cast_from(total);
            }
            at += CUBE_DIM;
        }
    }
}

/// The rows of `x` of a cube, from row `first` on.
#[derive(CubeType)]
struct XRows<'a, X: Float, N: Size> {
    x: &'a [Vector<X, N>],
    x_vectors: usize,
    first: u32,
    rows: u32,
    vectors: u32,
}

#[cube]
impl<'a, X: Float, N: Size> XRows<'a, X, N> {
    fn new(
        x: &'a [Vector<X, N>],
        x_vectors: usize,
        first: u32,
        rows: u32,
        vectors: u32,
    ) -> XRows<'a, X, N> {
        XRows::<'a, X, N> {
            x,
            x_vectors,
            first,
            rows,
            vectors,
        }
    }

    /// Adds a lane's products of these rows with some of weights.
    fn add_products<W: Float>(
        &self,
        words: &[Vector<W, N>],
        tile_rows: &TileRows,
        sums: &mut Array<f32>,
        #[comptime] blueprint: RowsBlueprint,
    ) {
        let (height, reads) = comptime!((blueprint.height, blueprint.reads));
        let stride = comptime!(blueprint.plane * blueprint.planes);
        let mut at = UNIT_POS_Y * blueprint.plane + UNIT_POS_X;
        while at < self.vectors {
            let mut weights = Array::<Vector<f32, N>>::new(comptime!((reads * height) as usize));
            #[unroll]
            for c in 0..reads {
                let vector = at + comptime!(c * stride);
                let inside = vector < self.vectors;
                #[unroll]
                for r in 0..height {
                    let row = min(tile_rows.row + r, tile_rows.rows - 1);
                    let from = row as usize * self.vectors as usize
                        + select(inside, vector, 0u32) as usize;
                    let values = Vector::<f32, N>::cast_from(words[from]);
                    weights[comptime!((c * height + r) as usize)] =
                        select(inside, values, Vector::new(0.0f32));
                }
            }
            #[unroll]
            for c in 0..reads {
                let vector = at + comptime!(c * stride);
                let inside = vector < self.vectors;
                #[unroll]
                for t in 0..blueprint.x_rows {
                    let row = min(self.first + t, self.rows - 1);
                    let from =
                        row as usize * self.x_vectors + select(inside, vector, 0u32) as usize;
                    let values = Vector::<f32, N>::cast_from(self.x[from]);
                    // Times 0 that is -0, which changes no sum.
                    let values = select(inside, values, Vector::new(-0.0f32));
                    #[unroll]
                    for r in 0..height {
                        let to = comptime!((t * height + r) as usize);
                        let weights = weights[comptime!((c * height + r) as usize)];
                        #[unroll]
                        for j in 0..N::value() {
                            // A separate multiplication and addition could be rounded
                            // differently in another kernel.
                            sums[to] = fma(weights.extract(j), values.extract(j), sums[to]);
                        }
                    }
                }
            }
            at += comptime!(reads * stride);
        }
    }
}
