//! How a decoder chooses a token, on the device.

use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::sampling::{Draws, Sampling, sample, seed_words};

use super::error::GenerateError;
use super::sampler::SamplingConfig;

/// Chooses the next token (`[1, 1]`, negative where there is none) by logits (f32 `[1, 1, vocabulary]`).
pub type Choice = fn(Tensor<3>) -> Tensor<2, Int>;

#[derive(Clone, Debug)]
pub(super) enum Chooser {
    /// As the operator has it, with the words of the seed: `[1, 2]`.
    Sampling(Sampling, Tensor<2, Int>),
    Own(Choice),
}

impl Chooser {
    /// The highest logit, of equal ones that of the lowest id.
    pub(super) fn greedy(device: &Device) -> Self {
        Self::Sampling(Sampling::default(), seed_words(&[0], device))
    }

    pub(super) fn new(sampling: &SamplingConfig, device: &Device) -> Result<Self, GenerateError> {
        sampling.validate()?;
        if !sampling.is_memoryless() {
            return Err(GenerateError::SamplingParameter {
                name: "repetition_penalty",
                value: sampling.repetition_penalty,
                expected: "1, as a decoder does not look at the tokens before",
            });
        }
        let filters = Sampling {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
        };
        let seeds = seed_words(&[sampling.seed], device);
        Ok(Self::Sampling(filters, seeds))
    }

    /// Whether the most likely token is always chosen.
    pub(super) fn is_greedy(&self) -> bool {
        matches!(self, Self::Sampling(sampling, _) if sampling.temperature == 0.0)
    }

    /// The token at `position` (`[1]`) of the text: `[1, 1]`, -1 where no logit is a number above negative infinity.
    pub(super) fn choose(
        &self,
        logits: Tensor<3>,
        position: Tensor<1, Int>,
    ) -> Result<Tensor<2, Int>, GenerateError> {
        match self {
            Self::Own(choose) => Ok(choose(logits)),
            Self::Sampling(sampling, seeds) => {
                let [_, _, vocabulary] = logits.dims();
                let draws = Draws {
                    seeds: seeds.clone(),
                    positions: position,
                };
                let token = sample(logits.reshape([1, vocabulary]), sampling, draws);
                Ok(token.map_err(GenerateError::Logits)?.reshape([1, 1]))
            }
        }
    }
}
