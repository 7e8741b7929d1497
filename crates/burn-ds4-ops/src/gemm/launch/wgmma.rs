use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::zspace::{Strides, shape, strides};

use super::large_m::{LargeM, LargeMTiles, SortedPairs};
use super::optional;
use crate::caps::Caps;
use crate::gemm::kernel::{
    LargeMPairsLaunch, RowFormat, WeightFormat, WgmmaBlueprint, WgmmaBoxesLaunch, WgmmaOperands,
    WgmmaRowsLaunch, hidden_block, permute_kernel, quantize_kernel, sum_splits_kernel,
    wgmma_kernel,
};
use crate::gemm::{FP8_BLOCK, Matrices};
use crate::launching::{address_type, aligned, cube_count, output, vector_size};

/// Rows of `x` from which on warpgroups are faster than planes by one matrix: where K is split, and
/// where there are tiles enough without.
const MIN_ROWS: [usize; 2] = [17, 33];
/// The same of rows by each of a stack on average.
pub(super) const MIN_PAIRS: usize = 32;
/// Rows of `x` of a tile, at most, and what their numbers are multiples of.
const MAX_COLUMNS: usize = 256;
const COLUMN_STEP: usize = 32;
/// As [`MAX_COLUMNS`], for E4M3, whose sums are in two sets of registers.
const MAX_FP8_COLUMNS: usize = 128;
/// Rows of `x` of a tile for which decoding weights takes as long as multiplying them, and those
/// that could be multiplied in the time that a tile takes besides.
const DECODED_COLUMNS: usize = 96;
const TILE_COLUMNS: usize = 32;
/// Columns of weights of which a tile's cost is stated: a row of `x` by so many costs about 3 ns on
/// an H200.
const COST_COLUMNS: usize = 64;
/// In the same unit, the launch that sums K-splits, and an element that it reads.
const SUM_COST: f64 = 700.0;
const PARTIAL_COST: f64 = 7e-4;
/// Stages, at least and at most.
const STAGES: std::ops::RangeInclusive<usize> = 2..=8;
/// K-splits, at most, and stages of one, at least.
const MAX_SPLITS: usize = 8;
const SPLIT_STAGES: usize = 8;
/// Units of a cube that sums K-splits.
const SUM_UNITS: u32 = 256;
/// Words of a row of a box of 128 bytes, which products read from shared memory.
const SWIZZLED_WORDS: usize = 32;
/// Bytes by which the alignment of stages may add to shared memory.
const ALIGNMENT: usize = 2 * 1024;
/// Units of a cube that permutes columns, or rounds them.
const PERMUTING_UNITS: u32 = 256;

/// The operands of products of rows of `dtype`, which may be `rounded` to E4M3, by FP8 weights as
/// E4M3.
pub(super) fn operands(dtype: DType, matrices: &Matrices, rounded: bool) -> WgmmaOperands {
    let weights = matrices.format;
    let x = match dtype {
        _ if rounded && weights == WeightFormat::Fp8 => RowFormat::Fp8,
        DType::F16 => RowFormat::F16,
        _ => RowFormat::Bf16,
    };
    WgmmaOperands { weights, x }
}

/// Whether warpgroups can multiply these rows by these matrices, the first of them with a gate.
pub(super) fn can_multiply(x: &CubeTensor, matrices: &[&Matrices], gated: bool) -> bool {
    let indexed = |vectors: usize| u32::try_from(vectors).is_ok();
    let accepted = |(which, matrices): (usize, &&Matrices)| {
        // The rows of a warpgroup have the same scales of FP8.
        let gates = matrices.rows / (1 + usize::from(gated && which == 0));
        let whole = |rows: usize| rows == matrices.rows || rows.is_multiple_of(FP8_BLOCK);
        let blocks = whole(gates) && whole(matrices.rows / matrices.parts);
        matrices.format != WeightFormat::Dense
            && (blocks || matrices.format == WeightFormat::Fp4)
            && indexed(matrices.words.shape().num_elements() / 4)
    };
    Caps::of(&x.client).wgmma
        && x.dtype == DType::BF16
        && indexed(x.shape()[0] * x.meta.strides()[0] / 8)
        && fits(&x.client, WeightFormat::Fp8)
        && matrices.iter().enumerate().all(accepted)
}

