use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::wgmma::{self, RowProducts};
use super::{Product, StreamBlueprint, has_tiles};
use crate::caps::Caps;
use crate::gemm::kernel::{
    CUBE_X_ROWS, FP8_TILE, InputLayout, LargeMBlueprint, WeightFormat, large_m_kernel,
};
use crate::gemm::{Matrices, terms};
use crate::launching::address_type;

/// Planes of a cube of the large-M kernel; half as many where there would be fewer cubes than
/// multiprocessors.
const LARGE_M_PLANES: u32 = 8;
/// Tiles of 8 columns of the large-M kernel, at most.
const LARGE_M_TILES: usize = 8;
/// Pairs of an expert up to which experts are streamed, on average, and rows of their problems. Few
/// experts then have more pairs, for which their weights are read again.
const STREAMED_PAIRS: [(usize, usize); 2] = [(6, 8), (12, 16)];

/// How both products of experts are compiled where they are streamed. `None` for more pairs, or
/// where shared memory is too small.
fn streamed(x: &CubeTensor, pairs: usize, experts: [&Matrices; 2]) -> Option<[StreamBlueprint; 2]> {
    let caps = Caps::of(&x.client);
    let few = |(most, _): &&(usize, usize)| pairs <= most * experts[0].count;
    let (_, rows) = *STREAMED_PAIRS.iter().find(few)?;
    let of = |matrices, permuted| {
        let input = (rows, permuted);
        StreamBlueprint::of_problems(x.dtype, matrices, input, &caps)
    };
    let possible = has_tiles(x, experts);
    possible.then_some([of(experts[0], false)?, of(experts[1], true)?])
}

/// How many rows of `x` a cube multiplies at a time, and with which instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Schedule {
    /// A few, on any device.
    Portable,
    /// Those by which weights are streamed.
    Stream(StreamBlueprint),
    /// Tiles of 8 columns, which are terms of rows, for products of planes.
    Planes(usize),
    /// Rows, for products of warpgroups.
    Warpgroups(usize),
    /// [`FP8_TILE`] rows that are rounded to E4M3, by FP8 weights.
    Fp8,
}

impl Schedule {
    /// For so many rows of `x` by each matrix, which may be `rounded` to E4M3.
    pub fn of_rows(x: &CubeTensor, rows: usize, matrices: &Matrices, rounded: bool) -> Self {
        if !has_tiles(x, [matrices]) {
            return Self::Portable;
        }
        if let Some(blueprint) = StreamBlueprint::new(x, matrices, rows) {
            return Self::Stream(blueprint);
        }
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
    pub fn of_pairs(x: &CubeTensor, pairs: usize, experts: [&Matrices; 2]) -> [Self; 2] {
        match streamed(x, pairs, experts) {
            Some(blueprints) => blueprints.map(Self::Stream),
            None => [Self::by_arithmetic(x, pairs, experts); 2],
        }
    }

    /// The same where weights are not streamed.
    fn by_arithmetic(x: &CubeTensor, pairs: usize, experts: [&Matrices; 2]) -> Self {
        let count = experts[0].count;
        if !has_tiles(x, experts) {
            Self::Portable
        } else if pairs / count >= wgmma::MIN_PAIRS && wgmma::can_multiply(x, &experts, true) {
            Self::Warpgroups(wgmma::columns_of_pairs(pairs, count))
        } else {
            Self::planes((pairs * terms(x.dtype) as usize).div_ceil(count))
        }
    }

    /// For all rows of `x` by one expert, `[gate and up, down]`.
    pub fn of_expert(x: &CubeTensor, expert: [&Matrices; 2]) -> [Self; 2] {
        let rows = x.meta.shape()[0];
        match Self::by_arithmetic(x, rows, expert) {
            Self::Warpgroups(_) => {
                [(expert[0], true), (expert[1], false)].map(|(matrices, gated)| {
                    Self::Warpgroups(RowProducts::new(x, rows, matrices, gated).columns())
                })
            }
            schedule => [schedule; 2],
        }
    }

    /// For a number of columns to a matrix.
    fn planes(columns: usize) -> Self {
        let tiles = columns.div_ceil(8).next_power_of_two();
        Self::Planes(tiles.clamp(2, LARGE_M_TILES))
    }

    /// Rows of `x` of a problem, at most.
    pub fn rows(self, dtype: DType) -> usize {
        match self {
            Self::Portable => CUBE_X_ROWS as usize,
            Self::Planes(tiles) => 8 * tiles / terms(dtype) as usize,
            Self::Stream(blueprint) => blueprint.pass_pairs() as usize,
            Self::Warpgroups(rows) => rows,
            Self::Fp8 => FP8_TILE as usize,
        }
    }

    /// How the blocks of 32 columns of a gated result lie where the product by `down` expects it:
    /// how many by turns, and neighbouring columns of each.
    pub fn hidden_turns(self, down: &Matrices) -> [usize; 2] {
        match (self, down.format) {
            (Self::Stream(_) | Self::Planes(_), WeightFormat::Fp4(_)) => [4, 8],
            (Self::Stream(_) | Self::Planes(_), format) if format.is_fp8() => [2, 16],
            (Self::Warpgroups(_) | Self::Fp8, WeightFormat::Fp4(_)) => [4, 2],
            _ => [1, 32],
        }
    }

    /// Columns of a gated result with the padding that the product by `down` expects.
    pub fn hidden_columns(self, down: &Matrices) -> usize {
        match self {
            Self::Portable => down.columns,
            Self::Stream(_) | Self::Planes(_) => down.padded_columns(),
            _ => wgmma::padded_columns(down.columns, down.format),
        }
    }
}

impl Product<'_> {
    pub(super) fn launch_planes(&self, x_tiles: usize, result: &CubeTensor) {
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
