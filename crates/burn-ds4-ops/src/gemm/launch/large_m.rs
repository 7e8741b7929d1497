use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::optional;
use super::wgmma::{self, RowProducts};
use crate::caps::Caps;
use crate::gemm::kernel::{
    FP8_TILE, InputLayout, LargeMBlueprint, LargeMPairsLaunch, SortBlueprint, SortSizesLaunch,
    WeightFormat, large_m_kernel, sort_kernel, sum_slots_kernel,
};
use crate::gemm::{Matrices, terms};
use crate::launching::{address_type, cube_count, output, vector_size};

/// Planes of a cube of the large-M kernel; half as many where there would be fewer cubes than
/// multiprocessors.
const LARGE_M_PLANES: u32 = 8;
/// Tiles of 8 columns of the large-M kernel, at most.
const LARGE_M_TILES: usize = 8;
/// Units of a cube that sums rows.
const SUM_UNITS: u32 = 256;

/// How many rows of `x` a cube multiplies at a time, and with which instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LargeMTiles {
    /// Tiles of 8 columns, which are terms of rows, for products of planes.
    Planes(usize),
    /// Rows, for products of warpgroups.
    Warpgroups(usize),
    /// [`FP8_TILE`] rows that are rounded to E4M3, by FP8 weights.
    Fp8,
}

impl LargeMTiles {
    /// For so many rows of `x` by each matrix, which may be `rounded` to E4M3.
    pub fn of_rows(x: &CubeTensor, rows: usize, matrices: &Matrices, rounded: bool) -> Self {
        let products = RowProducts::new(x, rows, matrices, false);
        if !products.are_faster() || !wgmma::can_multiply(x, &[matrices], false) {
            Self::planes(rows * terms(x.dtype) as usize)
        } else if rounded && products.can_be_fp8() {
            Self::Fp8
        } else {
            Self::Warpgroups(products.columns())
        }
    }

    /// For pairs of rows of `x` and experts, `[gate and up, down]`.
    pub fn of_pairs(x: &CubeTensor, pairs: usize, experts: [&Matrices; 2]) -> Self {
        let count = experts[0].count;
        if pairs / count >= wgmma::MIN_PAIRS && wgmma::can_multiply(x, &experts, true) {
            Self::Warpgroups(wgmma::columns_of_pairs(pairs, count))
        } else {
            Self::planes((pairs * terms(x.dtype) as usize).div_ceil(count))
        }
    }

    /// For all rows of `x` by one expert, `[gate and up, down]`.
    pub fn of_expert(x: &CubeTensor, expert: [&Matrices; 2]) -> [Self; 2] {
        let rows = x.meta.shape()[0];
        match Self::of_pairs(x, rows, expert) {
            Self::Warpgroups(_) => {
                [(expert[0], true), (expert[1], false)].map(|(matrices, gated)| {
                    Self::Warpgroups(RowProducts::new(x, rows, matrices, gated).columns())
                })
            }
            planes => [planes; 2],
        }
    }

    pub fn is_fp8(self) -> bool {
        matches!(self, Self::Fp8)
    }

    /// For a number of columns to a matrix.
    fn planes(columns: usize) -> Self {
        let tiles = columns.div_ceil(8).next_power_of_two();
        Self::Planes(tiles.clamp(2, LARGE_M_TILES))
    }

    /// Rows of `x` of a problem, at most.
    pub fn rows(self, dtype: DType) -> usize {
        match self {
            Self::Planes(tiles) => 8 * tiles / terms(dtype) as usize,
            Self::Warpgroups(rows) => rows,
            Self::Fp8 => FP8_TILE as usize,
        }
    }

    /// Columns of a gated result with the padding that the product by `down` expects.
    pub fn hidden_columns(self, down: &Matrices) -> usize {
        match self {
            Self::Planes(_) => down.padded_columns(),
            _ => wgmma::padded_columns(down.columns, down.format),
        }
    }
}