/// Whether warpgroups are faster than planes for `rows` rows of `x` by each matrix.
pub(super) fn is_faster(x: &CubeTensor, rows: usize, matrices: &Matrices) -> bool {
    let operands = operands(x.dtype, matrices, false);
    let splits = splits_of_rows(&x.client, (rows, COLUMN_STEP), matrices, operands);
    rows >= MIN_ROWS[usize::from(splits == 1)]
}

/// Rows of `x` of a tile of E4M3, for `rows` rows by each matrix. `None` where weights are not FP8,
/// and for so few that K is split, which is not timed with E4M3.
pub(super) fn fp8_columns(x: &CubeTensor, rows: usize, matrices: &Matrices) -> Option<usize> {
    let operands = operands(x.dtype, matrices, true);
    let columns = columns_of_rows(&x.client, rows, matrices, operands);
    let splits = splits_of_rows(&x.client, (rows, columns), matrices, operands);
    (operands.is_fp8() && splits == 1).then_some(columns)
}

/// Whether warpgroups can multiply these rows by rows of 16-bit weights.
pub(super) fn can_multiply_dense(x: &CubeTensor, weight: &CubeTensor) -> bool {
    let indexed = |tensor: &CubeTensor| u32::try_from(tensor.shape().num_elements() / 8).is_ok();
    Caps::of(&x.client).wgmma
        && matches!(x.dtype, DType::F16 | DType::BF16)
        && x.dtype == weight.dtype
        && x.shape()[0] >= MIN_ROWS[1]
        && x.shape()[1].is_multiple_of(8)
        && indexed(x)
        && indexed(weight)
        && fits(&x.client, WeightFormat::Dense)
}

/// Whether there is shared memory for tiles of any number of rows of 16 bits, which need more than
/// those of E4M3.
fn fits(client: &Client, weights: WeightFormat) -> bool {
    let x = RowFormat::Bf16;
    stages(client, WgmmaOperands { weights, x }, 2, MAX_COLUMNS as u32) >= *STAGES.start()
}

/// Stages that fit into shared memory, at most as many as are of use.
fn stages(client: &Client, operands: WgmmaOperands, groups: u32, columns: u32) -> usize {
    let caps = Caps::of(client);
    let stage = operands.stage_bytes(groups, columns);
    let fits = |stages: &usize| caps.fits_shared(stages * stage + ALIGNMENT);
    (1..=*STAGES.end()).rev().find(fits).unwrap_or(0)
}

/// Rows of `x` of a tile, for `rows` rows by each matrix.
pub(super) fn columns_of_rows(
    client: &Client,
    rows: usize,
    matrices: &Matrices,
    operands: WgmmaOperands,
) -> usize {
    let processors = Caps::of(client).processors as usize;
    let decoded = match operands.weights {
        WeightFormat::Fp4 | WeightFormat::Fp8 if !operands.is_fp8() => DECODED_COLUMNS,
        _ => 0,
    };
    // Twice as many E4M3 products take as long.
    let cost_columns = COST_COLUMNS * (1 + usize::from(operands.is_fp8()));
    let most = match operands.is_fp8() {
        true => MAX_FP8_COLUMNS,
        false => MAX_COLUMNS,
    };
    cheapest(most, |columns| {
        let tiles = tiles_of_rows(rows, columns, matrices);
        let steps = matrices.columns.div_ceil(cost_columns);
        let tile = (tile_cost(columns, decoded) * steps) as f64;
        match splits_of(tiles, processors, matrices.columns, operands) {
            1 => tiles.div_ceil(processors) as f64 * tile,
            splits => {
                let partials = (splits * rows * matrices.rows * matrices.count) as f64;
                tile / splits as f64 + SUM_COST + partials * PARTIAL_COST
            }
        }
    })
}

fn tiles_of_rows(rows: usize, columns: usize, matrices: &Matrices) -> usize {
    matrices.rows.div_ceil(128) * matrices.count * rows.div_ceil(columns)
}

