//! The host side: which kernel, and how it is cut up.

mod few;
mod few_pair;
mod many;
mod mixture;
mod plain;

use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::kernel::{Format, MAX_SORTED, StackLaunch};
use crate::launching::{MAX_CUBES, has_counters, has_tensor_cores, is_float, plane_size};
use crate::matmul::INVARIANT_ROWS;
use crate::quant::{FP8_BLOCK, PackedWeights};

pub(crate) use super::kernel::{FewBlueprint, Pairing, Role};
pub(crate) use few::{Few, launch_sum};
pub(crate) use few_pair::FewPair;
pub(crate) use many::{Many, Sorted, many_tiles, sort, sum_slots};
pub(crate) use mixture::{Mixture, MixtureBlueprint};
pub(crate) use plain::{Grouping, Plain};

/// Rows of `x` up to which the weights are what counts, and none depends on the others.
pub(crate) const FEW_ROWS: usize = INVARIANT_ROWS;
/// Pairs that a cube groups for itself, at most.
pub(crate) const FEW_PAIRS: usize = 128;
/// Planes of a cube of the kernel for any device.
const PLAIN_PLANES: u32 = 4;
/// A stack of matrices on a device. Kernels read it once it is [`contiguous`](Self::contiguous).
pub(crate) struct Matrices {
    words: CubeTensor,
    scales: Option<CubeTensor>,
    /// How they are stored.
    pub format: Format,
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
            PackedWeights::Dense { values } => (values, None, Format::Dense, 1),
            PackedWeights::Fp8 {
                words,
                scales,
                parts,
                ..
            } => (words, Some(scales), Format::Fp8, parts),
            PackedWeights::Fp4 { words, scales, .. } => (words, Some(scales), Format::Fp4, 1),
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
    /// Without gaps between the rows; a copy if there are any.
    pub fn contiguous(self) -> Self {
        Self {
            words: into_contiguous(self.words),
            scales: self.scales.map(into_contiguous),
            ..self
        }
    }

    /// Whether the tensor cores' kernels can read it, 16 bytes of a row at a time.
    fn has_tiles(&self) -> bool {
        let dtype = self.format != Format::Dense || self.words.dtype == DType::BF16;
        dtype && self.columns.is_multiple_of(self.format.columns() as usize)
    }

    /// Scales of a row (FP4) or of a row of blocks (FP8).
    fn line_scales(&self) -> usize {
        match self.format {
            Format::Fp4 => self.columns.div_ceil(32),
            Format::Fp8 => self.columns.div_ceil(128),
            Format::Dense => 0,
        }
    }

    /// From one matrix's scales to the next's, in bytes (FP4) or words.
    fn matrix_scales(&self) -> usize {
        let lines = match self.format {
            Format::Fp4 => return (self.rows * self.line_scales()).next_multiple_of(4),
            Format::Fp8 => self.parts * (self.rows / self.parts).div_ceil(128),
            Format::Dense => 0,
        };
        lines * self.line_scales()
    }

    fn stack(&self) -> StackLaunch {
        let part_rows = self.rows / self.parts;
        let anew = self.parts > 1 && !part_rows.is_multiple_of(FP8_BLOCK);
        let part_rows = if anew { part_rows } else { 0 };
        StackLaunch::new(
            self.rows as u32,
            self.columns as u32,
            self.line_scales() as u32,
            self.matrix_scales(),
            part_rows as u32,
        )
    }

    /// Columns of a row of what these are multiplied by, where it is in the order in which kernels read it.
    pub fn padded_columns(&self) -> usize {
        self.columns.next_multiple_of(self.format.chunk() as usize)
    }

    /// Words of scales that a kernel reads at once: those of a stretch, where no row begins in between.
    fn scale_vector(&self) -> usize {
        let stretch = self.format.stretch() as usize;
        let fits = self.format == Format::Fp4 && self.columns.is_multiple_of(stretch);
        if fits { 4 } else { 1 }
    }

    fn words_arg(&self) -> BufferArg {
        self.words.clone().into_buffer_arg()
    }

    /// Something to read where there are no scales.
    fn scales_arg(&self) -> BufferArg {
        let scales = self.scales.as_ref().unwrap_or(&self.words);
        scales.clone().into_buffer_arg()
    }

    fn element(&self) -> DType {
        match self.format {
            Format::Dense => self.words.dtype,
            _ => DType::U32,
        }
    }
}

/// Numbers in `bf16` that an element is made of.
pub(crate) fn parts(dtype: DType) -> u32 {
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
            && (matrices.format != Format::Dense || is_float(matrices.words.dtype))
    };
    is_float(x.dtype)
        && plane_size(&x.client).is_some()
        && has_counters(&x.client)
        && matrices.into_iter().all(fits)
}

/// An argument that a kernel can do without.
fn optional<T: From<Option<BufferArg>>>(tensor: Option<&CubeTensor>) -> T {
    tensor.map(|tensor| tensor.clone().into_buffer_arg()).into()
}
