use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use crate::launching::{aligned, narrow, output};
use crate::packed::kernel::WeightFormat;
use crate::packed::launch::{
    Grouping, LargeM, Matrices, Pairing, Plain, Role, SMALL_M_ROWS, SmallM, SmallMBlueprint,
    SmallMPair, can_multiply, has_tiles, large_m_tiles, terms,
};

/// Rows of `x` in a launch, at most: its cubes for rows are all in one dimension.
const MAX_ROWS: usize = 1 << 17;

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
    let client = x.client.clone();
    let result = output(&x, [rows, matrix.rows], x.dtype);
    let blueprint = |rows| SmallMBlueprint::new(x.dtype, false, matrix, (rows, rows), &client);
    if !has_tiles(&x, [matrix]) {
        Plain {
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
    } else if rows <= SMALL_M_ROWS && blueprint(SMALL_M_ROWS).fits(&client) {
        SmallM {
            x: &x,
            pairing: Pairing::One,
            ids: None,
            scores: None,
            matrices: matrix,
            gated: None,
            pairs: rows,
            pairs_per_row: 1,
            limit: 0.0,
            blueprint: blueprint(rows),
        }
        .launch(&result);
    } else {
        let x_tiles = large_m_tiles(rows * terms(x.dtype) as usize);
        LargeM {
            x: &x,
            sorted: None,
            scores: None,
            matrices: matrix,
            gated: None,
            permuted: false,
            pairs: rows,
            pairs_per_row: 1,
            x_tiles,
            dtype: x.dtype,
            limit: 0.0,
        }
        .launch(&result);
    }
    result
}

/// Whether the products of a small number of rows with two matrices can be one launch.
pub(super) fn can_multiply_pair(x: &CubeTensor, [first, second]: &[Matrices; 2]) -> bool {
    let [rows, _] = x.shape().dims();
    let blueprint = SmallMBlueprint::new(
        x.dtype,
        false,
        first,
        (SMALL_M_ROWS, SMALL_M_ROWS),
        &x.client,
    );
    rows <= SMALL_M_ROWS
        && first.format != WeightFormat::Dense
        && first.format == second.format
        && can_multiply(x, [first, second])
        && has_tiles(x, [first, second])
        && blueprint.fits(&x.client)
}

/// `x · Wᵀ` for two matrices with the same number of columns.
///
/// The split of K depends on the format, the columns and `x`, which both products share, so each
/// has the bits of [`multiply_rows`].
pub(super) fn multiply_pair(x: CubeTensor, matrices: [Matrices; 2]) -> (CubeTensor, CubeTensor) {
    let [first, second] = &matrices.map(Matrices::contiguous);
    let x = aligned(x);
    let [rows, _] = x.shape().dims();
    let results = [first, second].map(|matrix| output(&x, [rows, matrix.rows], x.dtype));
    SmallMPair {
        x: &x,
        matrices: [first, second],
        blueprint: SmallMBlueprint::new(x.dtype, false, first, (rows, rows), &x.client),
    }
    .launch(results.each_ref());
    let [product, other] = results;
    (product, other)
}

/// Whether the linear maps by groups of a small number of tokens can be one launch.
pub(super) fn can_multiply_groups(x: &CubeTensor, matrices: &Matrices) -> bool {
    let [tokens, _, _] = x.shape().dims();
    let fits = |rows| {
        let counts = (rows, rows * matrices.count);
        SmallMBlueprint::new(x.dtype, false, matrices, counts, &x.client).fits(&x.client)
    };
    tokens <= SMALL_M_ROWS
        && matrices.format != WeightFormat::Dense
        && can_multiply(x, [matrices])
        && has_tiles(x, [matrices])
        && fits(SMALL_M_ROWS)
}

/// Multiplies the channels of each group by its own matrix, for a small number of tokens: `[tokens,
/// groups, out]`.
pub(super) fn multiply_groups(x: CubeTensor, matrices: Matrices) -> CubeTensor {
    let matrices = &matrices.contiguous();
    let [tokens, groups, columns] = x.shape().dims();
    let pairs = tokens * groups;
    let rows = aligned(CubeBackend::float_reshape(x, [pairs, columns].into()));
    let result = output(&rows, [tokens, groups, matrices.rows], rows.dtype);
    let blueprint =
        SmallMBlueprint::new(rows.dtype, false, matrices, (tokens, pairs), &rows.client);
    SmallM {
        x: &rows,
        pairing: Pairing::Every,
        ids: None,
        scores: None,
        matrices,
        gated: None,
        pairs,
        pairs_per_row: 1,
        limit: 0.0,
        blueprint,
    }
    .launch(&result);
    result
}
