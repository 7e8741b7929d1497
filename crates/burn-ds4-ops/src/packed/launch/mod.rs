//! The host side: which kernel, and how the work is divided.

mod large_m;
mod mixture;
mod plain;
mod small_m;
mod small_m_pair;

use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::kernel::{MAX_SORTED, StackLaunch, WeightFormat};
use crate::launching::{MAX_CUBES, has_counters, has_tensor_cores, is_float, plane_size};
use crate::matmul::INVARIANT_ROWS;
use crate::quant::{FP8_BLOCK, PackedWeights};

pub(crate) use super::kernel::{Pairing, Role, SmallMBlueprint};
pub(crate) use large_m::{LargeM, SortedPairs, large_m_tiles, sort, sum_slots};
pub(crate) use mixture::{Mixture, MixtureBlueprint};
pub(crate) use plain::{Grouping, Plain};
pub(crate) use small_m::{SmallM, launch_sum};
pub(crate) use small_m_pair::SmallMPair;

/// Rows of `x` up to which reading the weights is the limit, and a row's result does not depend on
/// the others.
pub(crate) const SMALL_M_ROWS: usize = INVARIANT_ROWS;
/// Pairs that a cube groups for itself, at most.
pub(crate) const SMALL_M_PAIRS: usize = 128;
/// Planes of a cube of the kernel for any device.
const PLAIN_PLANES: u32 = 4;
/// A stack of matrices on a device. Kernels can read it once it is
/// [`contiguous`](Self::contiguous).
pub(crate) struct Matrices {
    words: CubeTensor,
    scales: Option<CubeTensor>,
    /// How they are stored.
    pub format: WeightFormat,
    /// Number of matrices.
    pub count: usize,
    /// Rows of one.
    pub rows: usize,
    /// Columns of one.
    pub columns: usize,
    parts: usize,
}

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

impl Matrices {
    /// A stack without gaps between its rows; a copy if there are any.
    pub fn contiguous(self) -> Self {
        Self {
            words: into_contiguous(self.words),
            scales: self.scales.map(into_contiguous),
            ..self
        }
    }

    /// Whether kernels for tensor cores can read it, 16 bytes of a row at a time.
    fn has_tiles(&self) -> bool {
        let dtype = self.format != WeightFormat::Dense || self.words.dtype == DType::BF16;
        dtype && self.columns.is_multiple_of(self.format.columns() as usize)
    }

    /// Scales of a row (FP4) or of a row of blocks (FP8).
    fn scales_per_row(&self) -> usize {
        match self.format {
            WeightFormat::Fp4 => self.columns.div_ceil(32),
            WeightFormat::Fp8 => self.columns.div_ceil(128),
            WeightFormat::Dense => 0,
        }
    }

    /// Distance between the scales of neighbouring matrices, in bytes (FP4) or words.
    fn scales_per_matrix(&self) -> usize {
        let scale_rows = match self.format {
            WeightFormat::Fp4 => return (self.rows * self.scales_per_row()).next_multiple_of(4),
            WeightFormat::Fp8 => self.parts * (self.rows / self.parts).div_ceil(128),
            WeightFormat::Dense => 0,
        };
        scale_rows * self.scales_per_row()
    }

    fn stack(&self) -> StackLaunch {
        let part_rows = self.rows / self.parts;
        let new_blocks = self.parts > 1 && !part_rows.is_multiple_of(FP8_BLOCK);
        let part_rows = if new_blocks { part_rows } else { 0 };
        StackLaunch::new(
            self.rows as u32,
            self.columns as u32,
            self.scales_per_row() as u32,
            self.scales_per_matrix(),
            part_rows as u32,
        )
    }

    /// Columns of a row of the other operand with padding, where that is in the order in which
    /// kernels read it.
    pub fn padded_columns(&self) -> usize {
        self.columns.next_multiple_of(self.format.k_step() as usize)
    }

    /// Words of scales that a kernel reads at once: those of a K-block, if no row begins within it.
    fn scale_vector(&self) -> usize {
        let k_block = self.format.k_block() as usize;
        let fits = self.format == WeightFormat::Fp4 && self.columns.is_multiple_of(k_block);
        if fits { 4 } else { 1 }
    }

    fn words_arg(&self) -> BufferArg {
        self.words.clone().into_buffer_arg()
    }

    /// The scales, or something else to bind where there are none.
    fn scales_arg(&self) -> BufferArg {
        let scales = self.scales.as_ref().unwrap_or(&self.words);
        scales.clone().into_buffer_arg()
    }

    fn element(&self) -> DType {
        match self.format {
            WeightFormat::Dense => self.words.dtype,
            _ => DType::U32,
        }
    }
}

/// Terms in `bf16` of an element.
pub(crate) fn terms(dtype: DType) -> u32 {
    match dtype {
        DType::BF16 => 1,
        DType::F16 => 2,
        _ => 4,
    }
}

pub(crate) fn has_tiles<const N: usize>(x: &CubeTensor, matrices: [&Matrices; N]) -> bool {
    has_tensor_cores(&x.client) && matrices.iter().all(|matrices| matrices.has_tiles())
}

/// Whether there is a kernel for a product with these matrices.
pub(crate) fn can_multiply<const N: usize>(x: &CubeTensor, matrices: [&Matrices; N]) -> bool {
    let fits = |matrices: &Matrices| {
        matrices.rows.div_ceil(PLAIN_PLANES as usize) <= MAX_CUBES
            && matrices.count <= MAX_SORTED
            && (matrices.format != WeightFormat::Dense || is_float(matrices.words.dtype))
    };
    is_float(x.dtype)
        && plane_size(&x.client).is_some()
        && has_counters(&x.client)
        && matrices.into_iter().all(fits)
}

/// An optional argument of a kernel.
fn optional<T: From<Option<BufferArg>>>(tensor: Option<&CubeTensor>) -> T {
    tensor.map(|tensor| tensor.clone().into_buffer_arg()).into()
}