/// Pairs in groups of one expert.
pub(crate) struct SortedPairs {
    pub order: CubeTensor,
    pub starts: CubeTensor,
    pub(super) problems: CubeTensor,
    /// Capacity of the table of problems.
    pub(super) max_problems: usize,
}

/// Groups pairs, and divides the groups into problems of at most `problem_pairs` pairs.
pub(crate) fn sort(ids: &CubeTensor, experts: usize, problem_pairs: usize) -> SortedPairs {
    let client = ids.client.clone();
    let pairs = ids.shape().num_elements();
    let max_problems = pairs.min(pairs.div_ceil(problem_pairs) + experts);
    let sorted = SortedPairs {
        order: output(ids, [1, pairs], DType::U32),
        starts: output(ids, [1, experts + 1], DType::U32),
        problems: output(ids, [1, 3 * max_problems + 1], DType::U32),
        max_problems,
    };
    let lanes = Caps::of(&client).lanes();
    let units = Caps::of(&client).cube_units;
    // By powers of two, so that there are few kernels for all numbers of pairs.
    let planes = pairs.div_ceil(lanes as usize).next_power_of_two();
    let planes = (planes as u32).min(units.min(1024) / lanes);
    let blueprint = SortBlueprint {
        experts: (experts as u32).next_multiple_of(lanes),
        lanes,
        planes,
        target: Caps::of(&client).target,
    };
    // SAFETY: ids that are no experts' are left out; there are no more problems than the table has
    // capacity for.
    unsafe {
        sort_kernel::launch_unchecked(
            &client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_2d(lanes, planes),
            ids.clone().into_buffer_arg(),
            sorted.order.clone().into_buffer_arg(),
            sorted.starts.clone().into_buffer_arg(),
            sorted.problems.clone().into_buffer_arg(),
            SortSizesLaunch::new(
                pairs as u32,
                experts as u32,
                problem_pairs as u32,
                max_problems as u32,
            ),
            blueprint,
            dtype_to_storage_type(ids.dtype),
        );
    }
    sorted
}

/// A launch of [`large_m_kernel`], or of the kernel for warpgroups.
#[derive(Clone, Copy)]
pub(crate) struct LargeM<'a> {
    pub x: &'a CubeTensor,
    /// Those of `x`, if it is what [`quantize`](super::quantize) makes of it.
    pub x_scales: Option<&'a CubeTensor>,
    pub sorted: Option<&'a SortedPairs>,
    pub scores: Option<&'a CubeTensor>,
    pub matrices: &'a Matrices,
    pub gated: Option<WeightFormat>,
    pub permuted: bool,
    /// Where they are not sorted, those of each matrix.
    pub pairs: usize,
    /// Matrices that each row has a pair with, where they are not sorted.
    pub groups: usize,
    pub pairs_per_row: usize,
    pub tiles: LargeMTiles,
    /// The dtype of the rows of `x`, which gated results are rounded to. A permuted `x` consists of
    /// terms of it.
    pub dtype: DType,
    pub limit: f64,
}

impl<'a> LargeM<'a> {
    /// `x · Wᵀ` for all rows of `x` and the one matrix.
    pub fn of_rows(x: &'a CubeTensor, matrices: &'a Matrices, tiles: LargeMTiles) -> Self {
        Self {
            x,
            x_scales: None,
            sorted: None,
            scores: None,
            matrices,
            gated: None,
            permuted: false,
            pairs: x.meta.shape()[0],
            groups: 1,
            pairs_per_row: 1,
            tiles,
            dtype: x.dtype,
            limit: 0.0,
        }
    }

    /// Columns of the result.
    pub(super) fn outputs(&self) -> usize {
        self.matrices.rows / (1 + usize::from(self.gated.is_some()))
    }

    /// Problems of at most `rows` rows of `x`, at most.
    pub(super) fn problems(&self, rows: usize) -> usize {
        match self.sorted {
            Some(sorted) => sorted.max_problems,
            None => self.pairs.div_ceil(rows) * self.groups,
        }
    }

