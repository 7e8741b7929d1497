use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

use super::reference;
use crate::optional::OptionalInt;

/// Extension of Burn's backends by the operators of this family. The default bodies are the
/// reference.
///
/// No tensor that reaches them is empty.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait SamplingOps: Backend {
    /// See [`sample`](super::sample). There are as many lanes as positions, and `floats` and
    /// `words` are their [tables](super::layout). Each lane has as many rows of logits as the
    /// others, at consecutive positions.
    #[fusion(meta = |logits, _floats, _words, _positions| fusion::tokens(logits))]
    fn sample(
        logits: FloatTensor<Self>,
        floats: FloatTensor<Self>,
        words: IntTensor<Self>,
        positions: IntTensor<Self>,
    ) -> IntTensor<Self> {
        reference::sample::<Self>(logits, floats, words, positions)
    }

    /// The tokens of each lane up to the first that does not match its draft, one more than
    /// there are drafts at most, and how many match; see [`VerifiedDrafts`](super::VerifiedDrafts).
    /// `tokens` are `[lanes · (drafts + 1)]`, i32.
    #[fusion(meta = |_tokens, drafts| fusion::verified(drafts))]
    fn verify_drafts(
        tokens: IntTensor<Self>,
        drafts: IntTensor<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>) {
        reference::verify::<Self>(tokens, drafts)
    }

    /// See [`apply_penalties`](super::apply_penalties). `logits` are
    /// `[lanes · (drafts + 1), vocabulary]`, f32, and `counts` those of
    /// [`TokenCounts`](super::TokenCounts).
    #[fusion(meta = |logits, _drafts, _counts, _floats, _words| logits.clone())]
    fn apply_penalties(
        logits: FloatTensor<Self>,
        #[extension_type] drafts: OptionalInt<Self>,
        counts: IntTensor<Self>,
        floats: FloatTensor<Self>,
        words: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::apply_penalties::<Self>(logits, drafts.into_option(), counts, floats, words)
    }

    /// See [`TokenCounts::count`](super::TokenCounts::count).
    #[fusion(meta = |counts, _tokens| counts.clone())]
    fn count_tokens(counts: IntTensor<Self>, tokens: IntTensor<Self>) -> IntTensor<Self> {
        reference::count_tokens::<Self>(counts, tokens)
    }

    /// The log-probabilities of some tokens of each row, `[rows, tokens]`, i32; see
    /// [`log_probs`](super::log_probs()).
    #[fusion(meta = |_logits, ids| fusion::log_probs(ids))]
    fn log_probs(logits: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        reference::log_probs::<Self>(logits, ids)
    }
}

#[cfg(feature = "flex")]
impl SamplingOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl SamplingOps for burn_cubecl::CubeBackend {
    fn sample(
        logits: FloatTensor<Self>,
        floats: FloatTensor<Self>,
        words: IntTensor<Self>,
        positions: IntTensor<Self>,
    ) -> IntTensor<Self> {
        if super::launch::can_sample(&logits, [&positions, &words]) {
            super::launch::sample(logits, [floats, words], positions)
        } else {
            reference::sample::<Self>(logits, floats, words, positions)
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

    fn apply_penalties(
        logits: FloatTensor<Self>,
        drafts: OptionalInt<Self>,
        counts: IntTensor<Self>,
        floats: FloatTensor<Self>,
        words: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let drafts = drafts.into_option();
        if super::launch::can_penalise(&logits, drafts.as_ref()) {
            super::launch::apply_penalties(logits, drafts, counts, [floats, words])
        } else {
            reference::apply_penalties::<Self>(logits, drafts, counts, floats, words)
        }
    }

    fn count_tokens(counts: IntTensor<Self>, tokens: IntTensor<Self>) -> IntTensor<Self> {
        if super::launch::can_count(&counts, &tokens) {
            super::launch::count_tokens(counts, tokens)
        } else {
            reference::count_tokens::<Self>(counts, tokens)
        }
    }

    fn log_probs(logits: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        if super::launch::can_have_log_probs(&logits, &ids) {
            super::launch::log_probs(logits, ids)
        } else {
            reference::log_probs::<Self>(logits, ids)
        }
    }
}

/// The shapes and dtypes of outputs, which fusion needs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    pub(super) fn tokens(logits: &TensorSpec) -> TensorSpec {
        TensorSpec::new([logits.shape[0]].into(), DType::I32)
    }

    pub(super) fn log_probs(ids: &TensorSpec) -> TensorSpec {
        TensorSpec::new(ids.shape.clone(), DType::F32)
    }

    pub(super) fn verified(drafts: &TensorSpec) -> (TensorSpec, TensorSpec) {
        let (lanes, count) = (drafts.shape[0], drafts.shape[1]);
        (
            TensorSpec::new([lanes, count + 1].into(), DType::I32),
            TensorSpec::new([lanes].into(), DType::I32),
        )
    }
}
