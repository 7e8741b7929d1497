use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

use super::args::CausalWindow;
use super::reference;
use crate::optional::OptionalInt;

/// Extension of Burn's backends by the operators of this family. The default bodies are the
/// reference.
///
/// Windows are given by both ends, by a length for each sequence that `causal` interprets, or by
/// neither: then all columns take part.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait TopkOps: Backend {
    /// See [`top_k_ids`](super::top_k_ids).
    #[fusion(meta = |logits, _starts, _ends, _causal, k| fusion::ids(logits, *k))]
    fn top_k_ids(
        logits: FloatTensor<Self>,
        #[extension_type] starts: OptionalInt<Self>,
        #[extension_type] ends: OptionalInt<Self>,
        causal: CausalWindow,
        k: usize,
    ) -> IntTensor<Self> {
        reference::top_k_ids::<Self>(logits, starts.into_option(), ends.into_option(), causal, k)
    }

    /// Collects the values at ascending `ids`, in their order or sorted; see
    /// [`top_k`](super::top_k).
    #[fusion(meta = |logits, _starts, ids, _sorted| fusion::values(logits, ids))]
    fn top_k_values(
        logits: FloatTensor<Self>,
        #[extension_type] starts: OptionalInt<Self>,
        ids: IntTensor<Self>,
        sorted: bool,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        reference::top_k_values::<Self>(logits, starts.into_option(), ids, sorted)
    }
}

#[cfg(feature = "flex")]
impl TopkOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl TopkOps for burn_cubecl::CubeBackend {
    fn top_k_ids(
        logits: FloatTensor<Self>,
        starts: OptionalInt<Self>,
        ends: OptionalInt<Self>,
        causal: CausalWindow,
        k: usize,
    ) -> IntTensor<Self> {
        let (starts, ends) = (starts.into_option(), ends.into_option());
        if super::launch::can_select(&logits, [starts.as_ref(), ends.as_ref()]) {
            super::launch::top_k_ids(logits, starts, ends, causal, k)
        } else {
            reference::top_k_ids::<Self>(logits, starts, ends, causal, k)
        }
    }

    fn top_k_values(
        logits: FloatTensor<Self>,
        starts: OptionalInt<Self>,
        ids: IntTensor<Self>,
        sorted: bool,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let starts = starts.into_option();
        if super::launch::can_order(&logits, starts.as_ref(), &ids, sorted) {
            super::launch::top_k_values(logits, starts, ids, sorted)
        } else {
            reference::top_k_values::<Self>(logits, starts, ids, sorted)
        }
    }
}

/// The shapes and dtypes of outputs, which fusion needs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    pub(super) fn ids(logits: &TensorSpec, k: usize) -> TensorSpec {
        TensorSpec::new([logits.shape[0], k].into(), DType::I32)
    }

    pub(super) fn values(logits: &TensorSpec, ids: &TensorSpec) -> (TensorSpec, TensorSpec) {
        let shape = ids.shape.clone();
        (TensorSpec::new(shape, logits.dtype), ids.clone())
    }
}
