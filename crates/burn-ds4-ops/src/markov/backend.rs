use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

use super::reference;
use crate::optional::OptionalInt;

/// Extension of Burn's backends by the operator of this family. The default body is the reference.
///
/// No tensor that reaches it is empty.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait MarkovOps: Backend {
    /// See [`markov_drafts`](super::markov_drafts); `tokens` are `[lanes]`.
    #[fusion(meta = |logits, _ids, _tokens, _embedding, _output| fusion::drafts(logits))]
    fn markov_drafts(
        logits: FloatTensor<Self>,
        #[extension_type] ids: OptionalInt<Self>,
        tokens: IntTensor<Self>,
        embedding: FloatTensor<Self>,
        output: FloatTensor<Self>,
    ) -> IntTensor<Self> {
        reference::markov_drafts::<Self>(logits, ids.into_option(), tokens, [embedding, output])
    }
}

#[cfg(feature = "flex")]
impl MarkovOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl MarkovOps for burn_cubecl::CubeBackend {
    fn markov_drafts(
        logits: FloatTensor<Self>,
        ids: OptionalInt<Self>,
        tokens: IntTensor<Self>,
        embedding: FloatTensor<Self>,
        output: FloatTensor<Self>,
    ) -> IntTensor<Self> {
        let (ids, matrices) = (ids.into_option(), [embedding, output]);
        if super::launch::can_draft(&logits, &matrices) {
            super::launch::markov_drafts(logits, ids, tokens, matrices)
        } else {
            reference::markov_drafts::<Self>(logits, ids, tokens, matrices)
        }
    }
}

/// The shape and dtype of the output, which fusion needs before the operator runs.
#[cfg(feature = "fusion")]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    pub(super) fn drafts(logits: &TensorSpec) -> TensorSpec {
        TensorSpec::new([logits.shape[0], logits.shape[1]].into(), DType::I32)
    }
}