/// The K-splits for rows of `x` in tiles of so many.
fn splits_of_rows(
    client: &Client,
    (rows, columns): (usize, usize),
    matrices: &Matrices,
    operands: WgmmaOperands,
) -> usize {
    let tiles = tiles_of_rows(rows, columns, matrices);
    let processors = Caps::of(client).processors as usize;
    splits_of(tiles, processors, matrices.columns, operands)
}

/// The K-splits of so many tiles by matrices of `width` columns.
fn splits_of(tiles: usize, processors: usize, width: usize, operands: WgmmaOperands) -> usize {
    let most = width.div_ceil(operands.k_block() as usize) / SPLIT_STAGES;
    (processors / tiles.max(1)).min(most).clamp(1, MAX_SPLITS)
}

/// Rows of `x` of a tile, for so many pairs of matrices and rows that are drawn at random.
pub(super) fn columns_of_pairs(pairs: usize, matrices: usize) -> usize {
    let mean = pairs as f64 / matrices as f64;
    let most = mean + 2.0 * mean.sqrt();
    cheapest(MAX_COLUMNS, |columns| {
        let tiles = (most / columns as f64).ceil();
        tiles * tile_cost(columns, DECODED_COLUMNS) as f64
    })
}

/// What a tile of so many rows costs for each [`COST_COLUMNS`], if decoding takes as long as
/// multiplying `decoded` rows.
fn tile_cost(columns: usize, decoded: usize) -> usize {
    columns.max(decoded) + TILE_COLUMNS
}

/// The number of rows of a tile, at most `most`, that costs least.
fn cheapest(most: usize, cost: impl Fn(usize) -> f64) -> usize {
    let mut best = COLUMN_STEP;
    for columns in (COLUMN_STEP..=most).step_by(COLUMN_STEP) {
        if cost(columns) < cost(best) {
            best = columns;
        }
    }
    best
}

/// `x · weightᵀ` in `dtype`, for operands that [`can_multiply_dense`] accepts.
pub(super) fn multiply_dense(x: CubeTensor, weight: CubeTensor, dtype: DType) -> CubeTensor {
    let ([rows, columns], [height, _]) = (x.shape().dims(), weight.shape().dims());
    let matrices = Matrices {
        words: weight,
        scales: None,
        format: WeightFormat::Dense,
        count: 1,
        rows: height,
        columns,
        parts: 1,
    };
    let (x, matrices) = (aligned(x), matrices.contiguous());
    let result = output(&x, [rows, height], dtype);
    let operands = operands(x.dtype, &matrices, false);
    LargeM {
        x: &x,
        x_scales: None,
        sorted: None,
        scores: None,
        matrices: &matrices,
        gated: None,
        permuted: false,
        pairs: rows,
        groups: 1,
        pairs_per_row: 1,
        tiles: LargeMTiles::Warpgroups(columns_of_rows(&x.client, rows, &matrices, operands)),
        dtype: x.dtype,
        limit: 0.0,
    }
    .launch(&result);
    result
}

/// Columns of a gated result with padding.
pub(super) fn padded_columns(columns: usize, format: WeightFormat) -> usize {
    columns.next_multiple_of(hidden_block(format) as usize)
}

