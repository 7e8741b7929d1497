use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};

/// Some tensors of one argument or result. Backend extensions take no `Vec` of tensors.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum TensorList<B: Backend> {
    /// None.
    Zero,
    /// One of them.
    One(FloatTensor<B>),
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

/// Tensors of a group, at most.
pub(crate) const MAX_LIST: usize = 5;

impl<B: Backend> TensorList<B> {
    /// `None` for more than [`MAX_LIST`].
    pub(crate) fn new(tensors: Vec<FloatTensor<B>>) -> Option<Self> {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next();
        let group = match (next(), next(), next(), next(), next()) {
            (None, ..) => Self::Zero,
            (Some(a), None, ..) => Self::One(a),
            (Some(a), Some(b), None, ..) => Self::Two(a, b),
            (Some(a), Some(b), Some(c), None, _) => Self::Three(a, b, c),
            (Some(a), Some(b), Some(c), Some(d), None) => Self::Four(a, b, c, d),
            (Some(a), Some(b), Some(c), Some(d), Some(e)) => Self::Five(a, b, c, d, e),
        };
        tensors.next().is_none().then_some(group)
    }

    /// What `map` makes of each.
    pub(crate) fn map(self, map: impl FnMut(FloatTensor<B>) -> FloatTensor<B>) -> Self {
        let mapped = self.into_vec().into_iter().map(map);
        Self::new(mapped.collect()).expect("as many as before")
    }

    pub(crate) fn into_vec(self) -> Vec<FloatTensor<B>> {
        match self {
            Self::Zero => Vec::new(),
            Self::One(a) => vec![a],
            Self::Two(a, b) => vec![a, b],
            Self::Three(a, b, c) => vec![a, b, c],
            Self::Four(a, b, c, d) => vec![a, b, c, d],
            Self::Five(a, b, c, d, e) => vec![a, b, c, d, e],
        }
    }
}
