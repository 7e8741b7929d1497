use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use super::PackedWeights;
use crate::caps::Caps;
use crate::gemm::Matrices;
use crate::gemm::kernel::WeightFormat;
use crate::gemm::launch::{
    Grouping, LargeM, LargeMTiles, Pairing, Portable, Role, SMALL_M_ROWS, StreamBlueprint,
    StreamProblem, can_multiply, has_tiles, launch_stream,
};
use crate::launching::{aligned, narrow, output, rows_view};

/// Rows of `x` in a launch, at most: its cubes for rows are all in one dimension.
const MAX_ROWS: usize = 1 << 17;
/// Rows that are streamed in parts, at most, and rows of weights for each of which and each part
/// there must be a multiprocessor. See [`parts`].
const MAX_STREAMED_ROWS: usize = 64;
const STREAMED_HEIGHT: usize = 128;

impl From<PackedWeights<CubeBackend>> for Matrices {
    fn from(weights: PackedWeights<CubeBackend>) -> Self {
        let [count, rows, columns] = weights.dims();
        let (words, scales, format, parts) = match weights {
            PackedWeights::Dense { values } => (values, None, WeightFormat::Dense, 1),
            PackedWeights::Fp8 {
                words,
                scales,
                parts,
                ..
            } => (words, Some(scales), WeightFormat::Fp8, parts),
            PackedWeights::Fp4 { words, scales, .. } => (words, Some(scales), WeightFormat::Fp4, 1),
        };
        Self {
            words,
            scales,
            format,
            count,
            rows,
            columns,
            parts,
        }
    }
}

/// Whether there is a kernel for a product, and the matrix product of floats is not faster.
pub(super) fn can_multiply_rows(x: &CubeTensor, matrix: &Matrices) -> bool {
    let faster = matrix.format != WeightFormat::Dense || has_tiles(x, [matrix]);
    faster && can_multiply(x, [matrix])
}

/// `x · Wᵀ` for the one matrix of a stack, in the dtype of `x`.
pub(super) fn multiply_rows(x: CubeTensor, matrix: Matrices) -> CubeTensor {
    let matrix = &matrix.contiguous();
    let [rows, _] = x.shape().dims();
    if rows <= MAX_ROWS {
        return multiply_rows_of(x, matrix);
    }
    let firsts = (0..rows).step_by(MAX_ROWS);
    let products = firsts.map(|first| {
        let count = MAX_ROWS.min(rows - first);
        multiply_rows_of(narrow(&x, first, count), matrix)
    });
    CubeBackend::float_cat(products.collect(), 0)
}

fn multiply_rows_of(x: CubeTensor, matrix: &Matrices) -> CubeTensor {
    let x = aligned(x);
    let [rows, _] = x.shape().dims();
    let result = output(&x, [rows, matrix.rows], x.dtype);
    if !has_tiles(&x, [matrix]) {
        Portable {
            x: &x,
            grouping: &Grouping::One,
            scores: None,
            addend: None,
            matrices: matrix,
            role: Role::Rows,
            pairs: rows,
            pairs_per_row: 1,
            slots: 1,
            limit: 0.0,
        }
        .launch(&result);
    } else if let Some(parts) = parts(&x, matrix, rows, 1) {
        for (first, count) in parts {
            let x = aligned(narrow(&x, first, count));
            let result = rows_view(&result, first, count);
            let problem = problem_of_rows(&x, matrix, &result);
            launch_stream(&x, &problem.expect("checked by parts"), None);
        }
    } else {
        multiply_many(&x, matrix, rows, &result);
    }
    result
}

/// `rows` rows of `x` by each matrix of a stack: row `r` and matrix `m` have row `r * count + m` of
/// `x` and of the result.
fn multiply_many(x: &CubeTensor, matrices: &Matrices, rows: usize, result: &CubeTensor) {
    LargeM {
        x,
        sorted: None,
        scores: None,
        matrices,
        gated: None,
        permuted: false,
        pairs: rows,
        groups: matrices.count,
        pairs_per_row: 1,
        tiles: LargeMTiles::of_rows(x, rows, matrices),
        dtype: x.dtype,
        limit: 0.0,
    }
    .launch(result);
}

