use burn::tensor::{Int, Tensor};

/// The value beyond which softplus is the identity.
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
    /// The sequence is padding: its output is 0, and nothing is written for it. If only the slot to
    /// write to is negative, the output is computed as usual.
    #[default]
    Skip,
    /// The slot is slot 0, which holds nothing of value: it is read and written. Where several
    /// sequences write to it, it keeps parts of the states of any of them, and their outputs are
    /// computed from whatever they find there.
    NullSlot0,
}

/// Which states are stored, and where.
#[derive(Clone, Debug, Default)]
// Tensors are large, and there is one of these per call.
#[allow(clippy::large_enum_variant)]
pub enum StateUpdate {
    /// Stores the state after the last token in the pool.
    #[default]
    Last,
    /// Stores the state after the given number of accepted tokens, `[batch]`, in the pool. With 0
    /// or fewer, that is the state as read. With more than there are tokens, it is the state after
    /// the last one, where that is not an error.
    Accepted(Tensor<1, Int>),
    /// Returns all states in a separate tensor. The pool stays unchanged.
    Intermediate,
    /// Stores no state. The pool stays unchanged.
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
    /// Default options: queries scaled by `width^-0.5` and normalised like the keys, a softplus
    /// threshold of 20, padding skipped, and the last state stored.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the factor of the queries, in place of `width^-0.5`.
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Sets whether queries and keys are divided by `sqrt(sum(x²) + 1e-6)`.
    pub fn with_l2_norm(mut self, l2_norm: bool) -> Self {
        self.l2_norm = l2_norm;
        self
    }

    /// Sets the value beyond which softplus is the identity.
    pub fn with_softplus_threshold(mut self, threshold: f64) -> Self {
        self.softplus_threshold = threshold;
        self
    }

    /// Sets what a negative slot means.
    pub fn with_negative_slots(mut self, negative_slots: NegativeSlots) -> Self {
        self.negative_slots = negative_slots;
        self
    }

    /// Sets which states are stored, and where.
    pub fn with_update(mut self, update: StateUpdate) -> Self {
        self.update = update;
        self
    }
}
