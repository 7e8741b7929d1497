//! The gated delta rule: linear attention with a state for each sequence and head, kept in a pool.

mod backend;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
mod options;
mod reference;
mod validation;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::OpError;
use backend::{GatedDeltaOps, Recurrence};
pub use options::{GatedDeltaOptions, NegativeSlots, StateUpdate};

/// Tokens of a sequence that [`gated_delta_rule`] takes at most.
pub const MAX_TOKENS: usize = 16;
/// Keeps the norm of a row of zeros from dividing by zero.
const NORM_EPSILON: f32 = 1e-6;

/// What [`gated_delta_rule`] is given for its tokens; the dtypes are f32, f16 or bf16.
#[derive(Clone, Debug)]
pub struct GatedDeltaInputs {
    /// Queries, `[batch, tokens, heads, width]`.
    pub q: Tensor<4>,
    /// Keys, like `q`.
    pub k: Tensor<4>,
    /// Values, `[batch, tokens, value heads, channels]`, in the dtype of `q`.
    pub v: Tensor<4>,
    /// What decides the decay, `[batch, tokens, value heads]`.
    pub a: Tensor<3>,
    /// What decides the strength of the update, `[batch, tokens, value heads]`.
    pub b: Tensor<3>,
    /// The logarithm of the rate of decay, `[value heads]`, f32.
    pub a_log: Tensor<1>,
    /// Added to `a`, `[value heads]`.
    pub dt_bias: Tensor<1>,
}

/// Where in the pool the states of the sequences are, and where they go; both `[batch]`, i32, i64 or u32.
#[derive(Clone, Debug)]
pub struct StateSlots {
    /// The slot that each sequence starts from. Several may start from the same one if none writes to it.
    pub read: Tensor<1, Int>,
    /// The slot that its state goes to. Without, that is where it came from.
    pub write: Option<Tensor<1, Int>>,
}

impl StateSlots {
    /// States go back to where they came from.
    pub fn in_place(slots: Tensor<1, Int>) -> Self {
        Self {
            read: slots,
            write: None,
        }
    }

    /// States go elsewhere; the slots that they came from stay as they are.
    pub fn split(read: Tensor<1, Int>, write: Tensor<1, Int>) -> Self {
        Self {
            read,
            write: Some(write),
        }
    }
}

/// What [`gated_delta_rule`] gives.
#[derive(Clone, Debug)]
pub struct GatedDelta {
    /// `[batch, tokens, value heads, channels]`, in the dtype of `v`.
    pub out: Tensor<4>,
    /// The pool, with the states that were written.
    pub pool: Tensor<4>,
    /// With [`StateUpdate::Intermediate`]: `[batch, tokens, value heads, channels, width]`, the state after each token in the dtype of
    /// the pool, by sequence and not by slot. Zeros for a sequence that is skipped.
    pub intermediate: Option<Tensor<5>>,
}

