//! How models are loaded.

use burn::tensor::FloatDType;
use burn_ds4_ops::quant::Activations;

/// How to load a model.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadOptions {
    /// Dtype of activations and caches, and of weights that are not packed. What the released model
    /// computes in f32 (routers, compressors, hyper-connections, the output matrix) is always
    /// computed in f32, with matrices in the dtype of their files.
    pub dtype: FloatDType,
    /// Whether to decode FP8 and FP4 weights once, at load, to [`dtype`](Self::dtype), and to widen
    /// 16-bit matrices that are read in f32 to f32. That takes several times the memory, and is
    /// much faster where decoding is slow. Otherwise weights stay as they are, and are decoded as
    /// they are used.
    pub expand: bool,
    /// Whether to load what drafts, if there is any: the MTP layer or the DSpark drafter.
    pub drafter: bool,
    /// Whether key/value rows and indexer channels make the FP8 and FP4 round trips that the
    /// released model was trained with. Those of V4.1 do in any case.
    pub quantized_cache: bool,
    /// What products by FP8 and FP4 weights do to their other operand: nothing, or, as the released
    /// model does, round it to FP8. The low-rank output projection by groups is excepted, whose
    /// weights the released model reads in bf16.
    pub activations: Activations,
}

impl Default for LoadOptions {
    /// f32 activations, packed weights, what drafts, exact products, no round trips.
    fn default() -> Self {
        Self {
            dtype: FloatDType::F32,
            expand: false,
            drafter: true,
            quantized_cache: false,
            activations: Activations::Exact,
        }
    }
}
