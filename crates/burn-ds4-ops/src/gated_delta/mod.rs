//! The gated delta rule: linear attention with one state for each sequence and head, kept in a
//! pool.

mod args;
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
pub use args::MAX_TOKENS;
use args::{Recurrence, StateStore};
use backend::GatedDeltaOps;
pub use options::{GatedDeltaOptions, NegativeSlots, StateUpdate};

/// The inputs of [`gated_delta_rule`] for its tokens. The dtypes are f32, f16 or bf16.
#[derive(Clone, Debug)]
pub struct GatedDeltaInputs {
    /// Queries, `[batch, tokens, heads, width]`.
    pub q: Tensor<4>,
    /// Keys, like `q`.
    pub k: Tensor<4>,
    /// Values, `[batch, tokens, value heads, channels]`, in the dtype of `q`.
    pub v: Tensor<4>,
    /// The input of the decay, `[batch, tokens, value heads]`.
    pub a: Tensor<3>,
    /// The input of `beta`, the strength of the update: `[batch, tokens, value heads]`.
    pub b: Tensor<3>,
    /// The logarithm of the rate of decay, `[value heads]`, f32.
    pub a_log: Tensor<1>,
    /// Added to `a`, `[value heads]`.
    pub dt_bias: Tensor<1>,
}

/// The slots of the pool that states are read from and written to. Both are `[batch]`, i32, i64 or
/// u32.
#[derive(Clone, Debug)]
pub struct StateSlots {
    /// The slot that each sequence starts from. Several sequences may start from the same slot if
    /// none of them writes to it.
    pub read: Tensor<1, Int>,
    /// The slot that each state is written to. Without it, a state goes back to the slot it was
    /// read from.
    pub write: Option<Tensor<1, Int>>,
}

impl StateSlots {
    /// Writes each state back to the slot that it was read from.
    pub fn in_place(slots: Tensor<1, Int>) -> Self {
        Self {
            read: slots,
            write: None,
        }
    }

    /// Writes states to other slots. The slots that they were read from stay unchanged.
    pub fn split(read: Tensor<1, Int>, write: Tensor<1, Int>) -> Self {
        Self {
            read,
            write: Some(write),
        }
    }
}

/// The results of [`gated_delta_rule`].
#[derive(Clone, Debug)]
pub struct GatedDelta {
    /// `[batch, tokens, value heads, channels]`, in the dtype of `v`.
    pub out: Tensor<4>,
    /// The pool, with the new states written to it.
    pub pool: Tensor<4>,
    /// The state after each token, in the dtype of the pool, with [`StateUpdate::Intermediate`]:
    /// `[batch, tokens, value heads, channels, width]`. It is ordered by sequence and not by slot.
    /// A skipped sequence has zeros.
    pub intermediate: Option<Tensor<5>>,
}

