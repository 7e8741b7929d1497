use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};

use crate::optional::OptionalFloat;

/// Tensors of a group, at most.
pub(crate) const MAX_LIST: usize = 5;

/// Some tensors of one argument or result, the first ones of these. Backend extensions take no
/// `Vec` of tensors.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct TensorList<B: Backend> {
    #[extension_type]
    pub(super) a: OptionalFloat<B>,
    #[extension_type]
    pub(super) b: OptionalFloat<B>,
    #[extension_type]
    pub(super) c: OptionalFloat<B>,
    #[extension_type]
    pub(super) d: OptionalFloat<B>,
    #[extension_type]
    pub(super) e: OptionalFloat<B>,
}

impl<B: Backend> TensorList<B> {
    /// At most [`MAX_LIST`].
    pub(crate) fn new(tensors: Vec<FloatTensor<B>>) -> Self {
        assert!(tensors.len() <= MAX_LIST, "{} tensors", tensors.len());
        let mut tensors = tensors.into_iter();
        let mut next = || {
            tensors
                .next()
                .map_or(OptionalFloat::None, OptionalFloat::Some)
        };
        let [a, b, c, d, e] = std::array::from_fn(|_| next());
        Self { a, b, c, d, e }
    }

    /// What `map` makes of each.
    pub(crate) fn map(self, map: impl FnMut(FloatTensor<B>) -> FloatTensor<B>) -> Self {
        Self::new(self.into_vec().into_iter().map(map).collect())
    }

    pub(crate) fn into_vec(self) -> Vec<FloatTensor<B>> {
        let all = [self.a, self.b, self.c, self.d, self.e].into_iter();
        all.filter_map(OptionalFloat::into_option).collect()
    }
}
