//! The state of sequences between calls.

use burn::tensor::{Bool, DType, Device, FloatDType, IndexingUpdateOp, Int, Tensor};
use burn_ds4_ops::gated_delta::{
    GatedDeltaInputs, GatedDeltaOptions, StateSlots, StateUpdate, gated_delta_rule,
};

use super::GatedDeltaNetConfig;
use super::convolution::next_history;

/// The states of a [`GatedDeltaNet`](super::GatedDeltaNet), by slot.
///
/// Functions take it by value and return it: a state with no other owner may be updated in place.
#[derive(Clone, Debug)]
pub struct GatedDeltaNetState {
    /// The last projections of queries, keys and values, before the convolution:
    /// `[slots + 1, convolved, kernel - 1]`.
    ///
    /// The extra slot is the one that padding writes to, which costs less than not writing.
    pub convolution: Tensor<3>,
    /// `[slots, value heads, channels, width]`.
    pub recurrent: Tensor<4>,
}

/// Tokens that [`GatedDeltaNet::verify`](super::GatedDeltaNet::verify) has processed, before it is
/// known how many are accepted.
#[derive(Clone, Debug)]
pub struct Draft {
    /// f32 `[batch, kernel - 1 + tokens, convolved]`.
    pub(super) window: Tensor<3>,
    pub(super) inputs: GatedDeltaInputs,
    pub(super) slots: BatchSlots,
}

/// Which sequences are padding, for each of their rows.
pub(super) type SkippedRows = Tensor<3, Bool>;

/// Slots of the sequences of a batch.
#[derive(Clone, Debug)]
pub(super) struct BatchSlots {
    slots: Tensor<1, Int>,
    /// The same in the state of the convolution, which has a slot for padding.
    padded: Tensor<1, Int>,
    skipped: Tensor<1, Bool>,
}

impl BatchSlots {
    pub(super) fn new(slots: Tensor<1, Int>, count: usize) -> Self {
        let inside = slots.clone().clamp(0, count as i64 - 1);
        let skipped = inside.clone().not_equal(slots.clone());
        Self {
            padded: inside.mask_fill(skipped.clone(), count as i64),
            slots,
            skipped,
        }
    }

    /// `[batch, 1, 1]`.
    pub(super) fn skipped_rows(&self) -> SkippedRows {
        let [batch] = self.skipped.dims();
        self.skipped.clone().reshape([batch, 1, 1])
    }
}

impl GatedDeltaNetState {
    /// Slots whose sequences have not begun.
    ///
    /// `dtype` is that of the convolution's state, which loses nothing in the dtype of the inputs.
    /// With `recurrent` in f32, several tokens at once give what they give one by one.
    pub fn zeros(
        config: &GatedDeltaNetConfig,
        slots: usize,
        dtype: FloatDType,
        recurrent: FloatDType,
        device: &Device,
    ) -> Self {
        let convolution = [slots + 1, config.convolved(), config.kernel - 1];
        let pool = [slots, config.value_heads, config.channels, config.width];
        Self {
            convolution: Tensor::zeros(convolution, (device, DType::from(dtype))),
            recurrent: Tensor::zeros(pool, (device, DType::from(recurrent))),
        }
    }

    /// The same state, with `slot` reset to the start of a sequence.
    pub fn reset(self, slot: usize) -> Self {
        let own = slot..slot + 1;
        Self {
            convolution: self.convolution.slice_fill(own.clone(), 0.0),
            recurrent: self.recurrent.slice_fill(own, 0.0),
        }
    }

    /// The states after the first tokens of a draft, `accepted` of each sequence: `[batch]`, 0 to
    /// the number of tokens.
    ///
    /// `self` is the state that the draft was made with.
    ///
    /// # Panics
    ///
    /// If `accepted` does not fit, and where
    /// [`gated_delta_rule`](burn_ds4_ops::gated_delta::gated_delta_rule) refuses a slot or a number
    /// of tokens.
    pub fn accept(self, draft: Draft, accepted: Tensor<1, Int>) -> Self {
        self.advance(draft, StateUpdate::Accepted(accepted)).1
    }

    pub(super) fn slots(&self) -> usize {
        self.recurrent.dims()[0]
    }

    /// `[batch, convolved, kernel - 1]`.
    pub(super) fn history(&self, slots: &BatchSlots) -> Tensor<3> {
        self.convolution.clone().select(0, slots.padded.clone())
    }

    /// The outputs of the recurrence, and the states that `update` keeps.
    pub(super) fn advance(self, draft: Draft, update: StateUpdate) -> (Tensor<4>, Self) {
        let Draft {
            window,
            inputs,
            slots,
        } = draft;
        let [_, tokens, _, _] = inputs.q.dims();
        let options = GatedDeltaOptions::new().with_update(update.clone());
        let in_place = StateSlots::in_place(slots.slots);
        let result = gated_delta_rule(inputs, self.recurrent, in_place, &options)
            .unwrap_or_else(|error| panic!("a step that does not fit: {error}"));
        let accepted = match update {
            StateUpdate::Last => None,
            StateUpdate::Accepted(accepted) => Some(accepted),
            StateUpdate::Intermediate | StateUpdate::Discard => {
                let recurrent = result.pool;
                return (result.out, Self { recurrent, ..self });
            }
        };
        let rows = next_history(window, tokens, accepted).cast(self.convolution.dtype());
        let convolution =
            self.convolution
                .select_assign(0, slots.padded, rows, IndexingUpdateOp::Assign);
        let recurrent = result.pool;
        (
            result.out,
            Self {
                convolution,
                recurrent,
            },
        )
    }
}
