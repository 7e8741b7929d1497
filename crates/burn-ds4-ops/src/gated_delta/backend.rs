use super::args::{Recurrence, StateStore};
#[cfg(feature = "cube")]
use super::launch;
use super::reference;
#[cfg(feature = "fusion")]
use crate::gated_delta::args::{RecurrenceMetadata, StateStoreMetadata};
use crate::operators::prelude::*;

/// The outputs, and what is stored.
#[cfg(feature = "fusion")]
fn results(
    recurrence: &RecurrenceMetadata,
    pool: &TensorSpec,
    store: &StateStoreMetadata,
) -> (TensorSpec, TensorSpec) {
    let [batch, tokens, heads, channels] = dims_of(&recurrence.v.shape);
    let stored = match store {
        StateStoreMetadata::Apart => {
            spec([batch, tokens, heads, channels, pool.shape[3]], pool.dtype)
        }
        StateStoreMetadata::Pool { .. } | StateStoreMetadata::Nowhere => pool.clone(),
    };
    (like(&recurrence.v), stored)
}

operators! {
    /// The backend operation of this family.
    ///
    /// No tensor passed to it is empty.
    pub trait GatedDeltaOps: Backend;

    /// Returns the outputs, and the pool or, where states are stored apart, these.
    #[fusion(meta = results)]
    fn gated_delta_rule(
        #[extension_type] recurrence: Recurrence<Self>,
        pool: FloatTensor<Self>,
        #[extension_type] store: StateStore<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        reference::gated_delta_rule::<Self>(recurrence, pool, store)
    }
    if launch::can_run(&recurrence, &pool) => launch::run(recurrence, pool, store);
}
