//! The argument of this family's backend operations, and what all of them have in common.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use crate::optional::OptionalInt;

/// The most tokens of a sequence that one call of
/// [`gated_delta_rule`](super::gated_delta_rule) takes.
pub const MAX_TOKENS: usize = 16;
/// Keeps the norm of a row of zeros from dividing by zero.
pub(super) const NORM_EPSILON: f32 = 1e-6;

/// The inputs of the recurrence, without the pool, as backends see them.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct Recurrence<B: Backend> {
    /// `[batch, tokens, heads, width]`.
    pub q: FloatTensor<B>,
    /// Like `q`.
    pub k: FloatTensor<B>,
    /// `[batch, tokens, value heads, channels]`.
    pub v: FloatTensor<B>,
    /// `[batch, tokens, value heads]`.
    pub a: FloatTensor<B>,
    /// Like `a`.
    pub b: FloatTensor<B>,
    /// `[value heads]`.
    pub a_log: FloatTensor<B>,
    /// `[value heads]`.
    pub dt_bias: FloatTensor<B>,
    /// `[batch]`.
    pub read_slots: IntTensor<B>,
    /// The factor of the queries.
    pub scale: f64,
    /// Whether queries and keys are normalised.
    pub l2_norm: bool,
    /// The value of `x` above which softplus is the identity.
    pub softplus_threshold: f64,
    /// Whether a negative slot means slot 0.
    pub null_slot: bool,
}

/// Where the states of a call are stored, as backends see it.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[allow(clippy::large_enum_variant, reason = "there is one of these per call")]
pub enum StateStore<B: Backend> {
    /// The last or the accepted state of each sequence in the pool.
    Pool {
        /// `[batch]`; without them, each state goes back to the slot that it was read from.
        #[extension_type]
        slots: OptionalInt<B>,
        /// `[batch]`: the tokens after which states are stored; without them, all.
        #[extension_type]
        accepted: OptionalInt<B>,
    },
    /// The state after every token, in a tensor of its own.
    Apart,
    /// Nowhere.
    Nowhere,
}
