//! The argument of this family's backend operations.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

/// The most hidden states that the operators of this family take.
pub const MAX_TOKENS: usize = 16;

/// A clustered head as backends see it.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct HeadTensors<B: Backend> {
    /// `[clusters · capacity, width]`.
    pub weight: FloatTensor<B>,
    /// `[clusters, width]`, in the dtype of the weight.
    pub centroids: FloatTensor<B>,
    /// `[clusters]`, f32.
    pub norms: FloatTensor<B>,
    /// `[clusters, capacity]`, i32; -1 for padding. The first entry of a cluster is never padding.
    pub ids: IntTensor<B>,
    /// `[clusters]`, i32: the numbers of all clusters, which need not be uploaded then.
    pub clusters: IntTensor<B>,
}