/// Launches [`wgmma_kernel`] with tiles of `columns` rows of `x`.
pub(super) fn launch(product: &LargeM<'_>, columns: usize, result: &CubeTensor) {
    let matrices = product.matrices;
    let client = product.x.client.clone();
    let operands = operands(product.x.dtype, matrices, product.x_scales.is_some());
    let permuted;
    let x = if matrices.format == WeightFormat::Fp4 && !product.permuted {
        permuted = permute(product.x, matrices.columns);
        &permuted
    } else {
        product.x
    };
    let outputs = product.outputs();
    // Decoding for few rows of `x` takes longer than the products, and more planes to hide its
    // latencies.
    let decoding = product.sorted.is_some() && columns <= MAX_COLUMNS / 2;
    let groups = if decoding && matrices.format == WeightFormat::Fp4 {
        3
    } else {
        2
    };
    let mut blueprint = WgmmaBlueprint {
        operands,
        groups,
        columns: columns as u32,
        stages: stages(&client, operands, groups, columns as u32) as u32,
        gated: product.gated,
        sorted: product.sorted.is_some(),
        by_position: product.permuted,
        scale_words: match matrices.format {
            WeightFormat::Fp4 => matrices.columns.is_multiple_of(128),
            WeightFormat::Fp8 => true,
            WeightFormat::Dense => false,
        },
        vectors: product.gated.is_none()
            && result.dtype == DType::BF16
            && outputs.is_multiple_of(8),
        target: Caps::of(&client).target,
    };
    let problems = match product.sorted {
        Some(sorted) => sorted.max_problems,
        None => product.pairs.div_ceil(columns) * product.groups,
    };
    let positions = match product.gated {
        Some(format) => padded_columns(outputs, format),
        None => outputs,
    };
    let tiles = positions.div_ceil(blueprint.outputs() as usize) * problems;
    let processors = Caps::of(&client).processors as usize;
    let cubes = tiles.min(processors).max(1);
    let splits = match (product.sorted, product.gated) {
        (None, None) => splits_of(tiles, processors, matrices.columns, operands),
        _ => 1,
    };
    let partials;
    let written = if splits > 1 {
        blueprint.vectors = false;
        let [rows, columns] = result.shape().dims();
        partials = output(result, [splits * rows, columns], DType::F32);
        &partials
    } else {
        result
    };
    let size = if blueprint.vectors || product.gated.is_some() {
        8
    } else {
        1
    };
    let of_sorted = |tensor: fn(&SortedPairs) -> &CubeTensor| optional(product.sorted.map(tensor));
    // SAFETY: rows and columns past the end are read as zeros, or as others; writes are within the
    // output.
    unsafe {
        wgmma_kernel::launch_unchecked(
            &client,
            CubeCount::Static(cubes as u32, splits as u32, 1),
            CubeDim::new_1d(blueprint.units()),
            address_type([x, &matrices.words, written]),
            size,
            WgmmaBoxesLaunch::new(
                x_boxes(x, columns, product.groups),
                weight_boxes(matrices, blueprint),
            ),
            WgmmaRowsLaunch::new(
                x.clone().into_buffer_arg(),
                (x.meta.strides()[0] * x.elem_size() / 16) as u32,
                optional(product.x_scales),
                x.meta.shape()[0] as u32,
            ),
            LargeMPairsLaunch::new(
                of_sorted(|sorted| &sorted.order),
                of_sorted(|sorted| &sorted.problems),
                optional(product.scores),
                product.pairs as u32,
                product.groups as u32,
                product.pairs_per_row as u32,
                product.limit as f32,
            ),
            product.sorted.map_or(0, |sorted| sorted.max_problems) as u32,
            matrices.arg(),
            written.clone().into_buffer_arg(),
            blueprint,
            dtype_to_storage_type(written.dtype),
        );
    }
    if splits > 1 {
        sum_splits(written, splits, result);
    }
}

/// Sums the K-splits of a product.
fn sum_splits(partials: &CubeTensor, splits: usize, result: &CubeTensor) {
    let client = result.client.clone();
    let size = vector_size(result, 4);
    let count = result.shape().num_elements() / size;
    // SAFETY: reads are within `splits` times the elements of the result, writes within these.
    unsafe {
        sum_splits_kernel::launch_unchecked(
            &client,
            cube_count(&client, count.div_ceil(SUM_UNITS as usize)),
            CubeDim::new_1d(SUM_UNITS),
            address_type([partials, result]),
            size,
            partials.clone().into_buffer_arg(),
            result.clone().into_buffer_arg(),
            splits as u32,
            count,
            dtype_to_storage_type(result.dtype),
        );
    }
}

/// The rows of `x` of each of `groups` matrices in words, in boxes of `columns` rows.
fn x_boxes(x: &CubeTensor, columns: usize, groups: usize) -> TensorMapArg<Tiled> {
    let words = |elements: usize| elements * x.elem_size() / 4;
    let ([rows, width], stride) = (x.shape().dims(), words(x.meta.strides()[0]));
    boxes(
        x,
        shape![rows / groups, groups, words(width)],
        strides![groups * stride, stride, 1],
        shape![columns, 1, SWIZZLED_WORDS],
    )
}

