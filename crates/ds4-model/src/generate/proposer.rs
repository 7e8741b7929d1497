//! The proposer of speculative decoding: drafts tokens with the MTP layer.

use burn::tensor::Tensor;

use super::driver::ids_tensor;
use super::error::GenerateError;
use super::sampler::greedy_token;
use super::target::{read_rows, read_tokens};
use crate::cache::{Cache, CacheConfig, Rollback};
use crate::config::ModelConfig;
use crate::model::Model;
use crate::trace::Trace;

/// Drafts with the model's MTP layer, greedily; by its [clustered head](crate::mtp::MtpLayer::flash_head), if it has one.
///
/// The layer has a cache of its own, one row per position whose next token is known. It must have seen every position of the text:
/// [`observe`](Self::observe) hands it the trunk's streams as they are computed.
#[derive(Debug)]
pub struct MtpProposer<'a> {
    model: &'a Model,
    cache: Cache,
    /// Trunk streams of positions whose next token the layer has not seen: `[1, pending, n, d_model]`.
    pending: Option<Tensor<4>>,
}

impl<'a> MtpProposer<'a> {
    /// Makes a proposer of at most `drafts` tokens a round.
    ///
    /// # Errors
    ///
    /// If the model has no MTP layer.
    pub fn new(
        model: &'a Model,
        config: &ModelConfig,
        drafts: usize,
    ) -> Result<Self, GenerateError> {
        if model.mtp.is_none() {
            return Err(GenerateError::NoMtpLayer);
        }
        let options = CacheConfig {
            // Drafts may be made at positions of others that have fallen, before it is known how many have.
            rollback: Rollback::Bounded(drafts.saturating_mul(2)),
            ..CacheConfig::default()
        };
        Ok(Self {
            model,
            cache: model.new_mtp_cache(config, options)?,
            pending: None,
        })
    }

    /// Hands over the trunk's streams (`[1, positions, n, d_model]`) at the positions after those already handed over.
    pub fn observe(&mut self, streams: Tensor<4>) {
        self.pending = Some(match self.pending.take() {
            Some(pending) => Tensor::cat(vec![pending, streams], 1),
            None => streams,
        });
    }

    /// Runs the layer over positions whose next tokens are `next`, without drafting.
    ///
    /// # Errors
    ///
    /// If more tokens are given than positions were observed, or the cache is full.
    pub fn advance(&mut self, next: &[u32]) -> Result<(), GenerateError> {
        if !next.is_empty() {
            self.run(next)?;
        }
        Ok(())
    }

    /// Drafts `count` tokens to follow `next`, the tokens after the positions that were observed since the last draft.
    ///
    /// # Errors
    ///
    /// If the number of tokens in `next` is not that of the observed positions, or the cache is full.
    pub fn draft(&mut self, next: &[u32], count: usize) -> Result<Vec<u32>, GenerateError> {
        if next.is_empty() || count == 0 {
            return Ok(Vec::new());
        }
        let mut drafts = Vec::with_capacity(count);
        let mut streams = self.run(next)?;
        loop {
            let draft = self.best(streams.clone())?;
            drafts.push(draft);
            if drafts.len() == count {
                break;
            }
            // The layer's own streams stand in for the trunk's, which do not exist yet.
            let token = ids_tensor(&[draft], &streams.device());
            streams = self
                .model
                .forward_mtp(streams, token, &mut self.cache, &Trace::off())?;
        }
        self.cache.truncate(count - 1)?;
        Ok(drafts)
    }

    /// The layer's cache, for cycles that draft by themselves.
    pub(super) fn cache_mut(&mut self) -> &mut Cache {
        &mut self.cache
    }

    /// The layer's cache as it is.
    pub(super) fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Runs the layer over the oldest pending positions, and returns its streams at the last: `[1, 1, n, d_model]`.
    fn run(&mut self, next: &[u32]) -> Result<Tensor<4>, GenerateError> {
        let observed = self.pending.as_ref().map_or(0, |pending| pending.dims()[1]);
        let pending = match self.pending.take() {
            Some(pending) if next.len() <= observed => pending,
            pending => {
                self.pending = pending;
                return Err(GenerateError::NotObserved {
                    tokens: next.len(),
                    positions: observed,
                });
            }
        };
        let [batch, _, n, d_model] = pending.dims();
        let count = next.len();
        if count < observed {
            let rest = pending
                .clone()
                .slice([0..batch, count..observed, 0..n, 0..d_model]);
            self.pending = Some(rest);
        }
        let input = pending.slice([0..batch, 0..count, 0..n, 0..d_model]);
        let next = ids_tensor(next, &input.device());
        let streams = self
            .model
            .forward_mtp(input, next, &mut self.cache, &Trace::off())?;
        Ok(streams.slice([0..batch, count - 1..count, 0..n, 0..d_model]))
    }

    fn best(&self, streams: Tensor<4>) -> Result<u32, GenerateError> {
        let mtp = self.model.mtp.as_ref();
        if let Some((mtp, head)) = mtp.and_then(|mtp| Some((mtp, mtp.flash_head.as_ref()?))) {
            let tokens = read_tokens(head.greedy_tokens(mtp.hidden(streams))?)?;
            return Ok(tokens[0]);
        }
        let rows = read_rows(self.model.mtp_logits(streams))?;
        greedy_token(&rows[0])
    }
}
