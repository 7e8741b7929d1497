use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::zspace::{Strides, shape, strides};

use super::Product;
use crate::caps::Caps;
use crate::dims::Dims;
use crate::gemm::kernel::{
    FP8_TILE, Fp8Blueprint, RowFormat, WeightFormat, WgmmaBlueprint, WgmmaBoxesLaunch,
    WgmmaOperands, WgmmaRowsLaunch, hidden_block, permute_kernel, quantize_kernel,
    sum_splits_kernel, wgmma_fp8_kernel, wgmma_kernel,
};
use crate::gemm::{FP8_BLOCK, Matrices};
use crate::launching::{address_type, aligned, cube_count, output, vector_size};

/// Rows of `x` from which on warpgroups are faster than planes by one matrix: where K is split, and
/// where there are tiles enough without.
const MIN_ROWS: [usize; 2] = [17, 33];
/// The same of 16-bit weights, which are not decoded.
const MIN_DENSE_ROWS: usize = 17;
/// The same of rows by each of a stack on average.
pub(super) const MIN_PAIRS: usize = 32;
/// Rows of `x` of a tile, at most, and what their numbers are multiples of.
const MAX_COLUMNS: usize = 256;
const COLUMN_STEP: usize = 32;
/// Rows of `x` of a tile for which decoding weights takes as long as multiplying them, FP8 where K
/// is not split, and those that could be multiplied in the time that a tile takes besides.
const DECODED_COLUMNS: usize = 96;
const DECODED_FP8_COLUMNS: usize = 192;
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
/// K-splits, at most, of a product that takes no longer as a whole in E4M3.
const FP8_SPLITS: usize = 4;
/// Units of a cube that sums K-splits.
const SUM_UNITS: u32 = 256;
/// Words of a row of a box of 128 bytes, which products read from shared memory.
const SWIZZLED_WORDS: usize = 32;
/// Bytes by which the alignment of stages may add to shared memory.
const ALIGNMENT: usize = 2 * 1024;
/// Units of a cube that permutes columns, or rounds them.
const PERMUTING_UNITS: u32 = 256;

/// The operands of products of rows of `dtype`.
fn operands(dtype: DType, matrices: &Matrices) -> WgmmaOperands {
    let weights = matrices.format;
    let x = match dtype {
        DType::F16 => RowFormat::F16,
        _ => RowFormat::Bf16,
    };
    WgmmaOperands { weights, x }
}

/// Whether warpgroups can multiply these rows by these matrices, the first of them with a gate.
pub(super) fn can_multiply(x: &CubeTensor, matrices: &[&Matrices], gated: bool) -> bool {
    let indexed = |vectors: usize| u32::try_from(vectors).is_ok();
    let accepted = |(which, matrices): (usize, &&Matrices)| {
        // The rows of a warpgroup have the same scales of FP8, which may be of any bits.
        let gates = matrices.rows / (1 + usize::from(gated && which == 0));
        let whole = |rows: usize| rows == matrices.rows || rows.is_multiple_of(FP8_BLOCK);
        let blocks = whole(gates) && whole(matrices.rows / matrices.parts);
        matrices.format != WeightFormat::Dense
            && (blocks || matrices.format != WeightFormat::Fp8)
            && indexed(matrices.words.shape().num_elements() / 4)
    };
    Caps::of(&x.client).wgmma
        && x.dtype == DType::BF16
        && indexed(x.shape()[0] * x.meta.strides()[0] / 8)
        && fits(&x.client, WeightFormat::Fp8)
        && matrices.iter().enumerate().all(accepted)
}

/// Whether warpgroups can multiply these rows by rows of 16-bit weights.
pub(super) fn can_multiply_dense(x: &CubeTensor, weight: &CubeTensor) -> bool {
    let indexed = |tensor: &CubeTensor| u32::try_from(tensor.shape().num_elements() / 8).is_ok();
    Caps::of(&x.client).wgmma
        && matches!(x.dtype, DType::F16 | DType::BF16)
        && x.dtype == weight.dtype
        && x.shape()[0] >= MIN_DENSE_ROWS
        && x.shape()[1].is_multiple_of(8)
        && indexed(x)
        && indexed(weight)
        && fits(&x.client, WeightFormat::Dense)
}

/// Whether there is shared memory for tiles of any number of rows of 16 bits, which need more than
/// tiles of E4M3.
fn fits(client: &Client, weights: WeightFormat) -> bool {
    let x = RowFormat::Bf16;
    let bytes = WgmmaOperands { weights, x }.stage_bytes(2, MAX_COLUMNS as u32);
    stages(client, bytes) >= *STAGES.start()
}

