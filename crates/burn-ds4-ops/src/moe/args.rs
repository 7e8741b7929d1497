use burn::backend::{Backend, ExtensionType};

use crate::quant::PackedWeights;

/// [`Experts`](super::Experts) as backends see them. A limit of infinity means no limit.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct PackedExperts<B: Backend> {
    /// `[count, 2·inner, d]`, the gate's rows first.
    #[extension_type]
    pub gate_up: PackedWeights<B>,
    /// `[count, d, inner]`.
    #[extension_type]
    pub down: PackedWeights<B>,
    /// Clamp of the SwiGLU inputs.
    pub limit: f64,
    /// Columns of the blocks in which hidden values are rounded to FP8, if they are.
    pub rounded: Option<usize>,
}
