use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

use super::{Sampling, reference};

/// Extension of Burn's backends by the operators of this family; the default bodies are the reference.
///
/// No tensor that gets here is empty.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait SamplingOps: Backend {
    /// See [`sample`](super::sample): as many rows of logits for each sequence as there are to a seed, at positions that follow each
    /// other.
    #[fusion(meta = |logits, _seeds, _positions, _sampling| fusion::tokens(logits))]
    fn sample(
        logits: FloatTensor<Self>,
        seeds: IntTensor<Self>,
        positions: IntTensor<Self>,
        sampling: Sampling,
    ) -> IntTensor<Self> {
        reference::sample::<Self>(logits, seeds, positions, sampling)
    }

    /// The tokens of each sequence up to the first that is not its draft, which is one more than there are drafts at most, and how
    /// many are their drafts; see [`Verdict`](super::Verdict). `tokens` are `[sequences · (drafts + 1)]`, i32.
    #[fusion(meta = |_tokens, drafts| fusion::verdict(drafts))]
    fn verify_drafts(
        tokens: IntTensor<Self>,
        drafts: IntTensor<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>) {
        reference::verify::<Self>(tokens, drafts)
    }
}

#[cfg(feature = "flex")]
impl SamplingOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl SamplingOps for burn_cubecl::CubeBackend {
    fn sample(
        logits: FloatTensor<Self>,
        seeds: IntTensor<Self>,
        positions: IntTensor<Self>,
        sampling: Sampling,
    ) -> IntTensor<Self> {
        if super::launch::can_sample(&logits, [&seeds, &positions]) {
            super::launch::sample(logits, seeds, positions, sampling)
        } else {
            reference::sample::<Self>(logits, seeds, positions, sampling)
        }
    }

    fn verify_drafts(
        tokens: IntTensor<Self>,
        drafts: IntTensor<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>) {
        if super::launch::can_verify(&tokens, &drafts) {
            super::launch::verify(tokens, drafts)
        } else {
            reference::verify::<Self>(tokens, drafts)
        }
    }
}

/// What fusion has to know about the outputs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    pub(super) fn tokens(logits: &TensorSpec) -> TensorSpec {
        TensorSpec::new([logits.shape[0]].into(), DType::I32)
    }

    pub(super) fn verdict(drafts: &TensorSpec) -> (TensorSpec, TensorSpec) {
        let (sequences, count) = (drafts.shape[0], drafts.shape[1]);
        (
            TensorSpec::new([sequences, count + 1].into(), DType::I32),
            TensorSpec::new([sequences].into(), DType::I32),
        )
    }
}
