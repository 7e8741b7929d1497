//! Routing of tokens to experts (DeepSeek-V4 `Gate`).
//!
//! Both routers weight the chosen experts the same way: `s = sqrt(softplus(logits))`, gathered at the chosen ids,
//! divided by their sum and multiplied by the routed scaling factor. They differ in how the ids are found.

mod reference;

use burn::tensor::{Int, Tensor};

/// `sqrt(softplus(x))`, which neither overflows for large `x` nor loses the small values of very negative `x`: where
/// `exp(x)` underflows, `exp(x / 2)` need not.
///
/// # Shapes and dtypes
///
/// - `logits`: any shape, f32
/// - output: the same
///
/// # Special values
///
/// `+inf` gives `+inf`, `-inf` gives 0, NaN gives NaN.
pub fn sqrt_softplus<const D: usize>(logits: Tensor<D>) -> Tensor<D> {
    reference::sqrt_softplus(logits)
}

/// The `k` largest values of each row with their column ids, sorted by (value descending, id ascending).
///
/// Meant for the small `k` of a router: it takes `k` passes over the row.
///
/// # Shapes and dtypes
///
/// - `scores`: `[rows, columns]`, float
/// - output: values `[rows, k]` as gathered from `scores`, ids `[rows, k]`
///
/// # Special values
///
/// `-inf` and NaN rank with the lowest finite value, so that they are taken only when nothing else is left, the lower id first.
/// Ids are distinct and in range whatever the row holds.
///
/// # Panics
///
/// If `k` is 0 or larger than the number of columns.
pub fn topk_select(scores: Tensor<2>, k: usize) -> (Tensor<2>, Tensor<2, Int>) {
    let [_, columns] = scores.dims();
    assert!(
        (1..=columns).contains(&k),
        "topk_select: k must be in 1..={columns} (the number of columns), got {k}"
    );
    reference::topk_select(scores, k)
}

/// The score router: chooses the `k` experts with the largest `sqrt(softplus(logits)) + bias`.
///
/// The bias takes part in the choice only, never in the weights.
///
/// # Shapes and dtypes
///
/// - `logits`: `[tokens, experts]`, f32
/// - `bias`: `[experts]`, f32
/// - output: weights `[tokens, k]` that sum to `scale`, ids `[tokens, k]`, in the order of [`topk_select`]
///
/// # Special values
///
/// Where the chosen activations sum to no more than about 1e-20, the weights sum to less than `scale`, down to 0; they are
/// finite wherever the chosen logits are. NaN logits are chosen last, and make all weights of their row NaN if they are.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `Gate.forward`; the denominator has 1e-20 added as in Hugging Face's port.
///
/// # Panics
///
/// If the shapes disagree or `k` is 0 or larger than the number of experts.
pub fn activation_topk(
    logits: Tensor<2>,
    bias: Option<Tensor<1>>,
    k: usize,
    scale: f64,
) -> (Tensor<2>, Tensor<2, Int>) {
    let [_, experts] = logits.dims();
    assert!(
        (1..=experts).contains(&k),
        "activation_topk: k must be in 1..={experts} (the number of experts), got {k}"
    );
    if let Some(bias) = &bias {
        assert_eq!(
            bias.dims(),
            [experts],
            "activation_topk: bias must have one entry per expert"
        );
    }
    reference::activation_topk(logits, bias, k, scale)
}

/// The hash router: looks the experts up by token id, weights them like the score router.
///
/// # Shapes and dtypes
///
/// - `token_ids`: `[tokens]`; an id that is no row of `table` is read as the nearest that is
/// - `table`: `[vocabulary, k]`; an entry that is no expert id is read as the nearest that is
/// - `logits`: `[tokens, experts]`, f32
/// - output: weights `[tokens, k]` that sum to `scale`, ids `[tokens, k]`
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `Gate.forward` with `tid2eid`.
///
/// # Panics
///
/// If `token_ids` and `logits` disagree on the number of tokens, or there is no row in `table` or no expert.
pub fn hash_route(
    token_ids: Tensor<1, Int>,
    table: Tensor<2, Int>,
    logits: Tensor<2>,
    scale: f64,
) -> (Tensor<2>, Tensor<2, Int>) {
    assert_eq!(
        token_ids.dims()[0],
        logits.dims()[0],
        "hash_route: token_ids and logits must have the same number of tokens"
    );
    assert!(
        table.dims()[0] > 0 && logits.dims()[1] > 0,
        "hash_route: table must have a row and logits an expert"
    );
    reference::hash_route(token_ids, table, logits, scale)
}
