use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, ExtensionType, TensorMetadata, backend_extension};

#[cfg(feature = "cube")]
use super::launch::{StateOutput, can_run, run};
use super::reference;
use crate::optional::OptionalInt;

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

/// The backend operations of this family. There is one method for each way of handling the states.
/// The default bodies are the reference.
///
/// No tensor passed to these methods is empty.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait GatedDeltaOps: Backend {
    /// Returns the outputs, and the pool with the last or the accepted state of each sequence.
    /// Without `write_slots`, each state goes back to the slot that it was read from.
    #[fusion(meta = |recurrence, pool, _write_slots, _accepted_steps| {
        (fusion::outputs(recurrence), pool.clone())
    })]
    fn gated_delta_rule(
        #[extension_type] recurrence: Recurrence<Self>,
        pool: FloatTensor<Self>,
        #[extension_type] write_slots: OptionalInt<Self>,
        #[extension_type] accepted_steps: OptionalInt<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        reference::update::<Self>(
            recurrence,
            pool,
            write_slots.into_option(),
            accepted_steps.into_option(),
        )
    }

    /// Returns the outputs, and the state after every token.
    #[fusion(meta = |recurrence, pool| {
        (fusion::outputs(recurrence), fusion::states(recurrence, pool))
    })]
    fn gated_delta_rule_states(
        #[extension_type] recurrence: Recurrence<Self>,
        pool: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        reference::states::<Self>(recurrence, pool)
    }

    /// Returns only the outputs.
    #[fusion(meta = |recurrence, _pool| fusion::outputs(recurrence))]
    fn gated_delta_rule_outputs(
        #[extension_type] recurrence: Recurrence<Self>,
        pool: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::outputs::<Self>(recurrence, pool)
    }
}

#[cfg(feature = "flex")]
impl GatedDeltaOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl GatedDeltaOps for burn_cubecl::CubeBackend {
    fn gated_delta_rule(
        recurrence: Recurrence<Self>,
        pool: FloatTensor<Self>,
        write_slots: OptionalInt<Self>,
        accepted_steps: OptionalInt<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (slots, accepted) = (write_slots.into_option(), accepted_steps.into_option());
        if can_run(&recurrence, &pool) {
            let results = run(recurrence, pool, StateOutput::Pool { slots, accepted });
            (results.out, results.pool)
        } else {
            reference::update::<Self>(recurrence, pool, slots, accepted)
        }
    }

    fn gated_delta_rule_states(
        recurrence: Recurrence<Self>,
        pool: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        if can_run(&recurrence, &pool) {
            let results = run(recurrence, pool, StateOutput::EveryState);
            (
                results.out,
                results.states.expect("every state was asked for"),
            )
        } else {
            reference::states::<Self>(recurrence, pool)
        }
    }

    fn gated_delta_rule_outputs(
        recurrence: Recurrence<Self>,
        pool: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        if can_run(&recurrence, &pool) {
            run(recurrence, pool, StateOutput::None).out
        } else {
            reference::outputs::<Self>(recurrence, pool)
        }
    }
}

/// Output shapes and dtypes that fusion needs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use super::RecurrenceMetadata;
    use burn::backend::fusion::custom::TensorSpec;

    pub(super) fn outputs(recurrence: &RecurrenceMetadata) -> TensorSpec {
        TensorSpec::new(recurrence.v.shape.clone(), recurrence.v.dtype)
    }

    pub(super) fn states(recurrence: &RecurrenceMetadata, pool: &TensorSpec) -> TensorSpec {
        let [batch, tokens, heads, channels] = recurrence.v.shape.dims();
        let shape = [batch, tokens, heads, channels, pool.shape[3]];
        TensorSpec::new(shape.into(), pool.dtype)
    }
}
