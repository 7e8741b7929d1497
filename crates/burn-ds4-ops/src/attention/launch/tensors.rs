//! What kernels of attention read, on the side of the host.

use burn::backend::TensorMetadata;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::attention::kernel::{
    AngleTableLaunch, AttentionInputsLaunch, AttentionShapeLaunch, AttentionStridesLaunch,
    PositionsLaunch, SlotStridesLaunch,
};
use crate::launching::{with_contiguous_rows, with_vectors};

/// The positions at which sequences start, and the table of the angles of all positions.
pub(super) struct Positions {
    pub angles: CubeTensor,
    pub start: CubeTensor,
}

impl Positions {
    pub(super) fn new(angles: CubeTensor, start: CubeTensor) -> Self {
        Self {
            // A table that has grown may have gaps between its rows, and is too large to copy.
            angles: with_contiguous_rows(angles),
            start: into_contiguous(start),
        }
    }

    pub(super) fn arg<I: Int>(&self) -> PositionsLaunch<I> {
        let [known, rotated] = self.angles.shape().dims();
        let row = stride(&self.angles, 0);
        let angles = self.angles.clone().into_buffer_arg();
        PositionsLaunch::new(
            self.start.clone().into_buffer_arg(),
            AngleTableLaunch::new(angles, known as u32, row, rotated / 2),
        )
    }
}

/// The stride of an axis, in elements.
pub(super) fn stride(tensor: &CubeTensor, axis: usize) -> usize {
    tensor.meta.strides()[axis]
}

/// The strides of the first three axes, in vectors of `size`.
pub(super) fn slot_strides(tensor: &CubeTensor, size: usize) -> SlotStridesLaunch {
    let [sequence, block, slot] = [0, 1, 2].map(|axis| stride(tensor, axis) / size);
    SlotStridesLaunch::new(sequence, block, slot)
}

/// The inputs of the attention kernels.
pub(super) struct AttentionTensors {
    pub queries: CubeTensor,
    pub window: CubeTensor,
    pub rows: CubeTensor,
    pub picks: Option<CubeTensor>,
    pub sinks: CubeTensor,
    /// Rows of the window that a query attends to.
    pub span: usize,
    /// Compressed rows of a sequence, and the number of them that a query attends to or picks.
    pub available: usize,
    pub selected: usize,
    pub scale: f64,
    /// Elements of a vector.
    pub size: usize,
}

impl AttentionTensors {
    /// With rows that kernels can read in vectors of so many elements.
    pub(super) fn in_vectors(self, size: usize) -> Self {
        Self {
            queries: with_vectors(self.queries, size),
            window: with_vectors(self.window, size),
            rows: with_vectors(self.rows, size),
            size,
            ..self
        }
    }

    /// Rows of a sequence's window.
    pub(super) fn slots(&self) -> u32 {
        self.window.shape()[1] as u32
    }

    pub(super) fn arg<F: Float, I: Int, N: Size>(&self) -> AttentionInputsLaunch<F, I, N> {
        let [_, count, heads, width] = self.queries.shape().dims();
        let vectors = |tensor: &CubeTensor, axis: usize| stride(tensor, axis) / self.size;
        AttentionInputsLaunch::new(
            self.queries.clone().into_buffer_arg(),
            self.window.clone().into_buffer_arg(),
            self.rows.clone().into_buffer_arg(),
            self.picks.clone().map(CubeTensor::into_buffer_arg).into(),
            self.sinks.clone().into_buffer_arg(),
            AttentionShapeLaunch::new(
                count as u32,
                count as u32,
                heads as u32,
                (width / self.size) as u32,
                self.slots(),
                self.span as u32,
                self.available as u32,
                self.selected as u32,
            ),
            AttentionStridesLaunch::new(
                vectors(&self.queries, 0),
                vectors(&self.queries, 1),
                vectors(&self.queries, 2),
                vectors(&self.window, 0),
                vectors(&self.window, 1),
                vectors(&self.rows, 0),
                vectors(&self.rows, 1),
            ),
            self.scale as f32,
        )
    }
}
