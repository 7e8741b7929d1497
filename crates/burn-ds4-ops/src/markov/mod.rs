//! Drafts of a Markov head: tokens that are chosen one after the other, each by logits of its own
//! and by the token before it.

mod backend;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use crate::OpError;
use crate::validation::{
    F32, FLOATS, I32, WIDE_INTEGERS, expect_positive, expect_shape, expect_tensor, expect_value,
};
use backend::MarkovOps;

/// Chooses a token for each place, one after the other: the candidate with the highest `logits +
/// output[candidate] · embedding[token before]`, of equal ones that in the lowest column.
///
/// Sums of products are in f32, in an order that depends on the rank alone. So a lane has the same
/// tokens alone and among others.
///
/// # Shapes and dtypes
///
/// - `logits`: `[lanes, places, columns]`, f32
/// - `ids`: `[lanes, places, columns]`, i32: the candidate of each column. Without it, the columns
///   are the vocabulary. One that is no id needs the logit `-inf`.
/// - `tokens`: `[lanes, 1]`, any integer of 32 bits or more: the token before the first place. One
///   that is no id counts as the nearest.
/// - `embedding`, `output`: `[vocabulary, rank]`, f32 / f16 / bf16
/// - output: `[lanes, places]`, i32; -1 where no sum is a number above `-inf`. To the next place
///   that is token 0.
///
/// # Special values
///
/// A sum that is NaN is not chosen. `+inf` is a number.
///
/// # Source
///
/// DeepSeek-V4-Flash-0731 `inference/model.py`, the Markov head of DSpark.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not match, and a rank of 0.
///
/// # Example
///
/// Three tokens and a rank of one. By its logits alone, each place would have token 2.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_ds4_ops::markov::markov_drafts;
///
/// let device = Device::flex();
/// let logits = Tensor::<3>::from_data([[[0.0, 0.0, 1.5], [1.5, 0.0, 2.0]]], &device);
/// // After token e, the logits of tokens 0, 1 and 2 grow by 0, e and -e.
/// let embedding = Tensor::<2>::from_data([[0.0], [1.0], [2.0]], &device);
/// let output = Tensor::<2>::from_data([[0.0], [1.0], [-1.0]], &device);
/// let before = Tensor::from_ints([[2]], &device);
/// let drafts = markov_drafts(logits, None, before, embedding, output)?;
/// // [0, 2, -0.5] after token 2, then [1.5, 1, 1] after token 1.
/// assert_eq!(drafts.into_data().iter::<i32>().collect::<Vec<_>>(), [1, 0]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn markov_drafts(
    logits: Tensor<3>,
    ids: Option<Tensor<3, Int>>,
    tokens: Tensor<2, Int>,
    embedding: Tensor<2>,
    output: Tensor<2>,
) -> Result<Tensor<2, Int>, OpError> {
    check(&logits, ids.as_ref(), &tokens, [&embedding, &output])?;
    let [lanes, places, columns] = logits.dims();
    if lanes * places * columns == 0 {
        let like = (&logits.device(), DType::I32);
        return Ok(Tensor::full([lanes, places], -1, like));
    }
    Ok(Tensor::from_dispatch(Dispatch::markov_drafts(
        logits.into_dispatch(),
        ids.into(),
        tokens.reshape([lanes]).into_dispatch(),
        embedding.into_dispatch(),
        output.into_dispatch(),
    )))
}

fn check(
    logits: &Tensor<3>,
    ids: Option<&Tensor<3, Int>>,
    tokens: &Tensor<2, Int>,
    [embedding, output]: [&Tensor<2>; 2],
) -> Result<(), OpError> {
    let [lanes, places, columns] = logits.dims();
    let [vocabulary, rank] = embedding.dims();
    let like = ("logits", &logits.device());
    expect_tensor(("logits", logits), F32, [lanes, places, columns], like)?;
    expect_tensor(("tokens", tokens), WIDE_INTEGERS, [lanes, 1], like)?;
    for (argument, matrix) in [("embedding", embedding), ("output", output)] {
        expect_tensor((argument, matrix), FLOATS, [vocabulary, rank], like)?;
    }
    match ids {
        None => expect_shape("logits", logits.dims(), [lanes, places, vocabulary])?,
        Some(ids) => expect_tensor(("ids", ids), I32, [lanes, places, columns], like)?,
    }
    expect_positive([("rank", rank)])?;
    let fits = vocabulary > 0 || columns == 0;
    expect_value(fits, "vocabulary", vocabulary, "at least 1")
}
