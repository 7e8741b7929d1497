use burn::tensor::Tensor;

/// Optional arguments of [`FlashHead::new`](super::FlashHead::new).
#[derive(Clone, Debug, Default)]
pub struct FlashHeadOptions {
    /// Ids that are always candidates, in any order.
    pub special_tokens: Vec<u32>,
    /// `[clusters]`, f32: lengths of the means of the clusters' rows. If they are given, the
    /// centroids are used unchanged, and each must have length 1, or 0 for a mean of 0. Otherwise
    /// the centroids are the means themselves.
    pub norms: Option<Tensor<1>>,
}

/// Options of [`FlashHead::build`](super::FlashHead::build).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildOptions {
    /// The seed of the rows that the clusters start from.
    pub seed: u64,
    /// The most assignments of the rows, at least one.
    pub iterations: usize,
    /// The number of most similar clusters that a row asks, before it asks the clusters that still
    /// have capacity after that: 1 to [`MAX_K`](crate::topk::MAX_K). Fewer proposals take
    /// less time, more make better clusters.
    pub proposals: usize,
    /// Ids that are always candidates, in any order.
    pub special_tokens: Vec<u32>,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            iterations: 20,
            proposals: 32,
            special_tokens: Vec::new(),
        }
    }
}