/// One to [`MAX_TOKENS`] steps of the gated delta rule for every sequence of a batch, as in decoding and in verifying a draft.
///
/// For each token, and each value head with its state `S`, `[channels, width]`:
///
/// ```text
/// S    *= exp(-exp(a_log) * softplus(a + dt_bias))      softplus(x) = log(1 + exp(x)), or x beyond the threshold
/// S    += sigmoid(b) * (v - S k) kᵀ
/// out   = S q
/// ```
///
/// with `k / sqrt(sum(k²) + 1e-6)` for `k` and `scale * q / sqrt(sum(q²) + 1e-6)` for `q`, or `k` and `scale * q` without the norm. Value
/// head `i` has the query and key of head `i / (value heads / heads)`.
///
/// All is computed in f32, and so is the state from token to token: it is rounded, to nearest with ties to even, only where it is
/// stored. With a pool in f32, several tokens at once therefore give what they give one by one. In 16 bits, which kernel is faster
/// depends on how many states there are: the last bits of one or two tokens' results may differ between batches of very different size.
///
/// # The pool
///
/// `pool` is `[slots, value heads, channels, width]`, f32, f16 or bf16, whatever the dtype of the values. It is taken by
/// value: an operation on a pool that nobody else holds may update it where it is, and one on a pool that somebody else holds copies
/// it. It may be a view of any strides. Slots that no sequence writes to keep their bits.
///
/// A slot that one sequence writes to must be no other's, neither to read nor to write: where that is not an error, it keeps parts of
/// the states of either, and what the other puts out is of either. Slot 0 is exempt for sequences that get there by a negative slot
/// ([`NegativeSlots::NullSlot0`]). A slot beyond the pool is an error where the device's memory is the host's; elsewhere, where telling
/// would take reading it back, the sequence is skipped as if by [`NegativeSlots::Skip`].
///
/// # Special values
///
/// A NaN or an infinity reaches the outputs of its own sequence only, and there the value heads that read it. What a skipped sequence
/// is given has no part in anything.
///
/// # Source
///
/// Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, 2024, the recurrent form; Qwen3-Next and Qwen3.5, whose layers
/// have the norm, the gates and the head mapping.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, a number of tokens out of range, value heads that are not a multiple
/// of the heads, no heads, channels, width or slots at all, and a scale or threshold that is NaN. Where the device's memory is the host's,
/// also for a slot beyond the pool, a slot that a sequence writes to and another one uses, and more accepted tokens than there are.
pub fn gated_delta_rule(
    inputs: GatedDeltaInputs,
    pool: Tensor<4>,
    slots: StateSlots,
    options: &GatedDeltaOptions,
) -> Result<GatedDelta, OpError> {
    validation::check(&inputs, &pool, &slots, options)?;
    let [batch, tokens, heads, channels] = inputs.v.dims();
    let width = pool.dims()[3];
    let all_states = [batch, tokens, heads, channels, width];
    if batch == 0 {
        let device = pool.device();
        let states = || Tensor::zeros(all_states, (&device, pool.dtype()));
        return Ok(GatedDelta {
            out: Tensor::zeros(
                [batch, tokens, heads, channels],
                (&device, inputs.v.dtype()),
            ),
            intermediate: matches!(options.update, StateUpdate::Intermediate).then(states),
            pool,
        });
    }
    let recurrence = Recurrence {
        q: inputs.q.into_dispatch(),
        k: inputs.k.into_dispatch(),
        v: inputs.v.into_dispatch(),
        a: inputs.a.into_dispatch(),
        b: inputs.b.into_dispatch(),
        a_log: inputs.a_log.into_dispatch(),
        dt_bias: inputs.dt_bias.into_dispatch(),
        read_slots: slots.read.into_dispatch(),
        scale: options.scale.unwrap_or((width as f64).powf(-0.5)),
        l2_norm: options.l2_norm,
        softplus_threshold: options.softplus_threshold,
        null_slot: options.negative_slots == NegativeSlots::NullSlot0,
    };
    let accepted = match &options.update {
        StateUpdate::Last => None,
        StateUpdate::Accepted(steps) => Some(steps.clone()),
        StateUpdate::Intermediate => {
            let held = pool.clone().into_dispatch();
            let (out, states) = Dispatch::gated_delta_rule_states(recurrence, held);
            return Ok(GatedDelta {
                out: Tensor::from_dispatch(out),
                pool,
                intermediate: Some(Tensor::from_dispatch(states)),
            });
        }
        StateUpdate::Discard => {
            let held = pool.clone().into_dispatch();
            let out = Dispatch::gated_delta_rule_outputs(recurrence, held);
            return Ok(GatedDelta {
                out: Tensor::from_dispatch(out),
                pool,
                intermediate: None,
            });
        }
    };
    let (out, pool) = Dispatch::gated_delta_rule(
        recurrence,
        pool.into_dispatch(),
        slots.write.into(),
        accepted.into(),
    );
    Ok(GatedDelta {
        out: Tensor::from_dispatch(out),
        pool: Tensor::from_dispatch(pool),
        intermediate: None,
    })
}
