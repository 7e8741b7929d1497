use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::args::{Activations, LinearProducts, PackedWeights, fp8_block};
use super::reference;
use crate::caps::Caps;
use crate::dims::Dims;
use crate::gemm::kernel::WeightFormat;
use crate::gemm::launch::dense::ListOutput;
use crate::gemm::launch::{
    LinearGroupBlueprint, Product, SMALL_M_ROWS, Schedule, StreamBlueprint, StreamProblem,
    can_multiply, has_tiles, launch_group, launch_stream, quantize,
};
use crate::gemm::{FP8_BLOCK, Matrices};
use crate::launching::{aligned, elements_view, narrow, output};
use crate::matmul::{TensorList, multiply_one};
use crate::roundtrip::SmallFloat;
use crate::roundtrip::launch::{can_round, round};

/// Rows of `x` in a launch, at most: its cubes for rows are all in one dimension.
const MAX_ROWS: usize = 1 << 17;
/// Rows that are streamed in micro-batches, at most, and rows of weights for each of which and each
/// batch there must be a multiprocessor. See [`in_micro_batches`].
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
            } => {
                let format = match fp8_block(scales.dims(), [rows, columns], parts) {
                    Some(FP8_BLOCK) => WeightFormat::Fp8,
                    _ => WeightFormat::Fp8Blocks32,
                };
                (words, Some(scales), format, parts)
            }
            PackedWeights::Fp4 {
                words,
                scales,
                layout,
                ..
            } => (words, Some(scales), WeightFormat::Fp4(layout), 1),
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

/// Rounds in blocks to a small format and back.
pub(super) fn roundtrip(x: CubeTensor, block: usize, to: SmallFloat) -> CubeTensor {
    if can_round(&x, block) {
        round(x, block, to)
    } else {
        reference::roundtrip::<CubeBackend>(x, block, to)
    }
}

/// Rows of `x` as products take them.
fn input(x: CubeTensor, activations: Activations) -> CubeTensor {
    match activations.block() {
        None => x,
        Some(block) => roundtrip(x, block, SmallFloat::Fp8),
    }
}

/// The rows of `[tokens, groups, in]`. A reshape would copy those of one group if there are gaps
/// between them.
fn into_rows(mut x: CubeTensor) -> CubeTensor {
    let [tokens, groups, columns] = x.dims();
    if groups > 1 || x.is_contiguous() || x.meta.is_tiled() {
        return CubeBackend::float_reshape(x, [tokens * groups, columns].into());
    }
    x.meta.remove(1);
    x
}

/// The rows of `x` by one dense matrix. More than [`SMALL_M_ROWS`] take it in their own dtype.
fn dense(x: CubeTensor, matrix: CubeTensor, activations: Activations) -> CubeTensor {
    let ([rows, columns], [_, out, _]) = (x.dims(), matrix.dims());
    let dtype = x.dtype.into();
    let matrix = match rows > SMALL_M_ROWS {
        true => CubeBackend::float_cast(matrix, dtype),
        false => matrix,
    };
    let matrix = CubeBackend::float_reshape(matrix, [out, columns].into());
    let product = multiply_one::<CubeBackend>(input(x, activations), matrix, dtype);
    CubeBackend::float_reshape(product, [rows, 1, out].into())
}

/// The channels of each group of `[tokens, groups, in]` by its own matrix, in the dtype of `x`.
/// `None` for several dense ones, and for packed ones without a kernel.
pub(super) fn grouped_linear(
    x: &CubeTensor,
    weights: &PackedWeights<CubeBackend>,
    activations: Activations,
) -> Option<CubeTensor> {
    let matrices = Matrices::from(weights.clone());
    let [tokens, groups, _] = x.dims();
    let tiles = has_tiles(x, [&matrices]);
    let possible = match matrices.format {
        WeightFormat::Dense => tiles && groups == 1 && tokens > SMALL_M_ROWS,
        _ => tiles || groups == 1,
    };
    if !possible || groups > MAX_ROWS || !can_multiply(x, [&matrices]) {
        let one = groups == 1 && matrices.format == WeightFormat::Dense;
        return one.then(|| dense(into_rows(x.clone()), matrices.words, activations));
    }
    let matrices = &matrices.contiguous();
    let x = into_rows(x.clone());
    let most = MAX_ROWS / groups;
    let products = (0..tokens).step_by(most).map(|first| {
        let count = most.min(tokens - first);
        let x = narrow(&x, first * groups, count * groups);
        let result = output(&x, [count, groups, matrices.rows], x.dtype);
        multiply(x, matrices, count, activations, &result);
        result
    });
    let mut products: Vec<_> = products.collect();
    match products.len() {
        1 => products.pop(),
        _ => Some(CubeBackend::float_cat(products, 0)),
    }
}

