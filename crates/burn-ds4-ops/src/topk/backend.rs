use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

use super::reference;
use crate::optional::OptionalInt;

/// What the tokens of a sequence see by one number for it: the first token sees `number + 1 - counted` tokens, each other one more, and
/// a column stands for `ratio` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Rows of a sequence.
    pub(crate) next_n: usize,
    /// Of these, those that the sequence's number counts already.
    pub(crate) counted: usize,
    /// Tokens to a column.
    pub(crate) ratio: usize,
}

impl Tokens {
    /// Where a sequence has one row, and the number is the end of its window.
    pub(crate) const ONE: Self = Self {
        next_n: 1,
        counted: 1,
        ratio: 1,
    };

    /// A number beyond which a sequence's tokens see all columns. Those that are too many for a device are refused before.
    pub(crate) fn most(&self, columns: usize) -> usize {
        columns
            .saturating_mul(self.ratio)
            .saturating_add(self.counted)
    }
}

/// Extension of Burn's backends by the operators of this family; the default bodies are the reference.
///
/// Both ends of a window are given, or only a number for each sequence, which `tokens` explain, or neither: then all columns take part.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait TopkOps: Backend {
    /// See [`top_k_ids`](super::top_k_ids).
    #[fusion(meta = |logits, _starts, _ends, _tokens, k| fusion::ids(logits, *k))]
    fn top_k_ids(
        logits: FloatTensor<Self>,
        #[extension_type] starts: OptionalInt<Self>,
        #[extension_type] ends: OptionalInt<Self>,
        tokens: Tokens,
        k: usize,
    ) -> IntTensor<Self> {
        reference::top_k_ids::<Self>(logits, starts.into_option(), ends.into_option(), tokens, k)
    }

    /// The values at ascending `ids`, in their order or sorted; see [`top_k`](super::top_k).
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
        tokens: Tokens,
        k: usize,
    ) -> IntTensor<Self> {
        let (starts, ends) = (starts.into_option(), ends.into_option());
        if super::launch::can_select(&logits, [starts.as_ref(), ends.as_ref()]) {
            super::launch::top_k_ids(logits, starts, ends, tokens, k)
        } else {
            reference::top_k_ids::<Self>(logits, starts, ends, tokens, k)
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

/// What fusion has to know about the outputs before the operators run.
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