/// The rows of weights in words.
///
/// With a gate for FP4 weights, a box has 32 outputs in the order in which those want them: eight
/// of every 32 rows of four such, with the first four of them and the others by turns.
fn weight_boxes(matrices: &Matrices, blueprint: WgmmaBlueprint) -> TensorMapArg<Tiled> {
    let rows = matrices.count * matrices.rows;
    let width = matrices.columns / matrices.format.columns() as usize * 4;
    let box_width = (blueprint.operands.k_block() / matrices.format.columns() * 4) as usize;
    if blueprint.gated == Some(WeightFormat::Fp4) {
        boxes(
            &matrices.words,
            shape![4, 4, rows / 32, 2, width],
            strides![8 * width, width, 32 * width, 4 * width, 1],
            shape![1, 4, 4, 2, box_width],
        )
    } else {
        boxes(
            &matrices.words,
            shape![rows, width],
            strides![width, 1],
            shape![blueprint.box_rows() as usize, box_width],
        )
    }
}

/// A tensor of words in boxes whose rows are swizzled.
fn boxes(tensor: &CubeTensor, shape: Shape, strides: Strides, size: Shape) -> TensorMapArg<Tiled> {
    let swizzle = match size[size.len() - 1] {
        SWIZZLED_WORDS => TensorMapSwizzle::B128,
        _ => TensorMapSwizzle::B64,
    };
    // SAFETY: every row of this shape is one of the tensor.
    let words = unsafe { TensorArg::from_raw_parts(tensor.handle.clone(), strides, shape) };
    TensorMapArg::new(
        TiledArgs { tile_size: size },
        words,
        u32::elem_type_native(),
    )
    .with_swizzle(swizzle)
    .with_prefetch(TensorMapPrefetch::B256)
}

/// The rows of `x` in the order for FP4 weights.
fn permute(x: &CubeTensor, columns: usize) -> CubeTensor {
    let client = x.client.clone();
    let [rows, _] = x.shape().dims();
    let padded = padded_columns(columns, WeightFormat::Fp4);
    let permuted = output(x, [rows, padded], DType::BF16);
    let units = rows * padded / 32;
    // SAFETY: reads are within the rows of `x`, writes within those of the result.
    unsafe {
        permute_kernel::launch_unchecked(
            &client,
            cube_count(&client, units.div_ceil(PERMUTING_UNITS as usize)),
            CubeDim::new_1d(PERMUTING_UNITS),
            address_type([x, &permuted]),
            x.clone().into_buffer_arg(),
            x.meta.strides()[0] / 8,
            (columns / 8) as u32,
            rows as u32,
            permuted.clone().into_buffer_arg(),
        );
    }
    permuted
}

/// Rows of `bf16` rounded to E4M3, for products by FP8 weights, and the scales of their blocks.
pub(crate) fn quantize(x: &CubeTensor, matrices: &Matrices) -> (CubeTensor, CubeTensor) {
    let client = x.client.clone();
    let [rows, _] = x.shape().dims();
    let blocks = matrices.columns.div_ceil(FP8_BLOCK);
    let codes = output(x, [rows, blocks * FP8_BLOCK / 4], DType::U32);
    let scales = output(x, [blocks, rows], DType::F32);
    // 16 units have a block.
    let cubes = (rows * blocks * 16).div_ceil(PERMUTING_UNITS as usize);
    // SAFETY: reads are within the rows of `x`, writes within those of the results.
    unsafe {
        quantize_kernel::launch_unchecked(
            &client,
            cube_count(&client, cubes),
            CubeDim::new_1d(PERMUTING_UNITS),
            address_type([x, &codes]),
            x.clone().into_buffer_arg(),
            x.meta.strides()[0] / 8,
            (matrices.columns / 8) as u32,
            rows as u32,
            codes.clone().into_buffer_arg(),
            scales.clone().into_buffer_arg(),
            Caps::of(&client).target,
        );
    }
    (codes, scales)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_of_pairs_leave_little_over() {
        let columns = [1, 6, 48, 96, 384, 4096].map(|mean| columns_of_pairs(mean * 256, 256));
        assert_eq!(columns, [32, 32, 64, 128, 224, 224]);
    }
}
