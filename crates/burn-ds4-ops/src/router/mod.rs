//! Routing of tokens to experts (DeepSeek-V4 `Gate`).
//!
//! Both routers compute the weights of the chosen experts in the same way:
//! `s = sqrt(softplus(logits))`, gathered at the chosen ids, divided by their sum and multiplied by
//! the routed scaling factor. They differ in how they find the ids.
//!
//! [`dense_router`] is the whole score router, [`activation_topk`] its second half. On CubeCL
//! devices each operator is one kernel. [`dense_router`] is two kernels from 9 tokens on, and for
//! thousands of tokens a matrix product and a kernel.
//!
//! # Padding
//!
//! A row that is marked as padding, or whose token id is negative, gets id -1 and weight 0 in every
//! slot, whatever its other inputs hold. No row has any influence on another.

mod backend;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Bool, DType, Int, Tensor};

use backend::RouterOps;

/// `sqrt(softplus(x))`, which neither overflows for large `x` nor loses the small values of very
/// negative `x`: where `exp(x)` underflows, `exp(x / 2)` need not.
///
/// # Shapes and dtypes
///
/// - `logits`: any shape, float
/// - output: the same
///
/// # Special values
///
/// `+inf` gives `+inf`, `-inf` gives 0, NaN gives NaN.
pub fn sqrt_softplus<const D: usize>(logits: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::sqrt_softplus(logits.into_dispatch()))
}

/// The `k` largest values along the last dimension with their positions, sorted by (value
/// descending, position ascending).
///
/// Meant for the small `k` of a router; on CubeCL devices there is a kernel for `k` up to 32.
///
/// # Shapes and dtypes
///
/// - `scores`: `[.., columns]`, float
/// - output: values `[.., k]` as in `scores`, positions `[.., k]`, i32
///
/// # Special values
///
/// `-inf` and NaN rank with the lowest finite value, so that they are taken only when nothing else
/// is left, the lower position first. Positions are distinct and in range whatever the row holds.
///
/// # Panics
///
/// If `k` is 0 or larger than the number of columns.
pub fn topk_select<const D: usize>(scores: Tensor<D>, k: usize) -> (Tensor<D>, Tensor<D, Int>) {
    let mut shape = scores.dims();
    let columns = shape[D - 1];
    assert!(
        (1..=columns).contains(&k),
        "topk_select: k must be in 1..={columns} (the number of columns), got {k}"
    );
    let rows = shape[..D - 1].iter().product();
    let scores: Tensor<2> = scores.reshape([rows, columns]);
    let (values, ids) = Dispatch::topk_select(scores.into_dispatch(), k);
    shape[D - 1] = k;
    (
        Tensor::<2>::from_dispatch(values).reshape(shape),
        Tensor::<2, Int>::from_dispatch(ids).reshape(shape),
    )
}

/// The second half of the score router: chooses the `k` experts with the largest
/// `sqrt(softplus(logits)) + bias`.
///
/// The bias takes part in the choice only, never in the weights.
///
/// # Shapes and dtypes
///
/// - `logits`: `[tokens, experts]`, f32 / f16 / bf16
/// - `bias`: `[experts]`, f32
/// - `padding`: `[tokens]`, true where the row is [padding](self#padding)
/// - output: weights `[tokens, k]`, f32, that sum to `scale`, and ids `[tokens, k]`, i32, in the
///   order of [`topk_select`] of the biased activations
///
/// Any number of experts and any `k` work; on CubeCL devices there is a kernel for `k` up to 32.
/// Without a bias it chooses by the logits themselves, whose order is that of their activations,
/// rounding aside.
///
/// # Special values
///
/// Where the chosen activations sum to no more than about 1e-20, the weights sum to less than
/// `scale`, down to 0; they are finite wherever the chosen logits are. NaN logits are chosen last.
/// If one is chosen, all weights of its row are NaN.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `Gate.forward`. As in Hugging Face's port, 1e-20 is added to
/// the denominator.
///
/// # Panics
///
/// If the shapes disagree, `bias` is not f32, or `k` is 0 or larger than the number of experts.
pub fn activation_topk(
    logits: Tensor<2>,
    bias: Option<Tensor<1>>,
    padding: Option<Tensor<1, Bool>>,
    k: usize,
    scale: f64,
) -> (Tensor<2>, Tensor<2, Int>) {
    let [tokens, experts] = logits.dims();
    check_selection("activation_topk", tokens, experts, &bias, &padding, k);
    let (weights, ids) = Dispatch::activation_topk(
        logits.into_dispatch(),
        bias.into(),
        padding.into(),
        k,
        scale,
    );
    (Tensor::from_dispatch(weights), Tensor::from_dispatch(ids))
}

