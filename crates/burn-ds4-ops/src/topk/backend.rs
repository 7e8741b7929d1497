use super::args::CausalWindow;
#[cfg(feature = "cube")]
use super::launch;
use super::reference;
use crate::operators::prelude::*;
use crate::optional::OptionalInt;

operators! {
    /// Extension of Burn's backends by the operators of this family.
    ///
    /// Windows are given by both ends, by a length for each sequence that `causal` interprets, or
    /// by neither: then all columns take part.
    pub trait TopkOps: Backend;

    /// See [`top_k_ids`](super::top_k_ids).
    #[fusion(meta = |logits, _starts, _ends, _causal, k| spec([logits.shape[0], *k], DType::I32))]
    fn top_k_ids(
        logits: FloatTensor<Self>,
        #[extension_type] starts: OptionalInt<Self>,
        #[extension_type] ends: OptionalInt<Self>,
        causal: CausalWindow,
        k: usize,
    ) -> IntTensor<Self> {
        reference::top_k_ids::<Self>(logits, starts.into_option(), ends.into_option(), causal, k)
    }
    if launch::can_select(&logits, [starts.as_ref(), ends.as_ref()]) =>
        launch::top_k_ids(logits, starts.into_option(), ends.into_option(), causal, k);

    /// Collects the values at ascending `ids`, in their order or sorted; see
    /// [`top_k`](super::top_k).
    #[fusion(meta = |logits, _starts, ids, _sorted| (
        spec([ids.shape[0], ids.shape[1]], logits.dtype),
        like(ids),
    ))]
    fn top_k_values(
        logits: FloatTensor<Self>,
        #[extension_type] starts: OptionalInt<Self>,
        ids: IntTensor<Self>,
        sorted: bool,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        reference::top_k_values::<Self>(logits, starts.into_option(), ids, sorted)
    }
    if launch::can_order(&logits, starts.as_ref(), &ids, sorted) =>
        launch::top_k_values(logits, starts.into_option(), ids, sorted);
}
