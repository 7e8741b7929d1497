use super::Encoding;
#[cfg(feature = "cube")]
use super::launch;
use super::reference;
use crate::operators::prelude::*;

operators! {
    /// Extension of Burn's backends by the operators of this family.
    ///
    /// No tensor that reaches them is empty.
    pub trait UploadOps: Backend;

    /// See [`repack_fp4_words`](super::repack_fp4_words).
    #[fusion(meta = |words| like(words))]
    fn repack_fp4_words(words: IntTensor<Self>) -> IntTensor<Self> {
        reference::repack_fp4_words::<Self>(words)
    }
    if true => launch::repack_fp4_words(words);

    /// See [`any_not_finite`](super::any_not_finite).
    #[fusion(meta = |_words, _encoding| spec([1], DType::I32))]
    fn any_not_finite(words: IntTensor<Self>, encoding: Encoding) -> IntTensor<Self> {
        reference::any_not_finite::<Self>(words, encoding)
    }
    if true => launch::any_not_finite(words, encoding);
}