/// The score router: `logits = x · gateᵀ` in f32, then [`activation_topk`].
///
/// For up to 8 tokens, CubeCL devices whose cubes can pass results to each other (CUDA, Metal,
/// Vulkan) do all of it in one launch. The result of a token does not depend on the others in the
/// batch as long as their number stays on one side of that limit.
///
/// # Shapes and dtypes
///
/// - `x`: `[tokens, d_model]`, f32 / f16 / bf16
/// - `gate`: `[experts, d_model]`, f32 / f16 / bf16; products and sums are f32 whatever the inputs
///   are
/// - `bias`, `padding` and output: as for [`activation_topk`]
///
/// # Special values
///
/// As for [`activation_topk`]; a NaN or infinity in `x` affects the logits of its own row only.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `Gate.forward`.
///
/// # Panics
///
/// As for [`activation_topk`], or if `x` and `gate` disagree on `d_model`.
pub fn dense_router(
    x: Tensor<2>,
    gate: Tensor<2>,
    bias: Option<Tensor<1>>,
    padding: Option<Tensor<1, Bool>>,
    k: usize,
    scale: f64,
) -> (Tensor<2>, Tensor<2, Int>) {
    let ([tokens, d_model], [experts, width]) = (x.dims(), gate.dims());
    assert_eq!(
        d_model, width,
        "dense_router: x has rows of {d_model}, gate has rows of {width}"
    );
    check_selection("dense_router", tokens, experts, &bias, &padding, k);
    let (weights, ids) = Dispatch::dense_router(
        x.into_dispatch(),
        gate.into_dispatch(),
        bias.into(),
        padding.into(),
        k,
        scale,
    );
    (Tensor::from_dispatch(weights), Tensor::from_dispatch(ids))
}

/// How [`hash_route`] weights the experts that it looks up.
#[derive(Clone, Debug)]
// A tensor is large, and there is one of these per call.
#[allow(clippy::large_enum_variant)]
pub enum HashWeights {
    /// As DeepSeek-V4 does: like the score router, by these logits (`[tokens, experts]`, f32 / f16
    /// / bf16).
    Scored(Tensor<2>),
    /// All the same, for a model of `experts` experts.
    Uniform {
        /// Number of experts.
        experts: usize,
    },
}

/// The hash router: looks the experts up by token id.
///
/// # Shapes and dtypes
///
/// - `token_ids`: `[tokens]`, any integer; a negative id marks [padding](self#padding), one past
///   the table is read as the last row
/// - `table`: `[vocabulary, k]`, any integer; an entry that is no expert id is read as the nearest
///   one that is
/// - output: weights `[tokens, k]`, f32, that sum to `scale` (see [`activation_topk`] for
///   activations that underflow), ids `[tokens, k]`, i32, in the order of the table
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `Gate.forward` with `tid2eid`.
///
/// # Panics
///
/// If `token_ids` and the logits disagree on the number of tokens, or there is no row in `table`,
/// no entry in a row or no expert.
pub fn hash_route(
    token_ids: Tensor<1, Int>,
    table: Tensor<2, Int>,
    weights: HashWeights,
    scale: f64,
) -> (Tensor<2>, Tensor<2, Int>) {
    let ([tokens], [vocabulary, k]) = (token_ids.dims(), table.dims());
    let (logits, experts) = match weights {
        HashWeights::Scored(logits) => {
            let [rows, experts] = logits.dims();
            assert_eq!(
                tokens, rows,
                "hash_route: {tokens} token ids, but logits of {rows} tokens"
            );
            (Some(logits), experts)
        }
        HashWeights::Uniform { experts } => (None, experts),
    };
    assert!(
        vocabulary > 0 && k > 0 && experts > 0,
        "hash_route: the table is [{vocabulary}, {k}] and there are {experts} experts; none of \
         these may be 0"
    );
    let (weights, ids) = Dispatch::hash_route(
        token_ids.into_dispatch(),
        table.into_dispatch(),
        logits.into(),
        experts,
        scale,
    );
    (Tensor::from_dispatch(weights), Tensor::from_dispatch(ids))
}

fn check_selection(
    op: &str,
    tokens: usize,
    experts: usize,
    bias: &Option<Tensor<1>>,
    padding: &Option<Tensor<1, Bool>>,
    k: usize,
) {
    assert!(
        (1..=experts).contains(&k),
        "{op}: k must be in 1..={experts} (the number of experts), got {k}"
    );
    if let Some(bias) = bias {
        let [entries] = bias.dims();
        assert_eq!(
            entries, experts,
            "{op}: bias has {entries} entries for {experts} experts"
        );
        assert_eq!(bias.dtype(), DType::F32, "{op}: bias must be f32");
    }
    if let Some(padding) = padding {
        let [entries] = padding.dims();
        assert_eq!(
            entries, tokens,
            "{op}: padding has {entries} entries for {tokens} tokens"
        );
    }
}
