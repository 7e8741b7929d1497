//! The arguments of this family's backend operations.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};

use crate::optional::OptionalFloat;

/// Constants of the coefficients' computation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sinkhorn {
    /// Row and column normalisations of the mixing matrix, the softmax counted as the first.
    pub iterations: usize,
    /// Added to gates, matrix entries and sums (`hc_eps`).
    pub epsilon: f64,
    /// Epsilon of the RMS norm over all streams.
    pub norm_epsilon: f64,
}

/// The output that is to be spread over the streams before they are used.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum PendingOutput<B: Backend> {
    /// Nothing.
    None,
    /// A sub-layer's output.
    Some {
        /// `[tokens, d]`.
        output: FloatTensor<B>,
        /// `[tokens, (2 + n)·n]`.
        coefficients: FloatTensor<B>,
    },
}

/// What is collapsed, and how, as backends see it.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct Mix<B: Backend> {
    /// `[tokens, n, d]`.
    pub streams: FloatTensor<B>,
    /// `[rows, n·d]`.
    pub function: FloatTensor<B>,
    /// f32, one value for each coefficient.
    pub base: FloatTensor<B>,
    /// f32, one value for each coefficient or one for all.
    pub scale: FloatTensor<B>,
    /// The weight of the norm that follows, `[d]`, if there is one.
    #[extension_type]
    pub weight: OptionalFloat<B>,
    /// The epsilon of that norm.
    pub epsilon: f64,
}
