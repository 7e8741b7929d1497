//! How a decoder chooses tokens, on the device.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_ds4_ops::sampling::{Draws, Sampling, sample, seed_words};

use super::error::GenerateError;
use super::sampler::SamplingConfig;
use super::target::candidate_logits;
use crate::model::Model;

/// Chooses the next token of each sequence (`[batch, 1]`, negative where there is none) by logits (f32 `[batch, 1, vocabulary]`).
pub type Choice = fn(Tensor<3>) -> Tensor<2, Int>;

/// The choice of all tokens of a text, or of several.
#[derive(Clone, Debug)]
pub(super) struct Chooser {
    sampling: Sampling,
    /// The words of each sequence's seed: `[batch, 2]`. Taken while they are written, so that they are where they are.
    seeds: Option<Tensor<2, Int>>,
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
            seeds: Some(seed_words(&[seed], device)),
            own: None,
        }
    }

    /// The same choice for one text of this seed.
    pub(super) fn with_seed(&self, seed: u64) -> Self {
        Self {
            seeds: Some(seed_words(&[seed], &self.seeds().device())),
            ..self.clone()
        }
    }

    /// Sets the seed of one sequence, in place.
    pub(super) fn set_seed(&mut self, sequence: usize, seed: u64) {
        let seeds = self.seeds.take().expect("they are put back");
        let words = seed_words(&[seed], &seeds.device());
        self.seeds = Some(seeds.slice_assign([sequence..sequence + 1, 0..2], words));
    }

    /// Adds sequences until there are `batch`.
    pub(super) fn widen(&mut self, batch: usize) {
        let seeds = self.seeds();
        let more = batch - seeds.dims()[0];
        let none = seed_words(&vec![0; more], &seeds.device());
        self.seeds = Some(Tensor::cat(vec![seeds, none], 0));
    }

    fn seeds(&self) -> Tensor<2, Int> {
        self.seeds.clone().expect("they are put back")
    }

    /// Leaves the choice to `choose`.
    pub(super) fn set_own(&mut self, choose: Choice) {
        self.own = Some(choose);
    }

    /// Whether the most likely token is always chosen.
    fn is_greedy(&self) -> bool {
        self.own.is_none() && self.sampling.temperature == 0.0
    }

    /// The tokens at `positions` (`[batch]`) of the texts, by what the output matrix takes at those before them (`[batch, 1, d_model]`),
    /// and the logits that they were chosen by (f32 `[batch, 1, vocabulary]`) if they were computed for all tokens.
    ///
    /// A token is -1 where no logit is a number above negative infinity: `[batch, 1]`.
    pub(super) fn choose(
        &self,
        model: &Model,
        hidden: Tensor<3>,
        positions: Tensor<1, Int>,
    ) -> Result<(Tensor<2, Int>, Option<Tensor<3>>), GenerateError> {
        let Some(head) = &model.flash_head else {
            let logits = model.logits_of(hidden);
            let tokens = self.choose_by(logits.clone(), positions)?;
            return Ok((tokens, Some(logits)));
        };
        let [batch, ..] = hidden.dims();
        if self.is_greedy() {
            return Ok((head.greedy_tokens(hidden)?, None));
        }
        let rows = candidate_logits(head, hidden)?.concat();
        let rows = TensorData::new(rows, [batch, 1, head.head().vocabulary()]);
        let logits = Tensor::from_data(rows, &positions.device());
        Ok((self.choose_by(logits, positions)?, None))
    }

    fn choose_by(
        &self,
        logits: Tensor<3>,
        positions: Tensor<1, Int>,
    ) -> Result<Tensor<2, Int>, GenerateError> {
        if let Some(choose) = self.own {
            return Ok(choose(logits));
        }
        let [batch, _, vocabulary] = logits.dims();
        let draws = Draws {
            seeds: self.seeds(),
            positions,
        };
        let tokens = sample(logits.reshape([batch, vocabulary]), &self.sampling, draws);
        let tokens = tokens.map_err(GenerateError::Logits)?;
        Ok(tokens.reshape([batch, 1]))
    }
}
