//! Penalties for tokens that have occurred, and logit bias.

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};

use super::backend::SamplingOps;
use super::lanes::{BatchParams, LaneTables};
use super::layout::PROMPT;
use super::validation;
use crate::OpError;

/// How often the text of each lane has each token, on the device: `[lanes, vocabulary]`, i32.
///
/// Recorded steps see the counts of all steps before and what [`reset_lane`](Self::reset_lane)
/// writes, unless there is a clone: then the next change copies the counts.
#[derive(Clone, Debug)]
pub struct TokenCounts {
    /// For each token how often the output has it, plus 2^30 if the prompt has it. Taken while they
    /// are written, so that they stay in place.
    words: Option<Tensor<2, Int>>,
}

impl TokenCounts {
    /// Lanes without a text.
    pub fn new(lanes: usize, vocabulary: usize, device: &Device) -> Self {
        Self {
            words: Some(Tensor::zeros([lanes, vocabulary], (device, DType::I32))),
        }
    }

    /// Gives a lane a new text, in place: the tokens of its prompt, and those of its output so far.
    ///
    /// # Errors
    ///
    /// [`OpError`] for a lane that does not exist, and for a token that is no column.
    pub fn reset_lane(
        &mut self,
        lane: usize,
        prompt: &[u32],
        output: &[u32],
    ) -> Result<(), OpError> {
        let [lanes, vocabulary] = self.dims();
        validation::check_lane(lane, lanes)?;
        validation::check_ids("prompt", prompt, vocabulary)?;
        validation::check_ids("output", output, vocabulary)?;
        let mut row = vec![0; vocabulary];
        for &token in prompt {
            row[token as usize] = PROMPT as i32;
        }
        for &token in output {
            row[token as usize] += 1;
        }
        if vocabulary == 0 {
            return Ok(());
        }
        let words = self.words.take().expect("they are put back");
        let row = TensorData::new(row, [1, vocabulary]);
        let row = Tensor::from_data(row, (&words.device(), DType::I32));
        self.words = Some(words.slice_assign([lane..lane + 1, 0..vocabulary], row));
        Ok(())
    }

    /// Counts new tokens of every lane as output, in place: `[lanes, tokens]`, any integer of 32
    /// bits or more. What is no column is not counted. So
    /// [`VerifiedDrafts::tokens`](super::VerifiedDrafts::tokens) counts the accepted drafts and the
    /// token after them, and a vacant lane may have -1.
    ///
    /// # Errors
    ///
    /// [`OpError`] for a dtype, shape or device that does not match.
    pub fn count(&mut self, tokens: Tensor<2, Int>) -> Result<(), OpError> {
        validation::check_tokens(&tokens, &self.words())?;
        let ([_, vocabulary], [lanes, count]) = (self.dims(), tokens.dims());
        if lanes == 0 || count == 0 || vocabulary == 0 {
            return Ok(());
        }
        let words = self.words.take().expect("they are put back");
        let words = Dispatch::count_tokens(words.into_dispatch(), tokens.into_dispatch());
        self.words = Some(Tensor::from_dispatch(words));
        Ok(())
    }

    /// Lanes and columns.
    pub fn dims(&self) -> [usize; 2] {
        self.words().dims()
    }

    pub(super) fn words(&self) -> Tensor<2, Int> {
        self.words.clone().expect("they are put back")
    }
}

/// Adds the logit bias of each lane and applies its penalties, in this order: bias, repetition,
/// frequency, presence. That is what vLLM does before the temperature.
///
/// Row `i` of a lane follows the first `i` drafts, which therefore count as output, in addition to
/// what `counts` has.
///
/// A row is as before, to the bit, where its lane has neither. With logits in f32 that nobody else
/// holds, only logits that change are read and written.
///
/// # Shapes and dtypes
///
/// - `logits`: `[lanes, drafts + 1, vocabulary]`, f32 / f16 / bf16
/// - `drafts`: `[lanes, drafts]`, any integer of 32 bits or more; what is no column does not count
/// - output: the shape of `logits`, f32
///
/// # Rounding
///
/// Each step is rounded to f32 on its own, on every device, so that results are the same to the bit
/// wherever a division is rounded correctly. Shader languages do not guarantee that, which matters
/// for a repetition penalty.
///
/// # NaN and infinity
///
/// NaN stays NaN, and infinite logits stay what they are, except that `+inf` with a bias of `-inf`
/// is NaN, no candidate. A result beyond f32 is infinite.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not match, and more than
/// [`MAX_COLUMNS`](super::MAX_COLUMNS) columns.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor, TensorData};
/// use burn_ds4_ops::sampling::{BatchParams, LaneParams, Penalties, TokenCounts, apply_penalties};
///
/// let device = Device::flex();
/// let penalties = Penalties { frequency: 0.5, ..Penalties::default() };
/// let lane = LaneParams { penalties, logit_bias: vec![(2, 1.0)], ..LaneParams::default() };
/// let params = BatchParams::new(&[lane], 3, &device)?;
/// let mut counts = TokenCounts::new(1, 3, &device);
/// // The text so far has the token 1 twice.
/// counts.reset_lane(0, &[0], &[1, 1])?;
/// let logits = Tensor::<3>::from_data([[[4.0, 4.0, 4.0]]], &device);
/// let no_drafts = Tensor::<2, Int>::zeros([1, 0], &device);
/// let logits = apply_penalties(logits, no_drafts, &params, &counts)?;
/// logits.into_data().assert_eq(&TensorData::from([[[4.0_f32, 3.0, 5.0]]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn apply_penalties(
    logits: Tensor<3>,
    drafts: Tensor<2, Int>,
    params: &BatchParams,
    counts: &TokenCounts,
) -> Result<Tensor<3>, OpError> {
    params.check(&logits)?;
    validation::check_drafts(&logits, &drafts)?;
    validation::check_counts(&logits, &counts.words())?;
    let shape = logits.dims();
    let [lanes, rows, columns] = shape;
    let logits = logits.cast(FloatDType::F32);
    if lanes == 0 || columns == 0 {
        return Ok(logits);
    }
    let LaneTables { floats, words } = params.tables();
    let logits = Dispatch::apply_penalties(
        logits.reshape([lanes * rows, columns]).into_dispatch(),
        (rows > 1).then_some(drafts).into(),
        counts.words().into_dispatch(),
        floats.into_dispatch(),
        words.into_dispatch(),
    );
    Ok(Tensor::<2>::from_dispatch(logits).reshape(shape))
}
