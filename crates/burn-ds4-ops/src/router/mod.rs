//! Routing of tokens to experts (DeepSeek-V4 `Gate`).
//!
//! Both routers compute the weights of the chosen experts in the same way:
//! `s = sqrt(softplus(logits))`, gathered at the chosen ids, divided by their sum and multiplied by
//! the routed scaling factor. They differ in how they find the ids.
//!
//! [`dense_router`] is the whole score router, [`activation_topk`] its second half. On CubeCL
//! devices each operator is one launch, except for [`dense_router`]: that is two, of which the
//! second chooses. The first has the products of few tokens, or is the matrix product of many.
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
use burn::tensor::{Bool, DType, Device, Int, Tensor};

use crate::OpError;
use crate::validation::{
    F32, FLOATS, expect_float, expect_placed, expect_positive, expect_tensor, expect_value,
};
use backend::RouterOps;

/// Most experts of a router, whose ids are i32.
const MAX_EXPERTS: usize = i32::MAX as usize;

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
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData, Tolerance};
/// use burn_ds4_ops::router::sqrt_softplus;
///
/// let logits = Tensor::<1>::from_data([0.0, 100.0, -200.0], &Device::flex());
/// let scores = sqrt_softplus(logits).into_data();
/// // sqrt(ln 2), sqrt(100), exp(-100).
/// let expected = TensorData::from([0.832_554_6_f32, 10.0, 3.720_076e-44]);
/// scores.assert_approx_eq::<f32>(&expected, Tolerance::default());
/// # }
/// ```
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
/// - `scores`: `[.., columns]`, f32 / f16 / bf16
/// - output: values `[.., k]` as in `scores`, positions `[.., k]`, i32
///
/// # Special values
///
/// `-inf` and NaN rank with the lowest finite value, so that they are taken only when nothing else
/// is left, the lower position first. Positions are distinct and in range whatever the row holds.
///
/// # Errors
///
/// [`OpError`] for another dtype, and for a `k` that is 0 or larger than the number of columns.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_ds4_ops::router::topk_select;
///
/// let scores = Tensor::<2>::from_data([[1.0, 3.0, 3.0, 2.0]], &Device::flex());
/// let (values, ids) = topk_select(scores, 3)?;
/// assert_eq!(values.into_data().iter::<f32>().collect::<Vec<_>>(), [3.0, 3.0, 2.0]);
/// assert_eq!(ids.into_data().iter::<i64>().collect::<Vec<_>>(), [1, 2, 3]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn topk_select<const D: usize>(
    scores: Tensor<D>,
    k: usize,
) -> Result<(Tensor<D>, Tensor<D, Int>), OpError> {
    expect_float("scores", &scores)?;
    let mut shape = scores.dims();
    let columns = shape[D - 1];
    expect_k(k, columns, "the number of columns")?;
    let rows = shape[..D - 1].iter().product();
    shape[D - 1] = k;
    if rows == 0 {
        // Burn takes a size of 0 in a new shape for that of the old one.
        let device = scores.device();
        return Ok((
            Tensor::zeros(shape, (&device, scores.dtype())),
            Tensor::zeros(shape, (&device, DType::I32)),
        ));
    }
    let scores: Tensor<2> = scores.reshape([rows, columns]);
    let (values, ids) = Dispatch::topk_select(scores.into_dispatch(), k);
    Ok((
        Tensor::<2>::from_dispatch(values).reshape(shape),
        Tensor::<2, Int>::from_dispatch(ids).reshape(shape),
    ))
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
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, and for a `k` that is 0 or larger
/// than the number of experts.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_ds4_ops::router::activation_topk;
///
/// let logits = Tensor::<2>::from_data([[0.0, 1.0, 1.0]], &Device::flex());
/// let (weights, ids) = activation_topk(logits, None, None, 2, 3.0)?;
/// assert_eq!(ids.into_data().iter::<i64>().collect::<Vec<_>>(), [1, 2]);
/// assert_eq!(weights.into_data().iter::<f32>().collect::<Vec<_>>(), [1.5, 1.5]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn activation_topk(
    logits: Tensor<2>,
    bias: Option<Tensor<1>>,
    padding: Option<Tensor<1, Bool>>,
    k: usize,
    scale: f64,
) -> Result<(Tensor<2>, Tensor<2, Int>), OpError> {
    expect_float("logits", &logits)?;
    let [tokens, experts] = logits.dims();
    expect_k(k, experts, "the number of experts")?;
    let device = ("logits", &logits.device());
    expect_selection([tokens, experts], &bias, &padding, device)?;
    let (weights, ids) = Dispatch::activation_topk(
        logits.into_dispatch(),
        bias.into(),
        padding.into(),
        k,
        scale,
    );
    Ok((Tensor::from_dispatch(weights), Tensor::from_dispatch(ids)))
}

