//! An output head that finds the greedy token without reading the whole vocabulary.
//!
//! The rows of the head are divided into clusters of one size, each with a centroid. A hidden state
//! is compared with all centroids, and then only with the rows of the `probes` best clusters: with
//! 8080 clusters of 16 rows and 256 probes, that is about a tenth of the rows, centroids included.
//! Among those candidates the result is exact. If all clusters are probed, it is the dense head's
//! own. The head suits the drafts of speculative decoding, where a token that the dense head would
//! not choose only lowers the acceptance.
//!
//! # Candidates
//!
//! The score of a cluster is the product of the hidden state and the centroid in f32. The clusters
//! of the `probes` highest scores are chosen; of equal scores, the lower cluster, and NaN ranks as
//! `-inf`. The rows of the chosen clusters are candidates, and the special tokens always are. The
//! logit of a candidate is the product of its row in f32, not rounded to the dtype of the head.
//!
//! A candidate of [`flash_head_argmax`] wins by (logit descending, id ascending): of equal logits,
//! where zeros of either sign are equal, the smallest id. NaN and `-inf` never win: where there is
//! no other logit, the result is -1, like that of [`sample`](crate::sampling::sample). Padding is
//! no candidate.
//!
//! # Source
//!
//! FlashHead, arXiv 2603.14591: retrieval in two stages in place of the dense head.

// With fusion, tensors are of another backend, and it counts on a stream of its own.
mod args;
#[cfg(all(test, feature = "cube", not(feature = "fusion")))]
mod arrival_tests;
mod backend;
mod build;
mod head;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
mod matching;
mod options;
mod reference;
mod seeding;
mod validation;

use burn::backend::Dispatch;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor};

use crate::OpError;
use crate::optional::OptionalInt;
use args::HeadTensors;
pub use args::MAX_TOKENS;
use backend::FlashHeadOps;
pub use build::BuildProgress;
pub use head::FlashHead;
pub use options::{BuildOptions, FlashHeadOptions};

/// The candidates of each hidden state, with their logits.
#[derive(Clone, Debug)]
pub struct FlashHeadCandidates {
    /// `[tokens, probes · capacity + special tokens]`, i32: the rows of the chosen clusters by
    /// ascending cluster and id, and then the special tokens, ascending. Padding is -1, and so is a
    /// special token that is in a chosen cluster.
    pub ids: Tensor<2, Int>,
    /// Like `ids`, f32; `-inf` for padding.
    pub logits: Tensor<2>,
}

/// Returns the token with the highest logit among the [candidates](self#candidates) of each hidden
/// state.
///
/// # Shapes and dtypes
///
/// - `h`: `[tokens, width]`, f32 / f16 / bf16, which need not be the dtype of the head; 1 to
///   [`MAX_TOKENS`] tokens
/// - `probes`: 1 to the number of clusters. With all of them, the result is the argmax of the dense
///   head.
/// - output: `[tokens]`, i32; -1 where no logit of a candidate is a number above `-inf`
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, and a number of tokens or probes out
/// of range.
///
/// # Example
///
/// The better of two clusters, which points along the first axis, has tokens 0 and 2. The best
/// token of all is in the other one.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_ds4_ops::flash_head::{FlashHead, FlashHeadOptions, flash_head_argmax};
///
/// let device = Device::flex();
/// let lm_head = Tensor::<2>::from_data([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]], &device);
/// let means = Tensor::from_data([[1.5, 0.0], [0.0, 2.0]], &device);
/// let head = FlashHead::new(lm_head, &[0, 1, 0, 1], means, FlashHeadOptions::default())?;
/// let h = Tensor::<2>::from_data([[1.0, 0.8]], &device);
/// let token = |probes| flash_head_argmax(h.clone(), &head, probes);
/// assert_eq!(token(1)?.into_data().iter::<i32>().next(), Some(2));
/// assert_eq!(token(2)?.into_data().iter::<i32>().next(), Some(3));
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn flash_head_argmax(
    h: Tensor<2>,
    head: &FlashHead,
    probes: usize,
) -> Result<Tensor<1, Int>, OpError> {
    head.check_call(&h, probes)?;
    let (h, tensors, special, chosen) = probed(h, head, None, probes, 1.0);
    let tokens = Dispatch::flash_head_argmax(h, tensors, special, chosen);
    Ok(Tensor::from_dispatch(tokens))
}

/// Returns the [candidates](self#candidates) of each hidden state with their logits, to sample
/// from.
///
/// A NaN logit stays NaN.
///
/// # Shapes and dtypes
///
/// - `h`, `probes`: as [`flash_head_argmax`]
/// - output: see [`FlashHeadCandidates`]
///
/// # Errors
///
/// As [`flash_head_argmax`].
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::flash_head::{FlashHead, FlashHeadOptions, flash_head_candidates};
///
/// let device = Device::flex();
/// let lm_head = Tensor::<2>::from_data([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]], &device);
/// let means = Tensor::from_data([[1.5, 0.0], [0.0, 2.0]], &device);
/// let head = FlashHead::new(lm_head, &[0, 1, 0, 1], means, FlashHeadOptions::default())?;
/// let h = Tensor::<2>::from_data([[1.0, 0.5]], &device);
/// let candidates = flash_head_candidates(h, &head, 1)?;
/// candidates.ids.into_data().assert_eq(&TensorData::from([[0, 2]]), true);
/// candidates.logits.into_data().assert_eq(&TensorData::from([[1.0_f32, 2.0]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn flash_head_candidates(
    h: Tensor<2>,
    head: &FlashHead,
    probes: usize,
) -> Result<FlashHeadCandidates, OpError> {
    head.check_call(&h, probes)?;
    Ok(candidates(h, head, None, probes, 1.0))
}