/// Stages of so many bytes that fit into shared memory, at most as many as are of use.
fn stages(client: &Client, bytes: usize) -> usize {
    let caps = Caps::of(client);
    let fits = |stages: &usize| caps.fits_shared(stages * bytes + ALIGNMENT);
    (1..=*STAGES.end()).rev().find(fits).unwrap_or(0)
}

/// Products of `rows` rows of `x` by each matrix of a stack.
pub(super) struct RowProducts<'a> {
    rows: usize,
    matrices: &'a Matrices,
    /// Whether they have a gate: then K is never split.
    gated: bool,
    operands: WgmmaOperands,
    processors: usize,
}

impl<'a> RowProducts<'a> {
    pub fn new(x: &CubeTensor, rows: usize, matrices: &'a Matrices, gated: bool) -> Self {
        Self {
            rows,
            matrices,
            gated,
            operands: operands(x.dtype, matrices),
            processors: Caps::of(&x.client).processors as usize,
        }
    }

    /// Whether warpgroups are faster than planes.
    pub fn are_faster(&self) -> bool {
        self.rows >= MIN_ROWS[usize::from(self.splits(COLUMN_STEP) == 1)]
    }

    /// Whether rows in E4M3 can be multiplied as they are, for which K is never split.
    pub fn can_be_fp8(&self) -> bool {
        self.matrices.format == WeightFormat::Fp8 && self.splits(FP8_TILE as usize) <= FP8_SPLITS
    }

    /// Rows of `x` of a tile.
    pub fn columns(&self) -> usize {
        let matrices = self.matrices;
        cheapest(MAX_COLUMNS, |columns| {
            let splits = self.splits(columns);
            let decoded = match self.operands.weights {
                WeightFormat::Dense => 0,
                format if format.is_fp8() && splits == 1 => DECODED_FP8_COLUMNS,
                _ => DECODED_COLUMNS,
            };
            let steps = matrices.columns.div_ceil(COST_COLUMNS);
            let tile = (tile_cost(columns, decoded) * steps) as f64;
            match splits {
                1 => self.tiles(columns).div_ceil(self.processors) as f64 * tile,
                splits => {
                    let partials = (splits * self.rows * matrices.rows * matrices.count) as f64;
                    tile / splits as f64 + SUM_COST + partials * PARTIAL_COST
                }
            }
        })
    }

    /// Tiles of so many rows of `x`.
    fn tiles(&self, columns: usize) -> usize {
        self.matrices.rows.div_ceil(128) * self.matrices.count * self.rows.div_ceil(columns)
    }

    /// Their K-splits.
    fn splits(&self, columns: usize) -> usize {
        let (tiles, width) = (self.tiles(columns), self.matrices.columns);
        match self.gated {
            true => 1,
            false => splits_of(tiles, self.processors, width, self.operands),
        }
    }
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
    let ([rows, columns], [height, _]) = (x.dims(), weight.dims());
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
    let columns = RowProducts::new(&x, rows, &matrices, false).columns();
    launch(&Product::of_rows(&x, &matrices), columns, &result);
    result
}

/// Columns of a gated result with padding.
pub(super) fn padded_columns(columns: usize, format: WeightFormat) -> usize {
    columns.next_multiple_of(hidden_block(format) as usize)
}