/// Runs one to [`MAX_TOKENS`] steps of the gated delta rule for every sequence of a batch, as in
/// decoding and in verifying a draft.
///
/// For each token, and each value head with its state `S`, `[channels, width]`:
///
/// ```text
/// S    *= exp(-exp(a_log) * softplus(a + dt_bias))
/// S    += sigmoid(b) * (v - S k) kᵀ
/// out   = S q
///
/// softplus(x) = log(1 + exp(x)), or x beyond the threshold
/// ```
///
/// With the norm, `k` is divided by `sqrt(sum(k²) + 1e-6)`, and `q` is
/// `scale * q / sqrt(sum(q²) + 1e-6)`. Without it, they are `k` and `scale * q`. Value head `i`
/// uses the query and key of head `i / (value heads / heads)`.
///
/// Everything is computed in f32. The state also stays in f32 from token to token: it is rounded,
/// to nearest with ties to even, only where it is stored. With an f32 pool, several tokens in one
/// call therefore give the same bits as one token at a time. With 16-bit pools, the choice of
/// kernel depends on the number of states. The last bits of the results of one or two tokens may
/// then differ between batches of very different size.
///
/// # The pool
///
/// `pool` is `[slots, value heads, channels, width]`, f32, f16 or bf16, independent of the dtype of
/// the values. The function takes it by value: if no other tensor shares the pool, the call may
/// update it in place; otherwise the call copies it. The pool may be a view with any strides. Slots
/// that no sequence writes to keep their bits.
///
/// A slot that one sequence writes to must not be read or written by another. Where that is not
/// reported as an error, the slot ends up with parts of both states, and the other sequence's
/// output is computed from either. Slot 0 is exempt for sequences that get there by a negative slot
/// ([`NegativeSlots::NullSlot0`]). A slot beyond the pool is an error where the device's memory is
/// the host's. Elsewhere the check would take a read-back, so the sequence is skipped as if by
/// [`NegativeSlots::Skip`].
///
/// # Special values
///
/// A NaN or an infinity reaches only the outputs of its own sequence, and there only the value
/// heads that read it. The inputs of a skipped sequence have no effect on anything.
///
/// # Source
///
/// Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, 2024, the recurrent form;
/// Qwen3-Next and Qwen3.5, whose layers have the norm, the gates and the head mapping.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, a number of tokens out of range,
/// value heads that are not a multiple of the heads, no heads, channels, width or slots at all, and
/// a scale or threshold that is NaN. Where the device's memory is the host's, also for a slot
/// beyond the pool, a slot that one sequence writes to and another one uses, and more accepted
/// tokens than there are.
///
/// # Example
///
/// A step of one head, which neither decays its state nor holds back the update.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData, Tolerance};
/// use burn_ds4_ops::gated_delta::{
///     GatedDeltaInputs, GatedDeltaOptions, StateSlots, gated_delta_rule,
/// };
///
/// let device = Device::flex();
/// let inputs = GatedDeltaInputs {
///     q: Tensor::from_data([[[[1.0, 0.0]]]], &device),
///     k: Tensor::from_data([[[[1.0, 0.0]]]], &device),
///     v: Tensor::from_data([[[[2.0, 5.0]]]], &device),
///     a: Tensor::from_data([[[-100.0]]], &device),
///     b: Tensor::from_data([[[100.0]]], &device),
///     a_log: Tensor::zeros([1], &device),
///     dt_bias: Tensor::zeros([1], &device),
/// };
/// let pool = Tensor::<4>::zeros([1, 1, 2, 2], &device);
/// let slots = StateSlots::in_place(Tensor::from_ints([0], &device));
/// let options = GatedDeltaOptions::default().with_scale(1.0);
/// let step = gated_delta_rule(inputs, pool, slots, &options)?;
/// let expected = TensorData::from([[[[2.0_f32, 5.0]]]]);
/// step.out.into_data().assert_approx_eq::<f32>(&expected, Tolerance::relative(1e-5));
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "gdn")]
#[doc(alias = "fused_recurrent_gated_delta_rule")]
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
    let store = match &options.update {
        StateUpdate::Last => StateStore::Pool {
            slots: slots.write.into(),
            accepted: None::<Tensor<1, Int>>.into(),
        },
        StateUpdate::Accepted(steps) => StateStore::Pool {
            slots: slots.write.into(),
            accepted: Some(steps.clone()).into(),
        },
        StateUpdate::Intermediate => StateStore::Apart,
        StateUpdate::Discard => StateStore::Nowhere,
    };
    // Nobody else must hold a pool that is written to in place.
    let kept = (!matches!(store, StateStore::Pool { .. })).then(|| pool.clone());
    let (out, stored) = Dispatch::gated_delta_rule(recurrence, pool.into_dispatch(), store);
    let (pool, intermediate) = match (kept, &options.update) {
        (None, _) => (Tensor::from_dispatch(stored), None),
        (Some(pool), StateUpdate::Intermediate) => (pool, Some(Tensor::from_dispatch(stored))),
        (Some(pool), _) => (pool, None),
    };
    Ok(GatedDelta {
        out: Tensor::from_dispatch(out),
        pool,
        intermediate,
    })
}
