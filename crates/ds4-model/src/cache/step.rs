use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{Bool, FloatDType, Int, Tensor};
use burn_ds4_ops::attention::{DECODE_TOKENS, MASKED};

use super::constants::Constants;
use super::{Cache, CacheLayout, Ring};
use crate::config::AttentionKind;
use crate::rope::{BlockRotation, RotaryTable, Rotation};

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// The additive mask that hides rows, in f32 whatever the device's default dtype.
pub(crate) fn mask<const D: usize>(hidden: Tensor<D, Bool>) -> Tensor<D> {
    hidden.float().cast(FloatDType::F32) * MASKED
}

/// Rows before a step's first position that its window reaches.
///
/// At least one, so that no tensor is empty. In a window of one position, that row is not visible.
pub(super) fn window_history(window: usize) -> usize {
    window.saturating_sub(1).max(1)
}

/// Raw projections before a step's first position that its first block pools.
pub(super) fn raw_history(ratio: usize, series: usize) -> usize {
    (series.saturating_mul(ratio) - 1).max(1)
}

/// The shortest history that any ring of the layout is read over.
pub(super) fn shortest_history(layout: &CacheLayout, capacity: usize) -> usize {
    layout
        .layers
        .iter()
        .filter_map(|kind| match kind {
            AttentionKind::Window => None,
            AttentionKind::CompressedSparse { ratio } => Some(raw_history(*ratio, 2)),
            AttentionKind::HeavilyCompressed { ratio } => Some(raw_history(*ratio, 1)),
        })
        .chain([window_history(layout.window_at(capacity))])
        .min()
        .unwrap_or(0)
}

/// A step that has begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenStep {
    /// Differs from that of every other step of the process.
    pub(super) id: u64,
    /// Number of new positions per sequence.
    pub(super) count: usize,
}

impl OpenStep {
    pub(crate) fn count(self) -> usize {
        self.count
    }

    pub(super) fn new(count: usize) -> Self {
        Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            count,
        }
    }
}

/// Indices and masks of one forward call, shared by all layers of its [`Cache`] on one device.
///
/// A decode step has at most [`DECODE_TOKENS`] positions of a sequence, a prefill step has more.
#[derive(Debug)]
pub struct Step {
    open: OpenStep,
    batch: usize,
    /// Rows of a window that are visible to a query, its own included.
    pub(crate) span: usize,
    /// Whether a query sees nothing of later positions.
    pub(crate) causal: bool,
    /// First new positions: `[batch]`.
    start: Tensor<1, Int>,
    /// Indices and masks of a prefill step. Kernels compute those of a decode step themselves.
    pub(crate) prefill: Option<PrefillStep>,
    rotation: Option<Rotation>,
    compressed_rotation: Option<Rotation>,
}

/// Indices and masks of a prefill step.
#[derive(Debug)]
pub(crate) struct PrefillStep {
    pub(crate) window: WindowStep,
    compressed: Vec<(AttentionKind, CompressedStep)>,
}

/// Where a step reads and writes window rows.
#[derive(Clone, Debug)]
pub(crate) struct WindowStep {
    pub(crate) ring: RingStep,
    /// Mask of the history's rows and the step's own: f32 `[batch, history + count]`.
    pub(crate) bias: Tensor<2>,
}

/// Where a step reads and writes a ring of the newest rows.
#[derive(Clone, Debug)]
pub(crate) struct RingStep {
    /// Number of rows read per sequence.
    pub(crate) history: usize,
    /// Their row indices: `[batch · history]`.
    pub(crate) read: Tensor<1, Int>,
    /// Number of the step's newest rows that fit the ring, per sequence.
    pub(crate) stored: usize,
    /// Their row indices: `[batch · stored]`.
    pub(crate) write: Tensor<1, Int>,
}

/// Mask and indices of compressed rows in a prefill step.
#[derive(Clone, Debug)]
pub(crate) struct CompressedStep {
    /// Mask of the compressed rows that some position of the step may see, but of one row at least:
    /// f32 `[batch, count, rows]`. The number of rows follows from the lengths alone, since sums
    /// over others may round differently.
    pub(crate) bias: Tensor<3>,
    pub(crate) indices: CompressedIndices,
}

impl CompressedStep {
    /// Rows that the step reads.
    pub(crate) fn rows(&self) -> usize {
        self.bias.dims()[2]
    }
}

/// Where a step reads raw projections and writes compressed rows.
#[derive(Clone, Debug)]
pub(crate) struct CompressedIndices {
    pub(crate) ring: RingStep,
    /// Blocks that may be completed by the step.
    pub(crate) blocks: usize,
    /// Raw rows of these blocks (and of the one before, where blocks overlap) among history and
    /// step: `[batch · rows]`.
    pub(crate) pooled: Tensor<1, Int>,
    /// In-block slot of each of the step's positions: `[batch · count]`.
    pub(crate) slots: Tensor<1, Int>,
    /// Mask that hides the previous block's slots from block 0, which has none: f32
    /// `[batch, blocks, 1, 1]`.
    pub(crate) previous_bias: Tensor<4>,
    /// Rotation of the blocks' rows, at their first positions.
    pub(crate) rotation: BlockRotation,
    /// Row indices of the blocks: `[batch · blocks]`.
    pub(crate) write: Tensor<1, Int>,
}