/// `rows` rows of `x` by each matrix of a stack: row `r` and matrix `m` have row `r * count + m` of
/// `x` and of the result.
fn multiply(
    x: CubeTensor,
    matrices: &Matrices,
    rows: usize,
    activations: Activations,
    result: &CubeTensor,
) {
    let x = aligned(x);
    let schedule = Schedule::of_rows(&x, rows, matrices, activations == Activations::Released);
    if schedule == Schedule::Fp8 {
        let (codes, scales) = quantize(&x, matrices);
        let product = Product {
            x_scales: Some(&scales),
            dtype: x.dtype,
            ..Product::of_rows(&codes, matrices)
        };
        return product.launch(schedule, result);
    }
    let x = aligned(input(x, activations));
    if !in_micro_batches(&x, matrices, (rows, schedule)) {
        return Product::of_rows(&x, matrices).launch(schedule, result);
    }
    let groups = matrices.count;
    for first in (0..rows).step_by(SMALL_M_ROWS) {
        let count = SMALL_M_ROWS.min(rows - first);
        let x = narrow(&x, first * groups, count * groups);
        let shape = [count, groups, matrices.rows];
        let result = elements_view(result, first * groups * matrices.rows, shape);
        multiply(x, matrices, count, Activations::Exact, &result);
    }
}

/// Whether rows are streamed as micro-batches of up to [`SMALL_M_ROWS`]. A large-M product of few
/// more rows than that has so few cubes for few outputs that it takes longer than to read the
/// weights once for each, unless warpgroups multiply.
fn in_micro_batches(
    x: &CubeTensor,
    matrices: &Matrices,
    (rows, schedule): (usize, Schedule),
) -> bool {
    let count = rows.div_ceil(SMALL_M_ROWS);
    let cubes = count * matrices.rows.div_ceil(STREAMED_HEIGHT) * matrices.count;
    matches!(schedule, Schedule::Planes(_))
        && matrices.format != WeightFormat::Dense
        && (SMALL_M_ROWS + 1..=MAX_STREAMED_ROWS).contains(&rows)
        && cubes <= Caps::of(&x.client).processors as usize
        && StreamBlueprint::new(x, matrices, SMALL_M_ROWS).is_some()
}

/// How the products of up to `rows` rows with two matrices of the same number of columns are
/// compiled, if they can be one launch.
///
/// The split of K depends on the format, the columns and `x`, which both products share, so each
/// has the bits of [`grouped_linear`].
fn packed_blueprint(
    x: &CubeTensor,
    [first, second]: &[Matrices; 2],
    rows: usize,
) -> Option<StreamBlueprint> {
    let one_launch = first.format != WeightFormat::Dense
        && first.format == second.format
        && can_multiply(x, [first, second])
        && has_tiles(x, [first, second]);
    let blueprint = one_launch
        .then(|| StreamBlueprint::new(x, first, rows))
        .flatten()?;
    Some(StreamBlueprint {
        in_parts: first.has_blocks_of_parts() || second.has_blocks_of_parts(),
        ..blueprint
    })
}

/// `x · Wᵀ` for two packed matrices and, in `dtype`, for each of some `dense` weights of one dtype,
/// which take `x` as it is. `None` where they can not be one launch.
pub(super) fn group(
    x: &CubeTensor,
    packed: [Matrices; 2],
    dense: &[CubeTensor],
    activations: Activations,
    dtype: DType,
) -> Option<LinearProducts<CubeBackend>> {
    let [rows, _] = x.dims();
    let pair = packed_blueprint(x, &packed, rows)?;
    let all = match dense {
        [] => None,
        _ if activations != Activations::Exact => return None,
        _ => {
            // With `x` in registers, all planes of a cube multiply one tile, so that they read
            // neighbouring weights. In a shared launch, that pays for a single row as well.
            let several = packed_blueprint(x, &packed, rows.max(2))?;
            let pair = if several.x_in_registers {
                several
            } else {
                pair
            };
            Some(LinearGroupBlueprint::new(pair, x, dense)?)
        }
    };
    let x = &aligned(input(x.clone(), activations));
    let packed = packed.map(Matrices::contiguous);
    let products = packed
        .each_ref()
        .map(|matrix| output(x, [rows, matrix.rows], x.dtype));
    let problems = [0, 1].map(|of| StreamProblem {
        product: Product::of_rows(x, &packed[of]),
        output: &products[of],
        blueprint: all.map_or(pair, |all| all.packed),
    });
    let dense = match all {
        None => {
            launch_stream(&problems[0], Some(&problems[1]));
            TensorList::new(Vec::new())
        }
        Some(blueprint) => {
            let dense: Vec<_> = dense.iter().cloned().map(into_contiguous).collect();
            let results = ListOutput::new(x, &dense, dtype);
            launch_group(&problems, &results.list(&dense), &results.all, blueprint);
            results.into_products(&dense)
        }
    };
    let [first, second] = products;
    Some(LinearProducts {
        first,
        second,
        dense,
    })
}