    /// The pairs as a kernel argument.
    pub(super) fn pairs_arg(&self) -> LargeMPairsLaunch {
        LargeMPairsLaunch::new(
            optional(self.sorted.map(|sorted| &sorted.order)),
            optional(self.sorted.map(|sorted| &sorted.problems)),
            optional(self.scores),
            self.pairs as u32,
            self.groups as u32,
            self.pairs_per_row as u32,
            self.limit as f32,
        )
    }

    pub(crate) fn launch(self, result: &CubeTensor) {
        match self.tiles {
            LargeMTiles::Planes(x_tiles) => self.launch_planes(x_tiles, result),
            LargeMTiles::Warpgroups(columns) => wgmma::launch(&self, columns, result),
            LargeMTiles::Fp8 => wgmma::launch_fp8(&self, result),
        }
    }

    fn launch_planes(self, x_tiles: usize, result: &CubeTensor) {
        let matrices = self.matrices;
        let client = self.x.client.clone();
        let terms = terms(self.dtype);
        let (size, element) = if self.permuted {
            (4, DType::U32)
        } else {
            (16 / self.x.elem_size(), self.x.dtype)
        };
        // A permuted `x` is read in words.
        let stride = self.x.meta.strides()[0] * self.x.elem_size() / 16;
        let outputs = self.outputs();
        let mut blueprint = LargeMBlueprint {
            input: InputLayout {
                format: matrices.format,
                terms,
                permuted: self.permuted,
                f16_input: false,
            },
            x_tiles: x_tiles as u32,
            planes: LARGE_M_PLANES,
            gated: self.gated,
            k_aligned: matrices.columns.is_multiple_of(128),
            target: Caps::of(&client).target,
        };
        let problems = self.problems(blueprint.rows() as usize);
        let cubes = outputs.div_ceil(blueprint.outputs() as usize) * problems;
        if cubes < Caps::of(&client).processors as usize {
            blueprint.planes /= 2;
        }
        let dtypes = [element, self.dtype, result.dtype].map(dtype_to_storage_type);
        // SAFETY: rows and columns past the end are read as the last, or as the first column;
        // writes are within the output.
        unsafe {
            large_m_kernel::launch_unchecked(
                &client,
                CubeCount::Static(
                    outputs.div_ceil(blueprint.outputs() as usize) as u32,
                    problems as u32,
                    1,
                ),
                CubeDim::new_2d(32, blueprint.planes),
                address_type([self.x, &matrices.words, result]),
                size,
                self.x.clone().into_buffer_arg(),
                stride,
                self.pairs_arg(),
                matrices.arg(),
                result.clone().into_buffer_arg(),
                blueprint,
                dtypes,
            );
        }
    }
}

/// Sums the rows of each token's pairs, and a row of `addend` for each token.
pub(crate) fn sum_slots(
    rows: CubeTensor,
    (ids, experts): (&CubeTensor, usize),
    addend: Option<&CubeTensor>,
    dtype: DType,
) -> CubeTensor {
    let client = rows.client.clone();
    let ([tokens, slots], [_, columns]) = (ids.shape().dims(), rows.shape().dims());
    let sums = output(&rows, [tokens, columns], dtype);
    let size = vector_size(&rows, 4);
    let vectors = columns / size;
    let dtypes = [ids.dtype, dtype].map(dtype_to_storage_type);
    // SAFETY: reads are within `[pairs, columns]` and `[tokens, columns]`, and writes within the
    // latter.
    unsafe {
        sum_slots_kernel::launch_unchecked(
            &client,
            cube_count(&client, (tokens * vectors).div_ceil(SUM_UNITS as usize)),
            CubeDim::new_1d(SUM_UNITS),
            address_type([&rows, &sums]),
            size,
            rows.into_buffer_arg(),
            ids.clone().into_buffer_arg(),
            optional(addend),
            sums.clone().into_buffer_arg(),
            tokens as u32,
            slots as u32,
            experts as u32,
            vectors as u32,
            dtypes,
        );
    }
    sums
}