impl Step {
    pub(super) fn new(cache: &mut Cache, index: usize, open: OpenStep) -> Self {
        let (part, count) = (&cache.parts[index], open.count);
        let start = part.start();
        let rotation = |table: &Option<RotaryTable>| {
            let table = table.as_ref();
            table.map(|table| table.from(start.clone()))
        };
        Self {
            open,
            batch: cache.config.batch,
            span: cache.layout.window_at(cache.capacity),
            causal: true,
            rotation: rotation(&part.rotary),
            compressed_rotation: rotation(&part.compressed_rotary),
            prefill: (count > DECODE_TOKENS).then(|| PrefillStep::new(cache, index, &start, count)),
            start,
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.open.id
    }

    /// The same step, but all of its queries see all of its positions, and the window of the first
    /// of them. Only a decode step of layers with a window alone can be like that.
    pub(crate) fn not_causal(self) -> Self {
        Self {
            causal: false,
            ..self
        }
    }

    /// Number of new positions per sequence.
    pub fn count(&self) -> usize {
        self.open.count
    }

    /// Number of sequences.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// The rotation of a layer's queries and keys.
    ///
    /// # Panics
    ///
    /// If the step's cache has no layer of this kind.
    pub(crate) fn rotation(&self, kind: AttentionKind) -> &Rotation {
        let rotation = match kind {
            AttentionKind::Window => &self.rotation,
            _ => &self.compressed_rotation,
        };
        rotation
            .as_ref()
            .unwrap_or_else(|| panic!("the cache of this step has no layer of kind {kind:?}"))
    }

    /// Window rows that its queries attend to, and their mask. The ring already holds the step's
    /// own rows. Only a trace needs them.
    pub(crate) fn window_rows(&self, window: &Ring) -> (Tensor<3>, Tensor<2>) {
        let mut constants = Constants::new(self.batch, &self.start.device());
        let history = window_history(self.span);
        let (start, count) = (&self.start, self.count());
        let step = WindowStep::new(start, count, history, window.slots(), &mut constants);
        let rows = |indices: Tensor<1, Int>| {
            let rows = window.gather(indices);
            let [all, width] = rows.dims();
            rows.reshape([self.batch, all / self.batch, width])
        };
        let rows = Tensor::cat(vec![rows(step.ring.read), rows(step.ring.write)], 1);
        (rows, step.bias)
    }

    /// Mask of `rows` compressed rows of `ratio` positions each: f32 `[batch, count, rows]`. Only a
    /// trace needs it.
    pub(crate) fn mask_blocks(&self, ratio: usize, rows: usize) -> Tensor<3> {
        let mut constants = Constants::new(self.batch, &self.start.device());
        let positions = positions(&self.start, self.count(), &mut constants);
        compressed_bias(&positions, ratio, constants.range(rows))
    }
}

impl PrefillStep {
    fn new(cache: &mut Cache, part: usize, start: &Tensor<1, Int>, count: usize) -> Self {
        let end = cache.lengths.iter().max().copied().unwrap_or(0) + count;
        let part = &mut cache.parts[part];
        let constants = &mut part.constants;
        let layers = &cache.layers[part.layers.clone()];
        let positions = positions(start, count, constants);
        let mut compressed: Vec<(AttentionKind, CompressedStep)> = Vec::new();
        for layer in layers {
            let (Some(rows), Some(table)) = (&layer.compressed, &part.compressed_rotary) else {
                continue;
            };
            if compressed.iter().any(|(kind, _)| *kind == layer.kind) {
                continue;
            }
            let (ratio, series) = match layer.kind {
                AttentionKind::CompressedSparse { ratio } => (ratio, 2),
                AttentionKind::HeavilyCompressed { ratio } => (ratio, 1),
                AttentionKind::Window => continue,
            };
            let geometry = CompressedGeometry {
                ratio,
                series,
                slots: rows.raw.slots(),
                rows: rows.rows.slots(),
            };
            let rotation = |blocks| table.at(blocks);
            let columns = constants.range(geometry.rows);
            let columns = columns.narrow(0, 0, (end / ratio).max(1));
            let step = CompressedStep {
                bias: compressed_bias(&positions, ratio, columns),
                indices: CompressedIndices::new(&positions, start, geometry, rotation, constants),
            };
            compressed.push((layer.kind, step));
        }

        let history = window_history(cache.layout.window_at(cache.capacity));
        let slots = layers.first().map_or(history, |layer| layer.window.slots());
        Self {
            window: WindowStep::new(start, count, history, slots, constants),
            compressed,
        }
    }