/// Returns the logits of the whole vocabulary, `-inf` for ids that are no
/// [candidates](self#candidates), so that whatever follows a dense head can follow this one.
///
/// The result of a hidden state does not depend on the others. On CubeCL devices with kernels, with
/// up to [`MAX_K`](crate::topk::MAX_K) probes or all clusters, nothing is uploaded or read back, so
/// that a call can be part of a recorded graph. That is true of [`flash_head_argmax`], too.
///
/// # Shapes and dtypes
///
/// - `h`, `probes`: as [`flash_head_argmax`]
/// - output: `[tokens, vocabulary]`, f32; a NaN logit stays NaN
///
/// # Errors
///
/// As [`flash_head_argmax`].
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::flash_head::{FlashHead, FlashHeadOptions, flash_head_logits};
///
/// let device = Device::flex();
/// let lm_head = Tensor::<2>::from_data([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]], &device);
/// let means = Tensor::from_data([[1.5, 0.0], [0.0, 2.0]], &device);
/// let head = FlashHead::new(lm_head, &[0, 1, 0, 1], means, FlashHeadOptions::default())?;
/// let h = Tensor::<2>::from_data([[1.0, 0.5]], &device);
/// let logits = flash_head_logits(h, &head, 1)?;
/// let none = f32::NEG_INFINITY;
/// logits.into_data().assert_eq(&TensorData::from([[1.0, none, 2.0, none]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn flash_head_logits(
    h: Tensor<2>,
    head: &FlashHead,
    probes: usize,
) -> Result<Tensor<2>, OpError> {
    head.check_call(&h, probes)?;
    let (h, tensors, special, chosen) = probed(h, head, None, probes, 1.0);
    let logits = Dispatch::flash_head_logits(h, tensors, special, chosen, head.vocabulary());
    Ok(Tensor::from_dispatch(logits))
}

/// Draws clusters and returns the candidates of those. This is for sampling in two stages: first
/// the clusters at random, and then a token from `softmax(logits / temperature)` of their rows.
///
/// The clusters are drawn one after the other without replacement, each from the softmax of
/// `s / temperature` over the remaining clusters. `s` is the product with the mean of a cluster's
/// rows: the centroid times its [norm](FlashHead::norms). To that end, the clusters with the
/// highest `s / temperature - ln(-ln(uniform))` are chosen, with ties as for
/// [candidates](self#candidates). The caller gives the noise, so that a draw can be repeated.
///
/// # Shapes and dtypes
///
/// - `h`, `probes`: as [`flash_head_argmax`]
/// - `temperature`: a finite number above 0
/// - `uniform`: `[tokens, clusters]`, f32, independent and uniform in 0..1. 0 counts as the
///   smallest normal number, and anything else outside as the nearest number inside.
/// - output: see [`FlashHeadCandidates`]
///
/// # Errors
///
/// As [`flash_head_argmax`], for `uniform` too, and for a temperature out of range.
///
/// # Example
///
/// The noise makes the worse of two clusters the one that is drawn.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::flash_head::{FlashHead, FlashHeadOptions, flash_head_draw};
///
/// let device = Device::flex();
/// let lm_head = Tensor::<2>::from_data([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]], &device);
/// let means = Tensor::from_data([[1.5, 0.0], [0.0, 2.0]], &device);
/// let head = FlashHead::new(lm_head, &[0, 1, 0, 1], means, FlashHeadOptions::default())?;
/// let h = Tensor::<2>::from_data([[1.0, 0.5]], &device);
/// // 1.5 and 1.0 are the products with the means; the noise adds 0.37 and 2.25 to them.
/// let uniform = Tensor::from_data([[0.5, 0.9]], &device);
/// let drawn = flash_head_draw(h, &head, 1, 1.0, uniform)?;
/// drawn.ids.into_data().assert_eq(&TensorData::from([[1, 3]]), true);
/// drawn.logits.into_data().assert_eq(&TensorData::from([[0.5_f32, 1.5]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn flash_head_draw(
    h: Tensor<2>,
    head: &FlashHead,
    probes: usize,
    temperature: f64,
    uniform: Tensor<2>,
) -> Result<FlashHeadCandidates, OpError> {
    head.check_call(&h, probes)?;
    head.check_draw(&h, temperature, &uniform)?;
    Ok(candidates(h, head, Some(uniform), probes, temperature))
}

fn candidates(
    h: Tensor<2>,
    head: &FlashHead,
    uniform: Option<Tensor<2>>,
    probes: usize,
    temperature: f64,
) -> FlashHeadCandidates {
    let (h, tensors, special, chosen) = probed(h, head, uniform, probes, temperature);
    let (ids, logits) = Dispatch::flash_head_candidates(h, tensors, special, chosen);
    FlashHeadCandidates {
        ids: Tensor::from_dispatch(ids),
        logits: Tensor::from_dispatch(logits),
    }
}

/// The arguments of the operators. The last ones are the clusters that are probed.
type Probed = (
    FloatTensor<Dispatch>,
    HeadTensors<Dispatch>,
    OptionalInt<Dispatch>,
    IntTensor<Dispatch>,
);

fn probed(
    h: Tensor<2>,
    head: &FlashHead,
    uniform: Option<Tensor<2>>,
    probes: usize,
    temperature: f64,
) -> Probed {
    let (h, tensors, uniform) = (h.into_dispatch(), head.tensors(), uniform.into());
    let chosen =
        Dispatch::flash_head_clusters(h.clone(), tensors.clone(), uniform, probes, temperature);
    (h, tensors, head.special_rows().into(), chosen)
}
