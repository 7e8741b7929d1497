use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};

/// Several weights of one product. Backend extensions take no `Vec` of tensors.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum WeightGroup<B: Backend> {
    /// Two of them.
    Two(FloatTensor<B>, FloatTensor<B>),
    /// Three of them.
    Three(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>),
    /// Four of them.
    Four(
        FloatTensor<B>,
        FloatTensor<B>,
        FloatTensor<B>,
        FloatTensor<B>,
    ),
    /// Five of them.
    Five(
        FloatTensor<B>,
        FloatTensor<B>,
        FloatTensor<B>,
        FloatTensor<B>,
        FloatTensor<B>,
    ),
}

/// Weights of a group, at most.
pub(super) const MAX_GROUP: usize = 5;

impl<B: Backend> WeightGroup<B> {
    /// One weight, or more than [`MAX_GROUP`], are no group.
    pub(super) fn new(weights: Vec<FloatTensor<B>>) -> Option<Self> {
        let mut weights = weights.into_iter();
        let mut next = || weights.next();
        let group = match (next()?, next()?, next(), next(), next()) {
            (a, b, None, ..) => Self::Two(a, b),
            (a, b, Some(c), None, _) => Self::Three(a, b, c),
            (a, b, Some(c), Some(d), None) => Self::Four(a, b, c, d),
            (a, b, Some(c), Some(d), Some(e)) => Self::Five(a, b, c, d, e),
        };
        weights.next().is_none().then_some(group)
    }

    pub(super) fn into_vec(self) -> Vec<FloatTensor<B>> {
        match self {
            Self::Two(a, b) => vec![a, b],
            Self::Three(a, b, c) => vec![a, b, c],
            Self::Four(a, b, c, d) => vec![a, b, c, d],
            Self::Five(a, b, c, d, e) => vec![a, b, c, d, e],
        }
    }
}