    /// The compressed part of a layer's step, if layers of this kind have one.
    pub(crate) fn compressed(&self, kind: AttentionKind) -> Option<&CompressedStep> {
        let mut parts = self.compressed.iter();
        parts
            .find(|(known, _)| *known == kind)
            .map(|(_, step)| step)
    }
}

/// New positions of every sequence: `[batch, count]`.
fn positions(start: &Tensor<1, Int>, count: usize, constants: &mut Constants) -> Tensor<2, Int> {
    start.clone().unsqueeze_dim::<2>(1) + constants.range(count).unsqueeze()
}

impl WindowStep {
    fn new(
        start: &Tensor<1, Int>,
        count: usize,
        history: usize,
        slots: usize,
        constants: &mut Constants,
    ) -> Self {
        Self {
            ring: RingStep::new(start, count, history, slots, constants),
            bias: window_bias(start, count, history, constants),
        }
    }
}

impl RingStep {
    fn new(
        start: &Tensor<1, Int>,
        count: usize,
        history: usize,
        slots: usize,
        constants: &mut Constants,
    ) -> Self {
        let stored = count.min(slots);
        // Adding whole ring lengths makes positions before the first non-negative, and keeps their
        // slots.
        let shift = history.div_ceil(slots) * slots;
        let read = start.clone() + (shift as i64 - history as i64);
        let write = start.clone() + (count - stored) as i64;
        Self {
            history,
            read: slot_indices(read, history, slots, constants),
            stored,
            write: slot_indices(write, stored, slots, constants),
        }
    }

    /// The rows of the step (`[batch, count, width]`) that fit the ring: `[batch · stored, width]`.
    pub(crate) fn newest(&self, rows: Tensor<3>) -> Tensor<2> {
        let [batch, count, width] = rows.dims();
        let rows = if self.stored < count {
            rows.slice([0..batch, count - self.stored..count, 0..width])
        } else {
            rows
        };
        rows.reshape([batch * self.stored, width])
    }
}

/// Row indices of the slots of positions `from..from + count` of every sequence: `[batch · count]`.
fn slot_indices(
    from: Tensor<1, Int>,
    count: usize,
    slots: usize,
    constants: &mut Constants,
) -> Tensor<1, Int> {
    let positions = from.unsqueeze_dim::<2>(1) + constants.range(count).unsqueeze();
    constants.flatten(positions.remainder_scalar(slots as i64), slots)
}

struct CompressedGeometry {
    ratio: usize,
    series: usize,
    /// Slots of the ring of raw projections.
    slots: usize,
    rows: usize,
}

impl CompressedIndices {
    fn new(
        positions: &Tensor<2, Int>,
        start: &Tensor<1, Int>,
        geometry: CompressedGeometry,
        rotation: impl FnOnce(Tensor<2, Int>) -> BlockRotation,
        constants: &mut Constants,
    ) -> Self {
        let [batch, count] = positions.dims();
        let CompressedGeometry {
            ratio,
            series,
            slots,
            rows,
        } = geometry;
        let history = raw_history(ratio, series);
        let ring = RingStep::new(start, count, history, slots, constants);

        // From the block of the first new position on; at most this many blocks end inside the
        // step.
        let blocks = count.div_ceil(ratio);
        let first = (start.clone() / ratio as i64).unsqueeze_dim::<2>(1);
        let block = first.clone() + constants.range(blocks).unsqueeze();

        // Rows of history and step are side by side, the first new position at index `history`.
        let pooled_rows = (blocks + series - 1) * ratio;
        let in_block = start
            .clone()
            .remainder_scalar(ratio as i64)
            .unsqueeze_dim::<2>(1);
        let base = in_block.neg() + (history as i64 - ((series - 1) * ratio) as i64);
        let pooled = (base + constants.range(pooled_rows).unsqueeze())
            .clamp(0, (history + count - 1) as i64);

        Self {
            ring,
            blocks,
            pooled: constants.flatten(pooled, history + count),
            slots: positions
                .clone()
                .remainder_scalar(ratio as i64)
                .reshape([batch * count]),
            previous_bias: mask(block.clone().equal_elem(0)).reshape([batch, blocks, 1, 1]),
            rotation: rotation(block.clone() * ratio as i64),
            write: constants.flatten(block, rows),
        }
    }
}

/// Mask of compressed rows by their numbers: a row is visible from the last position of its block
/// on.
fn compressed_bias(positions: &Tensor<2, Int>, ratio: usize, numbers: Tensor<1, Int>) -> Tensor<3> {
    let [batch, count] = positions.dims();
    let [rows] = numbers.dims();
    let columns = numbers.reshape([1, 1, rows]);
    let visible = ((positions.clone() + 1) / ratio as i64).unsqueeze_dim::<3>(2);
    let hidden = columns
        .expand([batch, count, rows])
        .greater_equal(visible.expand([batch, count, rows]));
    mask(hidden)
}

/// Mask of history rows and own rows, which hides rows before position 0.
fn window_bias(
    start: &Tensor<1, Int>,
    count: usize,
    history: usize,
    constants: &mut Constants,
) -> Tensor<2> {
    let columns = constants.range(history + count).unsqueeze();
    let from_history = start.clone().unsqueeze_dim::<2>(1) + columns;
    mask(from_history.lower_elem(history as i64))
}
