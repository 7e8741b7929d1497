//! What kernels of attention read, on the side of the host.

use super::pages::Pages;
use crate::attention::args::{CachedBlocks, CompressedRows, PagedRows, Queries, SinkInputs};
use crate::attention::kernel::{
    AngleTableLaunch, AttentionInputsLaunch, AttentionShapeLaunch, AttentionStridesLaunch,
    CacheLayoutLaunch, CachedInputsLaunch, MasksLaunch, PositionsLaunch, SlotStridesLaunch,
};
use crate::attention::options::WindowLayout;
use crate::launching::prelude::*;

/// The positions at which sequences start, and the table of the angles of all positions.
pub(in crate::attention) struct Positions {
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
        let [known, rotated] = self.angles.dims();
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

/// Whether kernels can index what queries attend to.
pub(super) fn fits_cached(
    queries: &Queries<CubeBackend>,
    window: &CubeTensor,
    blocks: &CachedBlocks<CubeBackend>,
) -> bool {
    let count = queries.x.shape()[1];
    let [known, rotated] = queries.angles.dims();
    let (rows, picks, ratio) = blocks.parts();
    let [available, selected] = blocks.counts();
    let slots = window.shape()[1];
    rotated > 0
        && queries.epsilon.is_some()
        && rows.is_none_or(PagedRows::fits)
        && fits_i32(Some(available.max(selected).max(ratio)))
        && fits_i32(slots.checked_mul(2))
        && fits_i32(known.checked_add(count))
        && fits_i32(queries.columns().checked_add(selected))
        && is_wide_int(queries.start.dtype)
        && picks.is_none_or(|picks| is_wide_int(picks.dtype))
}

/// The inputs of the kernels that attend over a cache, with rows in vectors of `size` elements.
pub(super) struct CachedTensors {
    pub queries: CubeTensor,
    pub window: CubeTensor,
    pub rows: CubeTensor,
    picks: Option<CubeTensor>,
    pages: Option<Pages>,
    pub sinks: CubeTensor,
    pub positions: Positions,
    /// Biases of the window and of compressed rows, in place of positions.
    masks: Option<[CubeTensor; 2]>,
    rotated: usize,
    /// Rows of the window that a query attends to.
    pub span: usize,
    /// Compressed rows of a sequence, and the number of them that a query attends to or picks.
    available: usize,
    pub selected: usize,
    ratio: u32,
    latest: bool,
    epsilon: f32,
    scale: f32,
    pub size: usize,
}

impl CachedTensors {
    pub(super) fn new(
        queries: Queries<CubeBackend>,
        window: CubeTensor,
        blocks: &CachedBlocks<CubeBackend>,
        size: usize,
    ) -> Self {
        let (rows, picks, ratio) = blocks.parts();
        let [available, selected] = blocks.counts();
        Self {
            span: queries.columns(),
            available,
            selected,
            // Without compressed rows, kernels read none of these.
            pages: rows.and_then(|rows| Pages::new(&rows.pages, &rows.rows)),
            rows: with_vectors(
                rows.map_or(window.clone(), |rows| rows.clone().laid_out()),
                size,
            ),
            picks: picks.cloned().map(into_contiguous),
            queries: with_vectors(queries.x, size),
            window: with_vectors(window, size),
            sinks: into_contiguous(queries.sinks),
            rotated: queries.angles.shape()[1],
            positions: Positions::new(queries.angles, queries.start),
            masks: None,
            ratio: ratio as u32,
            latest: queries.layout == WindowLayout::Latest,
            epsilon: queries.epsilon.expect("checked by fits_cached") as f32,
            scale: queries.scale as f32,
            size,
        }
    }

    /// What masks make visible.
    pub(super) fn of_masks(inputs: SinkInputs<CubeBackend>, size: usize) -> Self {
        let window_bias = into_contiguous(inputs.window_bias);
        let (compressed, picks) = match inputs.compressed {
            CompressedRows::None => (None, None),
            CompressedRows::Shared { rows, bias } => (Some((rows, bias)), None),
            CompressedRows::Picked { rows, bias, picks } => (Some((rows, bias)), Some(picks)),
        };
        let available = compressed.as_ref().map_or(0, |(rows, _)| rows.shape()[1]);
        // Without compressed rows, kernels read none of these; nor do they read positions.
        let unread = || (inputs.window.clone(), window_bias.clone());
        let (rows, rows_bias) = compressed.unwrap_or_else(unread);
        Self {
            span: inputs.span,
            available,
            selected: picks.as_ref().map_or(available, |picks| picks.shape()[2]),
            rows: with_vectors(rows, size),
            picks: picks.map(into_contiguous),
            pages: None,
            queries: with_vectors(inputs.queries, size),
            window: with_vectors(inputs.window, size),
            sinks: into_contiguous(inputs.sinks),
            positions: Positions {
                angles: window_bias.clone(),
                start: window_bias.clone(),
            },
            masks: Some([window_bias, into_contiguous(rows_bias)]),
            rotated: 0,
            ratio: 1,
            latest: false,
            epsilon: 0.0,
            scale: inputs.scale as f32,
            size,
        }
    }

    /// Vectors of a row, and those in front that are not rotated.
    pub(super) fn vectors(&self) -> [u32; 2] {
        let width = self.queries.shape()[3];
        [width, width - self.rotated].map(|channels| (channels / self.size) as u32)
    }

    /// The dtypes of queries, of picks and of starts.
    pub(super) fn dtypes(&self) -> [ElemType; 3] {
        let picks = self.picks.as_ref().map_or(DType::I32, |picks| picks.dtype);
        let start = match self.masks {
            None => self.positions.start.dtype,
            Some(_) => DType::I32,
        };
        [self.queries.dtype, picks, start].map(dtype_to_storage_type)
    }

    pub(super) fn masked(&self) -> bool {
        self.masks.is_some()
    }

    pub(super) fn arg<F: Float, I: Int, P: Int, N: Size>(&self) -> CachedInputsLaunch<F, I, P, N> {
        let [_, count, heads, _] = self.queries.dims();
        let slots = self.window.shape()[1] as u32;
        let vectors = |tensor: &CubeTensor, axis: usize| stride(tensor, axis) / self.size;
        let attention = AttentionInputsLaunch::new(
            self.queries.clone().into_buffer_arg(),
            self.window.clone().into_buffer_arg(),
            self.rows.clone().into_buffer_arg(),
            self.picks.clone().map(CubeTensor::into_buffer_arg).into(),
            self.pages.as_ref().map(Pages::arg).into(),
            self.sinks.clone().into_buffer_arg(),
            AttentionShapeLaunch::new(
                count as u32,
                count as u32,
                heads as u32,
                self.vectors()[0],
                slots,
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
            self.scale,
        );
        CachedInputsLaunch::new(
            attention,
            self.positions.arg(),
            CacheLayoutLaunch::new(self.ratio, slots, u32::from(self.latest)),
            self.epsilon,
            self.masks.clone().map(masks_arg).into(),
        )
    }
}

fn masks_arg([window, rows]: [CubeTensor; 2]) -> MasksLaunch {
    MasksLaunch::new(window.into_buffer_arg(), rows.into_buffer_arg())
}
