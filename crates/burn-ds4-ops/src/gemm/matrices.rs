use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::kernel::{MatrixStackLaunch, StackLayoutLaunch, WeightFormat};

/// A stack of matrices on a device. Kernels can read it once it is
/// [`contiguous`](Self::contiguous).
pub(crate) struct Matrices {
    pub words: CubeTensor,
    /// None of floats.
    pub scales: Option<CubeTensor>,
    /// How they are stored.
    pub format: WeightFormat,
    /// Number of matrices.
    pub count: usize,
    /// Rows of one.
    pub rows: usize,
    /// Columns of one.
    pub columns: usize,
    /// Parts of the rows, at whose starts a new block of FP8 begins.
    pub parts: usize,
}

impl Matrices {
    /// Rows and columns of a block of FP8.
    fn block(&self) -> usize {
        self.format.fp8_block() as usize
    }

    /// A stack without gaps between its rows; a copy if there are any.
    pub fn contiguous(self) -> Self {
        Self {
            words: into_contiguous(self.words),
            scales: self.scales.map(into_contiguous),
            ..self
        }
    }

    /// Whether kernels for tensor cores can read it, 16 bytes of a row at a time.
    pub fn has_tiles(&self) -> bool {
        let dtype = self.format != WeightFormat::Dense || self.words.dtype == DType::BF16;
        dtype && self.columns.is_multiple_of(self.format.columns() as usize)
    }

    /// Scales of a row (FP4) or of a row of blocks (FP8).
    fn scales_per_row(&self) -> usize {
        match self.format {
            WeightFormat::Fp4(_) => self.columns.div_ceil(32),
            WeightFormat::Fp8 | WeightFormat::Fp8Blocks32 => self.columns.div_ceil(self.block()),
            WeightFormat::Dense => 0,
        }
    }

    /// Distance between the scales of neighbouring matrices, in bytes (FP4) or words.
    fn scales_per_matrix(&self) -> usize {
        let scale_rows = match self.format {
            WeightFormat::Fp4(_) => return (self.rows * self.scales_per_row()).next_multiple_of(4),
            WeightFormat::Fp8 | WeightFormat::Fp8Blocks32 => {
                self.parts * (self.rows / self.parts).div_ceil(self.block())
            }
            WeightFormat::Dense => 0,
        };
        scale_rows * self.scales_per_row()
    }

    /// Columns of a row of the other operand with padding, where that is in the order in which
    /// kernels read it.
    pub fn padded_columns(&self) -> usize {
        self.columns.next_multiple_of(self.format.k_step() as usize)
    }

    /// Whether a kernel can read all scales of a K-block at once: no row begins within it.
    pub fn has_scale_vectors(&self) -> bool {
        let k_block = self.format.k_block() as usize;
        self.format.is_fp4() && self.columns.is_multiple_of(k_block)
    }

    /// Whether blocks of FP8 begin in its parts where they would not in the whole.
    pub fn has_blocks_of_parts(&self) -> bool {
        self.parts > 1 && !(self.rows / self.parts).is_multiple_of(self.block())
    }

    /// Its elements as a kernel for any device reads them.
    pub fn element(&self) -> DType {
        match self.format {
            WeightFormat::Dense => self.words.dtype,
            _ => DType::U32,
        }
    }

    /// The stack as a kernel argument, in elements of `W`.
    pub fn arg<W: CubePrimitive>(&self) -> MatrixStackLaunch<W> {
        let part_rows = self.rows / self.parts;
        let layout = StackLayoutLaunch::new(
            self.count as u32,
            self.rows as u32,
            self.columns as u32,
            self.scales_per_row() as u32,
            self.scales_per_matrix(),
            part_rows as u32,
            part_rows.div_ceil(self.block()) as u32,
        );
        // Something else to bind where there are no scales.
        let scales = self.scales.as_ref().unwrap_or(&self.words);
        MatrixStackLaunch::new(
            self.words.clone().into_buffer_arg(),
            scales.clone().into_buffer_arg(),
            layout,
        )
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
