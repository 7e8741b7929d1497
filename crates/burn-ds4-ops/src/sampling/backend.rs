#[cfg(feature = "cube")]
use super::launch;
use super::reference;
use crate::operators::prelude::*;
use crate::optional::OptionalInt;

operators! {
    /// Extension of Burn's backends by the operators of this family.
    ///
    /// No tensor that reaches them is empty. `floats` and `words` are the [tables](super::layout)
    /// of the lanes.
    pub trait SamplingOps: Backend;

    /// See [`sample`](super::sample). There are as many lanes as positions. Each lane has as many
    /// rows of logits as the others, at consecutive positions.
    #[fusion(meta = |logits, _floats, _words, _positions| spec([logits.shape[0]], DType::I32))]
    fn sample(
        logits: FloatTensor<Self>,
        floats: FloatTensor<Self>,
        words: IntTensor<Self>,
        positions: IntTensor<Self>,
    ) -> IntTensor<Self> {
        reference::sample::<Self>(logits, floats, words, positions)
    }
    if launch::can_sample(&logits, [&positions, &words]) =>
        launch::sample(logits, [floats, words], positions);

    /// The tokens of each lane up to the first that does not match its draft, one more than
    /// there are drafts at most, and how many match; see [`VerifiedDrafts`](super::VerifiedDrafts).
    /// `tokens` are `[lanes · (drafts + 1)]`, i32.
    #[fusion(meta = |_tokens, drafts| (
        spec([drafts.shape[0], drafts.shape[1] + 1], DType::I32),
        spec([drafts.shape[0]], DType::I32),
    ))]
    fn verify_drafts(
        tokens: IntTensor<Self>,
        drafts: IntTensor<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>) {
        reference::verify::<Self>(tokens, drafts)
    }
    if launch::can_verify(&tokens, &drafts) => launch::verify(tokens, drafts);

    /// See [`apply_penalties`](super::apply_penalties). `logits` are
    /// `[lanes · (drafts + 1), vocabulary]`, f32, and `counts` those of
    /// [`TokenCounts`](super::TokenCounts).
    #[fusion(meta = |logits, _drafts, _counts, _floats, _words| like(logits))]
    fn apply_penalties(
        logits: FloatTensor<Self>,
        #[extension_type] drafts: OptionalInt<Self>,
        counts: IntTensor<Self>,
        floats: FloatTensor<Self>,
        words: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::apply_penalties::<Self>(logits, drafts.into_option(), counts, floats, words)
    }
    if launch::can_penalise(&logits, drafts.as_ref()) =>
        launch::apply_penalties(logits, drafts.into_option(), counts, [floats, words]);

    /// See [`TokenCounts::count`](super::TokenCounts::count).
    #[fusion(meta = |counts, _tokens| like(counts))]
    fn count_tokens(counts: IntTensor<Self>, tokens: IntTensor<Self>) -> IntTensor<Self> {
        reference::count_tokens::<Self>(counts, tokens)
    }
    if launch::can_count(&counts, &tokens) => launch::count_tokens(counts, tokens);

    /// The log-probabilities of some tokens of each row, `[rows, tokens]`, i32; see
    /// [`log_probs`](super::log_probs()).
    #[fusion(meta = |_logits, ids| spec([ids.shape[0], ids.shape[1]], DType::F32))]
    fn log_probs(logits: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        reference::log_probs::<Self>(logits, ids)
    }
    if launch::can_have_log_probs(&logits, &ids) => launch::log_probs(logits, ids);
}