/// Launches [`wgmma_kernel`] with tiles of `columns` rows of `x`.
pub(super) fn launch(product: &Product<'_>, columns: usize, result: &CubeTensor) {
    let matrices = product.matrices;
    let client = product.x.client.clone();
    let operands = operands(product.x.dtype, matrices);
    let permuted;
    let x = if matrices.format.is_fp4() && !product.permuted {
        permuted = permute(product.x, matrices.columns, matrices.format);
        &permuted
    } else {
        product.x
    };
    let outputs = product.outputs();
    // Decoding for few rows of `x` takes longer than the products, and more planes to hide its
    // latencies.
    let decoding = product.sorted().is_some() && columns <= MAX_COLUMNS / 2;
    let warpgroups = 2 + u32::from(decoding && matrices.format.is_fp4());
    let mut blueprint = WgmmaBlueprint {
        operands,
        warpgroups,
        columns: columns as u32,
        stages: stages(&client, operands.stage_bytes(warpgroups, columns as u32)) as u32,
        gated: product.gated,
        sorted: product.sorted().is_some(),
        by_position: product.permuted,
        scale_words: match matrices.format {
            WeightFormat::Fp4(_) => matrices.columns.is_multiple_of(128),
            format => format.is_fp8(),
        },
        vectors: product.gated.is_none()
            && result.dtype == DType::BF16
            && outputs.is_multiple_of(8),
        target: Caps::of(&client).target,
    };
    let problems = product.problems(columns);
    let positions = match product.gated {
        Some(format) => padded_columns(outputs, format),
        None => outputs,
    };
    let tiles = positions.div_ceil(blueprint.outputs() as usize) * problems;
    let processors = Caps::of(&client).processors as usize;
    let cubes = tiles.min(processors).max(1);
    let splits = match (product.sorted(), product.gated) {
        (None, None) => splits_of(tiles, processors, matrices.columns, operands),
        _ => 1,
    };
    let partials;
    let written = if splits > 1 {
        blueprint.vectors = false;
        let elements = result.shape().num_elements();
        partials = output(result, [splits, elements], DType::F32);
        &partials
    } else {
        result
    };
    let vectors = blueprint.vectors || product.gated.is_some();
    let size = if vectors { 8 } else { 1 };
    let stage_words = (operands.k_block() / matrices.format.columns() * 4) as usize;
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
                x_boxes(x, columns, product.matrix_count()),
                row_boxes(
                    matrices,
                    (blueprint.rows() / blueprint.weight_boxes()) as usize,
                    stage_words,
                ),
            ),
            WgmmaRowsLaunch::new(
                x.clone().into_buffer_arg(),
                (x.meta.strides()[0] * x.elem_size() / 16) as u32,
            ),
            product.pairs_arg(),
            product.sorted().map_or(0, |sorted| sorted.max_problems) as u32,
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

/// Launches [`wgmma_fp8_kernel`].
pub(super) fn launch_fp8(product: &Product<'_>, result: &CubeTensor) {
    let (x, matrices, tile) = (product.x, product.matrices, FP8_TILE as usize);
    let x_scales = product.x_scales.expect("the scales of rounded rows");
    let client = x.client.clone();
    let caps = Caps::of(&client);
    let blueprint = Fp8Blueprint {
        stages: stages(&client, Fp8Blueprint::stage_bytes()) as u32,
        vectors: result.dtype == DType::BF16 && matrices.rows.is_multiple_of(8),
        target: caps.target,
    };
    let tiles = matrices.rows.div_ceil(tile) * product.problems(tile);
    // SAFETY: boxes have zeros for rows and columns past the end; writes are within the output.
    unsafe {
        wgmma_fp8_kernel::launch_unchecked(
            &client,
            CubeCount::Static(tiles.clamp(1, caps.processors as usize) as u32, 1, 1),
            CubeDim::new_1d(Fp8Blueprint::units()),
            address_type([x, &matrices.words, result]),
            if blueprint.vectors { 8 } else { 1 },
            WgmmaBoxesLaunch::new(
                x_boxes(x, tile, product.matrix_count()),
                row_boxes(matrices, tile, SWIZZLED_WORDS),
            ),
            x_scales.clone().into_buffer_arg(),
            product.pairs_arg(),
            matrices.arg(),
            result.clone().into_buffer_arg(),
            blueprint,
            dtype_to_storage_type(result.dtype),
        );
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

/// The rows of `x` of each of `matrix_count` matrices in words, in boxes of `columns` rows.
fn x_boxes(x: &CubeTensor, columns: usize, matrix_count: usize) -> TensorMapArg<Tiled> {
    let words = |elements: usize| elements * x.elem_size() / 4;
    let ([rows, width], stride) = (x.dims(), words(x.meta.strides()[0]));
    boxes(
        x,
        shape![rows / matrix_count, matrix_count, words(width)],
        strides![matrix_count * stride, stride, 1],
        shape![columns, 1, SWIZZLED_WORDS],
    )
}

/// The rows of weights in words, in boxes of so many rows and words.
fn row_boxes(matrices: &Matrices, rows: usize, words: usize) -> TensorMapArg<Tiled> {
    let width = matrices.columns / matrices.format.columns() as usize * 4;
    boxes(
        &matrices.words,
        shape![matrices.count * matrices.rows, width],
        strides![width, 1],
        shape![rows, words],
    )
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
fn permute(x: &CubeTensor, columns: usize, format: WeightFormat) -> CubeTensor {
    let client = x.client.clone();
    let [rows, _] = x.dims();
    let padded = padded_columns(columns, format);
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
    let [rows, _] = x.dims();
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
