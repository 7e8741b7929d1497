#[cfg(feature = "cube")]
use super::launch;
use super::reference;
use crate::operators::prelude::*;
use crate::optional::OptionalInt;

operators! {
    /// Extension of Burn's backends by the operator of this family.
    ///
    /// No tensor that reaches it is empty.
    pub trait MarkovOps: Backend;

    /// See [`markov_drafts`](super::markov_drafts); `tokens` are `[lanes]`.
    #[fusion(meta = |logits, _ids, _tokens, _embedding, _output| {
        spec([logits.shape[0], logits.shape[1]], DType::I32)
    })]
    fn markov_drafts(
        logits: FloatTensor<Self>,
        #[extension_type] ids: OptionalInt<Self>,
        tokens: IntTensor<Self>,
        embedding: FloatTensor<Self>,
        output: FloatTensor<Self>,
    ) -> IntTensor<Self> {
        reference::markov_drafts::<Self>(logits, ids.into_option(), tokens, [embedding, output])
    }
    if launch::can_draft(&logits, [&embedding, &output]) =>
        launch::markov_drafts(logits, ids.into_option(), tokens, [embedding, output]);
}
