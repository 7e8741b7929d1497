//! What the layers of a device need for new positions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use burn::tensor::{Bool, FloatDType, Int, Tensor};
use burn_ds4_ops::attention::{DECODE_TOKENS, MASKED};

use super::handed::StepState;
use super::layer::LayerCache;
use super::layout::window_history;
use super::part::Part;
use super::ring::Ring;
use crate::config::AttentionKind;
use crate::rope::{RotaryTable, Rotation};

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// The additive mask that hides rows, in f32 whatever the device's default dtype.
pub(crate) fn mask<const D: usize>(hidden: Tensor<D, Bool>) -> Tensor<D> {
    hidden.float().cast(FloatDType::F32) * MASKED
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

/// Sizes of a step.
#[derive(Clone, Copy)]
pub(super) struct StepShape {
    /// Number of sequences.
    pub(super) batch: usize,
    /// Rows of a window that are visible to a query, its own included.
    pub(super) span: usize,
    /// Length of the longest sequence, the new positions included.
    pub(super) end: usize,
}

/// Indices and masks of one forward call, shared by all layers of its [cache](super::Cache) on one
/// device.
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
    /// Whether each new position is of a vacant sequence: `[batch · count]`. `None` where none has
    /// been vacant.
    vacant: Option<Tensor<1, Bool>>,
    /// Indices and masks of a prefill step. Kernels compute those of a decode step themselves, and
    /// masks of any.
    pub(crate) prefill: Option<PrefillStep>,
    rotation: Option<Rotation>,
    compressed_rotation: Option<Rotation>,
    /// The pages of the sequences, where compressed rows are in some: `[batch, reach]`.
    pages: Option<Tensor<2, Int>>,
    handed: Mutex<StepState>,
}

/// Indices and masks of a prefill step.
#[derive(Debug)]
pub(crate) struct PrefillStep {
    pub(crate) window: WindowStep,
    /// One for each ratio.
    compressed: Vec<CompressedStep>,
}

/// Where a step reads and writes window rows.
#[derive(Clone, Debug)]
pub(crate) struct WindowStep {
    pub(crate) ring: RingStep,
    bias: OnceLock<Tensor<2>>,
}

impl WindowStep {
    /// Mask of the history's rows and the step's own: f32 `[batch, history + count]`.
    pub(crate) fn bias(&self, step: &Step) -> Tensor<2> {
        let bias = || window_bias(&step.start, step.count(), self.ring.history);
        self.bias.get_or_init(bias).clone()
    }
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

/// The compressed rows of a prefill step.
#[derive(Clone, Debug)]
pub(crate) struct CompressedStep {
    ratio: usize,
    /// Rows that the step reads: those that some position of it may see, but one at least. Their
    /// number follows from the lengths alone, since sums over others may round differently.
    pub(crate) rows: usize,
    bias: OnceLock<Tensor<3>>,
}

impl CompressedStep {
    /// Mask of the rows: f32 `[batch, count, rows]`.
    pub(crate) fn bias(&self, step: &Step) -> Tensor<3> {
        let bias = || step.mask_blocks(self.ratio, self.rows);
        self.bias.get_or_init(bias).clone()
    }
}

impl Step {
    /// What the layers of a part need.
    pub(super) fn new(
        open: OpenStep,
        shape: StepShape,
        part: &Part,
        layers: &[LayerCache],
    ) -> Self {
        let (start, is_prefill) = (part.start(), open.count > DECODE_TOKENS);
        let rotation = |table: &Option<RotaryTable>| {
            let table = table.as_ref();
            table.map(|table| table.from(start.clone()))
        };
        Self {
            open,
            batch: shape.batch,
            span: shape.span,
            causal: true,
            rotation: rotation(&part.rotary),
            compressed_rotation: rotation(&part.compressed_rotary),
            prefill: is_prefill.then(|| PrefillStep::new(open.count, shape, &start, layers)),
            start,
            vacant: part.vacant(open.count),
            pages: part.pages.clone(),
            handed: Mutex::default(),
        }
    }

