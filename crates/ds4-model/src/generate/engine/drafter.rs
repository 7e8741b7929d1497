//! Drafters: what proposes the tokens that a step verifies.

use std::fmt;

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::topk::{Order, Windows, top_k};

use crate::cache::{Cache, CacheConfig, CacheError, CacheLayout};
use crate::config::ModelConfig;
use crate::generate::error::GenerateError;
use crate::model::Model;
use crate::trace::Trace;

/// What the trunk has found out in a step, on the device.
pub(super) struct Verified {
    /// Its streams: `[lanes, rows, n, d_model]`.
    pub(super) streams: Tensor<4>,
    /// The token after each row: accepted drafts, then the next token, then -1: `[lanes, rows]`.
    pub(super) tokens: Tensor<2, Int>,
    /// How many drafts of each lane are accepted: `[lanes]`.
    pub(super) accepted: Tensor<1, Int>,
    /// The row of each lane that the next token follows, among all rows of all lanes: `[lanes]`.
    pub(super) newest: Tensor<1, Int>,
}

/// Proposes tokens from what the trunk computes.
///
/// What it keeps of the texts is a [`Cache`] with the lanes of the trunk's. Between steps, both
/// have the same positions. Everything that it does in a step is recorded with the step, so it may
/// only launch device work.
pub(super) trait Drafter: fmt::Debug + Send {
    /// What drafts, for messages.
    fn name(&self) -> &'static str;

    /// What its cache is like.
    fn layout(&self, config: &ModelConfig) -> CacheLayout;

    /// An empty cache.
    fn new_cache(&self, options: CacheConfig) -> Result<Cache, CacheError>;

    /// Positions that a step of so many drafts adds to the cache, of which only those of accepted
    /// drafts, and one, remain. At least one more than there are drafts.
    fn positions(&self, drafts: usize) -> usize;

    /// Shows it positions of a prompt: the trunk's streams (`[1, positions, n, d_model]`) and the
    /// token after each (`[1, positions]`).
    fn observe(
        &self,
        streams: Tensor<4>,
        next: Tensor<2, Int>,
        cache: &mut Cache,
    ) -> Result<(), GenerateError>;

    /// Drafts `count` tokens to follow on the next token of each lane: i32 `[lanes, count]`, -1
    /// where it has no number to choose by; `None` without a count. The cache keeps the positions
    /// of accepted drafts and one more, on the device.
    fn draft(
        &self,
        verified: Verified,
        cache: &mut Cache,
        count: usize,
    ) -> Result<Option<Tensor<2, Int>>, GenerateError>;
}

/// Drafts with the model's MTP layer, greedily, one token after the other; by its [clustered
/// head](crate::mtp::MtpLayer::flash_head), if it has one.
///
/// Its cache has one row per position whose next token is known.
#[derive(Debug)]
pub(super) struct MtpDrafter<'a> {
    model: &'a Model,
}

impl<'a> MtpDrafter<'a> {
    pub(super) fn new(model: &'a Model) -> Result<Self, GenerateError> {
        match model.mtp {
            Some(_) => Ok(Self { model }),
            None => Err(GenerateError::NoMtpLayer),
        }
    }

    /// The most likely token after each lane's streams (`[lanes, 1, n, d_model]`): `[lanes, 1]`, -1
    /// where no logit is a number above `-inf`.
    fn best(&self, streams: Tensor<4>) -> Result<Tensor<2, Int>, GenerateError> {
        let mtp = self.model.mtp.as_ref();
        if let Some((mtp, head)) = mtp.and_then(|mtp| Some((mtp, mtp.flash_head.as_ref()?))) {
            return Ok(head.greedy_tokens(mtp.hidden(streams))?);
        }
        let logits = self.model.mtp_logits(streams);
        let [lanes, _, vocabulary] = logits.dims();
        let logits = logits.reshape([lanes, vocabulary]);
        let best = top_k(logits, Windows::All, 1, Order::Column);
        let (values, ids) = best.map_err(GenerateError::Logits)?;
        // Not so for NaN, which ranks last, nor for infinity below.
        let is_number = values.greater_equal_elem(f32::MIN);
        Ok(ids.mask_fill(is_number.bool_not(), -1))
    }
}

impl Drafter for MtpDrafter<'_> {
    fn name(&self) -> &'static str {
        "the MTP layer (`mtp.0`)"
    }

    fn layout(&self, config: &ModelConfig) -> CacheLayout {
        CacheLayout::mtp(config)
    }

    fn new_cache(&self, options: CacheConfig) -> Result<Cache, CacheError> {
        self.model.new_mtp_cache(options)
    }

    fn positions(&self, drafts: usize) -> usize {
        // A row for each row of the trunk, and for each draft that another draft follows.
        1 + drafts + drafts.saturating_sub(1)
    }

    fn observe(
        &self,
        streams: Tensor<4>,
        next: Tensor<2, Int>,
        cache: &mut Cache,
    ) -> Result<(), GenerateError> {
        let trace = Trace::off();
        self.model.forward_mtp(streams, next, cache, &trace)?;
        Ok(())
    }

    fn draft(
        &self,
        verified: Verified,
        cache: &mut Cache,
        count: usize,
    ) -> Result<Option<Tensor<2, Int>>, GenerateError> {
        let (model, trace) = (self.model, &Trace::off());
        let Verified {
            streams,
            tokens,
            accepted,
            newest,
        } = verified;
        let [lanes, rows, n, d_model] = streams.dims();
        let streams = model.forward_mtp(streams, tokens, cache, trace)?;
        // What the layer has computed for rejected drafts lies beyond its length, where the next
        // step writes.
        if rows > 1 {
            cache.keep_first(rows - 1, Some(accepted));
        }
        if count == 0 {
            return Ok(None);
        }
        let streams = streams.reshape([lanes * rows, n * d_model]);
        let newest = streams.select(0, newest);
        let mut streams = newest.reshape([lanes, 1, n, d_model]);
        let mut drafts = vec![self.best(streams.clone())?];
        while drafts.len() < count {
            // The layer's own streams replace the trunk's, which do not exist yet.
            let last = drafts[drafts.len() - 1].clone();
            streams = model.forward_mtp(streams, last, cache, trace)?;
            drafts.push(self.best(streams.clone())?);
        }
        if count > 1 {
            cache.keep_first(count - 1, None);
        }
        Ok(Some(Tensor::cat(drafts, 1)))
    }
}