/// The parts of a small number of rows that are streamed, as first row and number of rows. `None`
/// for many rows, or where shared memory is too small.
///
/// Up to [`SMALL_M_ROWS`] are one part. A large-M product of few more rows has so few cubes for few
/// outputs that it takes longer than to read the weights once for each part, unless warpgroups
/// multiply.
fn parts(
    x: &CubeTensor,
    matrices: &Matrices,
    rows: usize,
    slots: usize,
) -> Option<impl Iterator<Item = (usize, usize)> + use<>> {
    let count = rows.div_ceil(SMALL_M_ROWS);
    let cubes = count * matrices.rows.div_ceil(STREAMED_HEIGHT) * slots;
    let few = matrices.format != WeightFormat::Dense
        && rows <= MAX_STREAMED_ROWS
        && matches!(
            LargeMTiles::of_rows(x, rows, matrices),
            LargeMTiles::Planes(_)
        )
        && cubes <= Caps::of(&x.client).processors as usize;
    let fits = || blueprint(x, matrices, SMALL_M_ROWS, slots).is_some();
    let part = move |first| (first, SMALL_M_ROWS.min(rows - first));
    ((count <= 1 || few) && fits()).then(|| (0..rows).step_by(SMALL_M_ROWS).map(part))
}

/// A small number of rows by one matrix; `None` for many, or where shared memory is too small.
fn problem_of_rows<'a>(
    x: &CubeTensor,
    matrix: &'a Matrices,
    output: &'a CubeTensor,
) -> Option<StreamProblem<'a>> {
    let [rows, _] = x.shape().dims();
    Some(StreamProblem {
        ids: None,
        scores: None,
        matrices: matrix,
        output,
        pairs: rows,
        pairs_per_row: 1,
        limit: 0.0,
        blueprint: blueprint(x, matrix, rows, 1)?.paired(Pairing::One),
    })
}

fn blueprint(
    x: &CubeTensor,
    matrices: &Matrices,
    rows: usize,
    slots: usize,
) -> Option<StreamBlueprint> {
    let small = rows <= SMALL_M_ROWS;
    let blueprint = || StreamBlueprint::new(x.dtype, matrices, rows, slots, &Caps::of(&x.client));
    small.then(blueprint).flatten()
}

/// Whether the products of a small number of rows with two matrices can be one launch.
pub(super) fn can_multiply_pair(x: &CubeTensor, [first, second]: &[Matrices; 2]) -> bool {
    let [rows, _] = x.shape().dims();
    first.format != WeightFormat::Dense
        && first.format == second.format
        && can_multiply(x, [first, second])
        && has_tiles(x, [first, second])
        && blueprint(x, first, rows, 1).is_some()
}

/// `x · Wᵀ` for two matrices with the same number of columns.
///
/// The split of K depends on the format, the columns and `x`, which both products share, so each
/// has the bits of [`multiply_rows`].
pub(super) fn multiply_pair(x: CubeTensor, matrices: [Matrices; 2]) -> (CubeTensor, CubeTensor) {
    let matrices = matrices.map(Matrices::contiguous);
    let x = aligned(x);
    let [rows, _] = x.shape().dims();
    let results = matrices
        .each_ref()
        .map(|matrix| output(&x, [rows, matrix.rows], x.dtype));
    let [first, second] = [0, 1].map(|which| {
        let problem = problem_of_rows(&x, &matrices[which], &results[which]);
        problem.expect("checked by can_multiply_pair")
    });
    launch_stream(&x, &first, Some(&second));
    let [product, other] = results;
    (product, other)
}

/// Whether there is a kernel for linear maps by groups.
pub(super) fn can_multiply_groups(x: &CubeTensor, matrices: &Matrices) -> bool {
    let [tokens, groups, _] = x.shape().dims();
    matrices.format != WeightFormat::Dense
        && tokens * groups <= MAX_ROWS
        && can_multiply(x, [matrices])
        && has_tiles(x, [matrices])
}

/// Multiplies the channels of each group by its own matrix: `[tokens, groups, out]`.
pub(super) fn multiply_groups(x: CubeTensor, matrices: Matrices) -> CubeTensor {
    let matrices = &matrices.contiguous();
    let [tokens, groups, columns] = x.shape().dims();
    let rows = aligned(CubeBackend::float_reshape(
        x,
        [tokens * groups, columns].into(),
    ));
    let result = output(&rows, [tokens, groups * matrices.rows], rows.dtype);
    let Some(parts) = parts(&rows, matrices, tokens, groups) else {
        multiply_many(&rows, matrices, tokens, &result);
        return CubeBackend::float_reshape(result, [tokens, groups, matrices.rows].into());
    };
    for (first, count) in parts {
        let rows = aligned(narrow(&rows, first * groups, count * groups));
        let blueprint = blueprint(&rows, matrices, count, groups);
        let problem = StreamProblem {
            ids: None,
            scores: None,
            matrices,
            output: &rows_view(&result, first, count),
            pairs: count * groups,
            pairs_per_row: 1,
            limit: 0.0,
            blueprint: blueprint.expect("checked by parts").paired(Pairing::Every),
        };
        launch_stream(&rows, &problem, None);
    }
    CubeBackend::float_reshape(result, [tokens, groups, matrices.rows].into())
}