    /// What earlier layers have handed on.
    pub(crate) fn handed(&self) -> MutexGuard<'_, StepState> {
        self.handed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The position of each query: `[batch, count]`.
    pub(crate) fn positions(&self) -> Tensor<2, Int> {
        let start = self.start.clone().unsqueeze_dim::<2>(1);
        if self.count() == 1 {
            return start;
        }
        let range = || Tensor::<1, Int>::arange(0..self.count() as i64, &self.start.device());
        let range = match self.prefill {
            Some(_) => range(),
            // An upload cannot be recorded.
            None => Tensor::ones([self.count()], &self.start.device()).cumsum(0) - 1,
        };
        start + range.unsqueeze()
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

    /// Which of the new positions, `[batch · count]`, are of vacant sequences and need no experts.
    /// `None` where no sequence has been vacant.
    pub(crate) fn vacant(&self) -> Option<Tensor<1, Bool>> {
        self.vacant.clone()
    }

    /// The pages of the sequences, where compressed rows are in some.
    pub(crate) fn pages(&self) -> Option<&Tensor<2, Int>> {
        self.pages.as_ref()
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
        let history = window_history(self.span);
        let step = WindowStep::new(&self.start, self.count(), history, window.slots());
        let bias = step.bias(self);
        let rows = |indices: Tensor<1, Int>| {
            let rows = window.gather(indices);
            let [all, width] = rows.dims();
            rows.reshape([self.batch, all / self.batch, width])
        };
        let rows = Tensor::cat(vec![rows(step.ring.read), rows(step.ring.write)], 1);
        (rows, bias)
    }

    /// Mask of `rows` compressed rows of `ratio` positions each, by their numbers: f32
    /// `[batch, count, rows]`. A row is visible from the last position of its block on.
    pub(crate) fn mask_blocks(&self, ratio: usize, rows: usize) -> Tensor<3> {
        let (batch, count, device) = (self.batch, self.count(), self.start.device());
        let range = |count: usize| Tensor::<1, Int>::arange(0..count as i64, &device);
        let visible = ((self.positions() + 1) / ratio as i64).unsqueeze_dim::<3>(2);
        let shape = [batch, count, rows];
        let numbers = range(rows).reshape([1, 1, rows]).expand(shape);
        mask(numbers.greater_equal(visible.expand(shape)))
    }
}

impl PrefillStep {
    fn new(count: usize, shape: StepShape, start: &Tensor<1, Int>, layers: &[LayerCache]) -> Self {
        let mut compressed: Vec<CompressedStep> = Vec::new();
        for ratio in layers.iter().filter_map(|layer| layer.kind.ratio()) {
            if compressed.iter().all(|known| known.ratio != ratio) {
                compressed.push(CompressedStep {
                    ratio,
                    rows: (shape.end / ratio).max(1),
                    bias: OnceLock::new(),
                });
            }
        }

        let history = window_history(shape.span);
        let slots = layers.first().map_or(history, |layer| layer.window.slots());
        Self {
            window: WindowStep::new(start, count, history, slots),
            compressed,
        }
    }

    /// The compressed part of a layer's step, if layers of this kind have one.
    pub(crate) fn compressed(&self, kind: AttentionKind) -> Option<&CompressedStep> {
        let mut parts = self.compressed.iter();
        parts.find(|step| Some(step.ratio) == kind.ratio())
    }
}

impl WindowStep {
    fn new(start: &Tensor<1, Int>, count: usize, history: usize, slots: usize) -> Self {
        Self {
            ring: RingStep::new(start, count, history, slots),
            bias: OnceLock::new(),
        }
    }
}

impl RingStep {
    fn new(start: &Tensor<1, Int>, count: usize, history: usize, slots: usize) -> Self {
        let stored = count.min(slots);
        // Adding whole ring lengths makes positions before the first non-negative, and keeps their
        // slots.
        let shift = history.div_ceil(slots) * slots;
        let read = start.clone() + (shift as i64 - history as i64);
        let write = start.clone() + (count - stored) as i64;
        Self {
            history,
            read: slot_indices(read, history, slots),
            stored,
            write: slot_indices(write, stored, slots),
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

/// Row indices of the slots of positions `from..from + count` of every sequence, among those of all
/// sequences: `[batch · count]`.
fn slot_indices(from: Tensor<1, Int>, count: usize, slots: usize) -> Tensor<1, Int> {
    let ([batch], device) = (from.dims(), from.device());
    let range = |count: usize| Tensor::<1, Int>::arange(0..count as i64, &device);
    let positions = from.unsqueeze_dim::<2>(1) + range(count).unsqueeze();
    let mut indices = positions.remainder_scalar(slots as i64);
    if batch > 1 {
        indices = indices + range(batch).unsqueeze_dim::<2>(1) * slots as i64;
    }
    indices.reshape([batch * count])
}

/// Mask of history rows and own rows, which hides rows before position 0.
fn window_bias(start: &Tensor<1, Int>, count: usize, history: usize) -> Tensor<2> {
    let rows = 0..(history + count) as i64;
    let columns = Tensor::<1, Int>::arange(rows, &start.device()).unsqueeze();
    let from_history = start.clone().unsqueeze_dim::<2>(1) + columns;
    mask(from_history.lower_elem(history as i64))
}
