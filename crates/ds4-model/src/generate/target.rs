//! What the trunk says of the tokens to come, by the output matrix or the clustered head in its place.

use burn::tensor::{Int, Tensor};

use super::distribution::Distribution;
use super::error::GenerateError;
use super::sampler::{Sampler, SamplingConfig};
use crate::flash_head::ProbedHead;
use crate::model::Model;

/// Of each position of a forward call.
#[derive(Debug)]
pub(super) enum Targets {
    /// One logit for each token id.
    Logits(Vec<Vec<f32>>),
    /// The one token that is possible.
    Tokens(Vec<u32>),
}

impl Targets {
    /// Computes and reads back what `sampling` needs, at streams `[1, positions, n, d_model]`.
    pub(super) fn read(
        model: &Model,
        streams: Tensor<4>,
        sampling: &SamplingConfig,
    ) -> Result<Self, GenerateError> {
        let Some(head) = &model.flash_head else {
            return Ok(Self::Logits(read_rows(model.logits(streams))?));
        };
        let hidden = model.hidden(streams);
        if sampling.is_greedy() {
            return Ok(Self::Tokens(read_tokens(head.greedy_tokens(hidden)?)?));
        }
        Ok(Self::Logits(candidate_logits(head, hidden)?))
    }

    /// Of the token after the position at `index`; `history` is what came before it.
    pub(super) fn distribution(
        &self,
        index: usize,
        sampler: &Sampler,
        history: &[u32],
    ) -> Result<Distribution, GenerateError> {
        match self {
            Self::Logits(rows) => sampler.distribution(&rows[index], history),
            Self::Tokens(tokens) => Ok(Distribution::one_hot(tokens[index])),
        }
    }
}

/// Logits of the whole vocabulary, those of tokens that are no candidates being negative infinity.
pub(super) fn candidate_logits(
    head: &ProbedHead,
    hidden: Tensor<3>,
) -> Result<Vec<Vec<f32>>, GenerateError> {
    let candidates = head.candidates(hidden)?;
    let [_, count] = candidates.ids.dims();
    let ids = candidates
        .ids
        .try_into_vec_as::<i32>()
        .map_err(device_error)?;
    let logits = candidates
        .logits
        .try_into_vec_as::<f32>()
        .map_err(device_error)?;
    let rows = ids.chunks(count).zip(logits.chunks(count));
    let rows = rows.map(|(ids, logits)| {
        let mut row = vec![f32::NEG_INFINITY; head.head().vocabulary()];
        for (&id, &logit) in ids.iter().zip(logits) {
            // Padding has a negative id.
            if let Ok(id) = usize::try_from(id) {
                row[id] = logit;
            }
        }
        row
    });
    Ok(rows.collect())
}

/// Reads `[1, positions]` back.
pub(super) fn read_tokens(tokens: Tensor<2, Int>) -> Result<Vec<u32>, GenerateError> {
    let tokens = tokens.try_into_vec_as::<i32>().map_err(device_error)?;
    Ok(tokens.into_iter().map(|token| token as u32).collect())
}

/// Reads `[1, rows, vocabulary]` back, row by row.
pub(super) fn read_rows(logits: Tensor<3>) -> Result<Vec<Vec<f32>>, GenerateError> {
    let [_, _, vocabulary] = logits.dims();
    let values = logits.try_into_vec_as::<f32>().map_err(device_error)?;
    Ok(values.chunks(vocabulary).map(<[f32]>::to_vec).collect())
}

pub(super) fn device_error(error: impl ToString) -> GenerateError {
    GenerateError::Device {
        reason: error.to_string(),
    }
}
