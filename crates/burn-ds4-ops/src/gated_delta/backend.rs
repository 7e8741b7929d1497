use burn::backend::tensor::FloatTensor;
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

use super::args::Recurrence;
#[cfg(feature = "cube")]
use super::launch::{StateOutput, can_run, run};
use super::reference;
use crate::optional::OptionalInt;

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
    use burn::backend::fusion::custom::TensorSpec;

    use crate::gated_delta::args::RecurrenceMetadata;

    pub(super) fn outputs(recurrence: &RecurrenceMetadata) -> TensorSpec {
        TensorSpec::new(recurrence.v.shape.clone(), recurrence.v.dtype)
    }

    pub(super) fn states(recurrence: &RecurrenceMetadata, pool: &TensorSpec) -> TensorSpec {
        let [batch, tokens, heads, channels] = recurrence.v.shape.dims();
        let shape = [batch, tokens, heads, channels, pool.shape[3]];
        TensorSpec::new(shape.into(), pool.dtype)
    }
}
