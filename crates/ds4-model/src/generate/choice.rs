//! How a decoder chooses a token, on the device.

use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::sampling::{Draws, Sampling, sample, seed_words};

use super::error::GenerateError;
use super::sampler::SamplingConfig;

/// Chooses the next token (`[1, 1]`, negative where there is none) by logits (f32 `[1, 1, vocabulary]`).
pub type Choice = fn(Tensor<3>) -> Tensor<2, Int>;

/// The choice of all tokens of a text.
#[derive(Clone, Debug)]
pub(super) struct Chooser {
    sampling: Sampling,
    /// The words of the seed: `[1, 2]`.
    seeds: Tensor<2, Int>,
    /// In place of all that.
    own: Option<Choice>,
}

impl Chooser {
    /// The highest logit, of equal ones that of the lowest id.
    pub(super) fn greedy(device: &Device) -> Self {
        Self::of(Sampling::default(), 0, device)
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
        Ok(Self::of(filters, sampling.seed, device))
    }

    fn of(sampling: Sampling, seed: u64, device: &Device) -> Self {
        Self {
            sampling,
            seeds: seed_words(&[seed], device),
            own: None,
        }
    }

    /// Leaves the choice to `choose`.
    pub(super) fn set_own(&mut self, choose: Choice) {
        self.own = Some(choose);
    }

    /// Whether the most likely token is always chosen.
    pub(super) fn is_greedy(&self) -> bool {
        self.own.is_none() && self.sampling.temperature == 0.0
    }

    /// The token at `position` (`[1]`) of the text: `[1, 1]`, -1 where no logit is a number above negative infinity.
    pub(super) fn choose(
        &self,
        logits: Tensor<3>,
        position: Tensor<1, Int>,
    ) -> Result<Tensor<2, Int>, GenerateError> {
        if let Some(choose) = self.own {
            return Ok(choose(logits));
        }
        let [_, _, vocabulary] = logits.dims();
        let draws = Draws {
            seeds: self.seeds.clone(),
            positions: position,
        };
        let token = sample(logits.reshape([1, vocabulary]), &self.sampling, draws);
        Ok(token.map_err(GenerateError::Logits)?.reshape([1, 1]))
    }
}
