use burn::tensor::{Int, Tensor};

/// Softplus is the identity beyond this.
const SOFTPLUS_THRESHOLD: f64 = 20.0;

/// How [`gated_delta_rule`](super::gated_delta_rule) computes, and what it does with the states.
#[derive(Clone, Debug)]
#[must_use]
pub struct GatedDeltaOptions {
    pub(super) scale: Option<f64>,
    pub(super) l2_norm: bool,
    pub(super) softplus_threshold: f64,
    pub(super) negative_slots: NegativeSlots,
    pub(super) update: StateUpdate,
}

/// What a negative slot means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NegativeSlots {
    /// The sequence is padding: its output is 0, and nothing is written for it. A negative slot to write to alone leaves the output
    /// as it is.
    #[default]
    Skip,
    /// Slot 0, which holds nothing of value: it is read and written. Where several sequences write to it, it keeps parts of the states
    /// of any of them, and what they put out is that of what they find.
    NullSlot0,
}

/// Which states are kept, and where.
#[derive(Clone, Debug, Default)]
// Tensors are large, and there is one of these per call.
#[allow(clippy::large_enum_variant)]
pub enum StateUpdate {
    /// The one after the last token, in the pool.
    #[default]
    Last,
    /// The one after as many tokens as accepted, `[batch]`, in the pool. Of 0 or fewer: as read; of more than there are tokens:
    /// after the last, where that is not an error.
    Accepted(Tensor<1, Int>),
    /// All of them, in a tensor of their own. The pool stays as it is.
    Intermediate,
    /// None. The pool stays as it is.
    Discard,
}

impl Default for GatedDeltaOptions {
    fn default() -> Self {
        Self {
            scale: None,
            l2_norm: true,
            softplus_threshold: SOFTPLUS_THRESHOLD,
            negative_slots: NegativeSlots::default(),
            update: StateUpdate::default(),
        }
    }
}

impl GatedDeltaOptions {
    /// Queries scaled by `width^-0.5` and normalised like the keys, softplus up to 20, padding skipped, and the last state kept.
    pub fn new() -> Self {
        Self::default()
    }

    /// The factor of the queries, in place of `width^-0.5`.
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Whether queries and keys are divided by `sqrt(sum(x²) + 1e-6)`.
    pub fn with_l2_norm(mut self, l2_norm: bool) -> Self {
        self.l2_norm = l2_norm;
        self
    }

    /// Beyond which softplus is the identity.
    pub fn with_softplus_threshold(mut self, threshold: f64) -> Self {
        self.softplus_threshold = threshold;
        self
    }

    /// What a negative slot means.
    pub fn with_negative_slots(mut self, negative_slots: NegativeSlots) -> Self {
        self.negative_slots = negative_slots;
        self
    }

    /// Which states are kept, and where.
    pub fn with_update(mut self, update: StateUpdate) -> Self {
        self.update = update;
        self
    }
}
