use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use crate::launching::{aligned, narrow, output};
use crate::packed::kernel::Format;
use crate::packed::launch::{
    FEW_ROWS, Few, FewBlueprint, FewPair, Grouping, Many, Matrices, Pairing, Plain, Role,
    can_multiply, has_tiles, many_tiles, parts,
};

/// Rows of `x` of a launch, whose cubes for them are all in one dimension.
const MAX_ROWS: usize = 1 << 17;

/// Whether there is a kernel for a product, and the matrix product of floats is not faster.
pub(super) fn can_multiply_rows(x: &CubeTensor, matrix: &Matrices) -> bool {
    let faster = matrix.format != Format::Dense || has_tiles(x, [matrix]);
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
    let blueprint = |rows| FewBlueprint::new(x.dtype, false, matrix, (rows, rows), &client);
    if !has_tiles(&x, [matrix]) {
        Plain {
            x: &x,
            grouping: &Grouping::One,
            scores: None,
            addend: None,
            matrices: matrix,
            role: Role::Rows,
            pairs: rows,
            share: 1,
            slots: 1,
            limit: 0.0,
        }
        .launch(&result);
    } else if rows <= FEW_ROWS && blueprint(FEW_ROWS).fits(&client) {
        Few {
            x: &x,
            pairing: Pairing::One,
            ids: None,
            scores: None,
            matrices: matrix,
            gated: None,
            pairs: rows,
            share: 1,
            limit: 0.0,
            blueprint: blueprint(rows),
        }
        .launch(&result);
    } else {
        let columns = many_tiles(rows * parts(x.dtype) as usize);
        Many {
            x: &x,
            sorted: None,
            scores: None,
            matrices: matrix,
            gated: None,
            ordered: false,
            pairs: rows,
            share: 1,
            columns,
            dtype: x.dtype,
            limit: 0.0,
        }
        .launch(&result);
    }
    result
}

/// Whether a few rows' products with two matrices are one launch.
pub(super) fn can_multiply_pair(x: &CubeTensor, [first, second]: &[Matrices; 2]) -> bool {
    let [rows, _] = x.shape().dims();
    let blueprint = FewBlueprint::new(x.dtype, false, first, (FEW_ROWS, FEW_ROWS), &x.client);
    rows <= FEW_ROWS
        && first.format != Format::Dense
        && first.format == second.format
        && can_multiply(x, [first, second])
        && has_tiles(x, [first, second])
        && blueprint.fits(&x.client)
}

/// `x · Wᵀ` for two matrices of as many columns.
///
/// The cut depends on format, columns and `x`, all of which both have in common: each has the bits that [`multiply_rows`] gives.
pub(super) fn multiply_pair(x: CubeTensor, matrices: [Matrices; 2]) -> (CubeTensor, CubeTensor) {
    let [first, second] = &matrices.map(Matrices::contiguous);
    let x = aligned(x);
    let [rows, _] = x.shape().dims();
    let results = [first, second].map(|matrix| output(&x, [rows, matrix.rows], x.dtype));
    FewPair {
        x: &x,
        matrices: [first, second],
        blueprint: FewBlueprint::new(x.dtype, false, first, (rows, rows), &x.client),
    }
    .launch(results.each_ref());
    let [product, other] = results;
    (product, other)
}

/// Whether a few tokens' linear maps by groups are one launch.
pub(super) fn can_multiply_groups(x: &CubeTensor, matrices: &Matrices) -> bool {
    let [tokens, _, _] = x.shape().dims();
    let fits = |rows| {
        let counts = (rows, rows * matrices.count);
        FewBlueprint::new(x.dtype, false, matrices, counts, &x.client).fits(&x.client)
    };
    tokens <= FEW_ROWS
        && matrices.format != Format::Dense
        && can_multiply(x, [matrices])
        && has_tiles(x, [matrices])
        && fits(FEW_ROWS)
}

/// Every group's channels of a few tokens, each by its own matrix: `[tokens, groups, out]`.
pub(super) fn multiply_groups(x: CubeTensor, matrices: Matrices) -> CubeTensor {
    let matrices = &matrices.contiguous();
    let [tokens, groups, columns] = x.shape().dims();
    let pairs = tokens * groups;
    let rows = aligned(CubeBackend::float_reshape(x, [pairs, columns].into()));
    let result = output(&rows, [tokens, groups, matrices.rows], rows.dtype);
    let blueprint = FewBlueprint::new(rows.dtype, false, matrices, (tokens, pairs), &rows.client);
    Few {
        x: &rows,
        pairing: Pairing::Every,
        ids: None,
        scores: None,
        matrices,
        gated: None,
        pairs,
        share: 1,
        limit: 0.0,
        blueprint,
    }
    .launch(&result);
    result
}