/// The score router: `logits = x · gateᵀ` in f32, then [`activation_topk`].
///
/// On CubeCL devices the result of a token is the same to the bit alone, among up to 127 others and
/// whatever the layout of `x` is. Many more tokens than that are multiplied by the matrix product
/// of the device, which may add in another order.
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
/// # Errors
///
/// As for [`activation_topk`].
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_ds4_ops::router::dense_router;
///
/// let device = Device::flex();
/// let x = Tensor::<2>::from_data([[1.0, 0.0]], &device);
/// let gate = Tensor::<2>::from_data([[0.0, 1.0], [2.0, 0.0], [1.0, 0.0]], &device);
/// // The bias keeps the second expert from being chosen.
/// let bias = Tensor::<1>::from_data([0.0, -5.0, 0.0], &device);
/// let (weights, ids) = dense_router(x, gate, Some(bias), None, 1, 2.5)?;
/// assert_eq!(ids.into_data().iter::<i64>().collect::<Vec<_>>(), [2]);
/// assert_eq!(weights.into_data().iter::<f32>().collect::<Vec<_>>(), [2.5]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "fused_topk")]
pub fn dense_router(
    x: Tensor<2>,
    gate: Tensor<2>,
    bias: Option<Tensor<1>>,
    padding: Option<Tensor<1, Bool>>,
    k: usize,
    scale: f64,
) -> Result<(Tensor<2>, Tensor<2, Int>), OpError> {
    let ([tokens, d_model], [experts, _]) = (x.dims(), gate.dims());
    let like = ("x", &x.device());
    expect_float("x", &x)?;
    expect_tensor(("gate", &gate), FLOATS, [experts, d_model], like)?;
    expect_k(k, experts, "the number of experts")?;
    expect_selection([tokens, experts], &bias, &padding, like)?;
    let (weights, ids) = Dispatch::dense_router(
        x.into_dispatch(),
        gate.into_dispatch(),
        bias.into(),
        padding.into(),
        k,
        scale,
    );
    Ok((Tensor::from_dispatch(weights), Tensor::from_dispatch(ids)))
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
        /// Number of experts, at most `i32::MAX`.
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
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, and where there is no row in
/// `table`, no entry in a row, no expert or more experts than an id can name.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_ds4_ops::router::{HashWeights, hash_route};
///
/// let device = Device::flex();
/// // The two experts of each of three tokens of a vocabulary.
/// let table = Tensor::<2, Int>::from_data([[0, 1], [3, 2], [1, 3]], &device);
/// let text = Tensor::<1, Int>::from_data([2, 1], &device);
/// let (weights, ids) = hash_route(text, table, HashWeights::Uniform { experts: 4 }, 1.0)?;
/// assert_eq!(ids.into_data().iter::<i64>().collect::<Vec<_>>(), [1, 3, 3, 2]);
/// assert_eq!(weights.into_data().iter::<f32>().collect::<Vec<_>>(), [0.5; 4]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn hash_route(
    token_ids: Tensor<1, Int>,
    table: Tensor<2, Int>,
    weights: HashWeights,
    scale: f64,
) -> Result<(Tensor<2>, Tensor<2, Int>), OpError> {
    let ([tokens], [vocabulary, k]) = (token_ids.dims(), table.dims());
    let like = ("token_ids", &token_ids.device());
    expect_placed(("table", &table), [vocabulary, k], like)?;
    let (logits, experts) = match weights {
        HashWeights::Scored(logits) => {
            let [_, experts] = logits.dims();
            expect_tensor(("logits", &logits), FLOATS, [tokens, experts], like)?;
            (Some(logits), experts)
        }
        HashWeights::Uniform { experts } => (None, experts),
    };
    expect_positive([("rows of table", vocabulary), ("columns of table", k)])?;
    let fits = (1..=MAX_EXPERTS).contains(&experts);
    expect_value(fits, "experts", experts, format_args!("1 to {MAX_EXPERTS}"))?;
    let (weights, ids) = Dispatch::hash_route(
        token_ids.into_dispatch(),
        table.into_dispatch(),
        logits.into(),
        experts,
        scale,
    );
    Ok((Tensor::from_dispatch(weights), Tensor::from_dispatch(ids)))
}

/// Checks how many of `columns`, which are `what`, are chosen.
fn expect_k(k: usize, columns: usize, what: &str) -> Result<(), OpError> {
    let fits = (1..=columns).contains(&k);
    expect_value(fits, "k", k, format_args!("1 to {columns}, {what}"))
}

/// Checks what a choice among the scores of `tokens` takes besides these, which must be on the
/// device of another argument.
fn expect_selection(
    [tokens, experts]: [usize; 2],
    bias: &Option<Tensor<1>>,
    padding: &Option<Tensor<1, Bool>>,
    like: (&'static str, &Device),
) -> Result<(), OpError> {
    if let Some(bias) = bias {
        expect_tensor(("bias", bias), F32, [experts], like)?;
    }
    if let Some(padding) = padding {
        expect_placed(("padding", padding), [tokens], like)?;
    }
    Ok(())
}
