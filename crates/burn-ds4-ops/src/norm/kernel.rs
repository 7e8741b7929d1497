use cubecl::prelude::*;

use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::rows::{RowPartition, add_squares, multiply_piece, row_sum, vector_of};

/// How [`rms_norm_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RmsNormBlueprint {
    /// How a row is partitioned among lanes and planes.
    pub partition: RowPartition,
    /// Whether a lane keeps its part of the row in registers instead of reading it again.
    pub in_registers: bool,
    /// Rows of each cube.
    pub rows: u32,
    /// Instructions that the kernel may use.
    pub target: Target,
}

/// The sizes of a norm, and what is added to mean squares.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct NormSizes {
    pub rows: u32,
    pub columns: u32,
    /// Vectors from one row to the next.
    pub row_vectors: usize,
    pub epsilon: f32,
}

/// Computes `x / sqrt(mean(x²) + epsilon)` of every row, times the weight if there is one.
///
/// - `x`: rows of `columns` elements, `row_vectors` vectors apart
/// - `weight`: one for each column
/// - `output`: `[rows, columns]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn rms_norm_kernel<F: Float, W: Float, N: Size, M: Size>(
    x: &[Vector<F, N>],
    weight: ComptimeOption<&[Vector<W, M>]>,
    output: &mut [Vector<F, N>],
    sizes: NormSizes,
    #[comptime] blueprint: RmsNormBlueprint,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    normalize_rows::<F, W, N, M>(x, weight, output, CUBE_POS as u32, &sizes, blueprint);
}

/// Does the work of cube number `cube` of [`rms_norm_kernel`]. Every unit of the cube must call
/// this.
#[cube]
pub(crate) fn normalize_rows<F: Float, W: Float, N: Size, M: Size>(
    x: &[Vector<F, N>],
    weight: ComptimeOption<&[Vector<W, M>]>,
    output: &mut [Vector<F, N>],
    cube: u32,
    sizes: &NormSizes,
    #[comptime] blueprint: RmsNormBlueprint,
) {
    let partition = comptime!(blueprint.partition);
    let size = N::value();
    let weight_vectors = comptime!(size).runtime() as u32 / M::value() as u32;
    let pieces = M::value();
    let pieces = comptime!(size / pieces);
    let parts = comptime!(partition.block as usize / size);
    let vectors = sizes.columns / size as u32;
    let row = cube * blueprint.rows + UNIT_POS_Y / partition.planes;
    // Idle planes repeat the last row, so that all planes take part in the sum.
    let writes = row < sizes.rows;
    let row = min(row, sizes.rows - 1);
    let from = row as usize * sizes.row_vectors;
    let to = row as usize * vectors as usize;

    if comptime!(blueprint.in_registers) {
        let held = comptime!(partition.steps as usize * parts);
        let mut values = Array::<Vector<F, N>>::new(held);
        let mut weights = Array::<Vector<W, M>>::new(comptime!(held * pieces));
        #[unroll]
        for i in 0..held {
            let step = comptime!((i / parts) as u32).runtime();
            let vector = vector_of(step, comptime!(i % parts), size, partition);
            values[i] = read(x, from, vector, vectors);
            // Loaded before waiting for the sum, on which the weight does not depend.
            #[comptime]
            if let ComptimeOption::Some(weight) = weight {
                let at = select(vector < vectors, vector, 0u32) * weight_vectors;
                #[unroll]
                for piece in 0..pieces {
                    weights[comptime!(i * pieces + piece)] = weight[at as usize + piece];
                }
            }
        }
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..held {
            sum = add_squares(values[i], sum);
        }
        let factor = factor(sum, sizes, blueprint);
        #[unroll]
        for i in 0..held {
            let step = comptime!((i / parts) as u32).runtime();
            let vector = vector_of(step, comptime!(i % parts), size, partition);
            let mut scaled = Vector::<f32, N>::cast_from(values[i]) * Vector::new(factor);
            if comptime!(weight.is_some()) {
                #[unroll]
                for piece in 0..pieces {
                    multiply_piece(&mut scaled, weights[comptime!(i * pieces + piece)], piece);
                }
            }
            if writes && vector < vectors {
                output[to + vector as usize] = Vector::cast_from(scaled);
            }
        }
    } else {
        let mut sum = 0.0f32;
        for step in 0..partition.steps {
            #[unroll]
            for part in 0..parts {
                let vector = vector_of(step, part, size, partition);
                sum = add_squares(read(x, from, vector, vectors), sum);
            }
        }
        let factor = factor(sum, sizes, blueprint);
        for step in 0..partition.steps {
            #[unroll]
            for part in 0..parts {
                let vector = vector_of(step, part, size, partition);
                if writes && vector < vectors {
                    let value = x[from + vector as usize];
                    let mut scaled = Vector::<f32, N>::cast_from(value) * Vector::new(factor);
                    #[comptime]
                    if let ComptimeOption::Some(weight) = weight {
                        #[unroll]
                        for piece in 0..pieces {
                            let own = weight[(vector * weight_vectors) as usize + piece];
                            multiply_piece(&mut scaled, own, piece);
                        }
                    }
                    output[to + vector as usize] = Vector::cast_from(scaled);
                }
            }
        }
    }
}

/// Reads a vector of the row that begins at `from`, or zeros past its end.
#[cube]
fn read<F: Float, N: Size>(
    x: &[Vector<F, N>],
    from: usize,
    vector: u32,
    vectors: u32,
) -> Vector<F, N> {
    let inside = vector < vectors;
    let value = x[from + select(inside, vector, 0u32) as usize];
    select(inside, value, Vector::new(F::new(0.0)))
}

/// The factor for the elements of a row, given the sum of this lane's squares.
#[cube]
fn factor(sum: f32, sizes: &NormSizes, #[comptime] blueprint: RmsNormBlueprint) -> f32 {
    let partition = comptime!(blueprint.partition);
    let first = UNIT_POS_Y / partition.planes * partition.planes;
    let planes = comptime!(partition.planes * blueprint.rows);
    let sum = row_sum(sum, first, planes, partition, blueprint.target);
    1.0f32 / (sum / f32::cast_from(sizes.columns) + sizes.epsilon).sqrt()
}
