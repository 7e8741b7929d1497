//! Drafters: what proposes the tokens that a step verifies.

use std::fmt;

use burn::tensor::activation::sigmoid;
use burn::tensor::{Int, Tensor};

use super::config::EngineConfig;
use super::results::LEFT_OUT;
use crate::cache::{Cache, CacheConfig, CacheError, CacheLayout};
use crate::config::ModelConfig;
use crate::dspark::{BlockDrafts, Dspark, most_likely};
use crate::generate::error::GenerateError;
use crate::model::{Model, Passing};
use crate::trace::Trace;

/// What the trunk has computed at new positions.
pub(super) struct Features {
    /// Its streams: `[lanes, rows, n, d_model]`.
    pub(super) streams: Tensor<4>,
    /// Its [taps](Model::forward_tapped) of the layers that the drafter wants.
    pub(super) taps: Option<Tensor<3>>,
}

impl Features {
    /// Those of a whole trunk.
    pub(super) fn of(model: &Model, passing: Passing, positions: [usize; 2]) -> Self {
        let (streams, taps) = passing.into_parts();
        Self {
            streams: model.head.end(streams, positions),
            taps,
        }
    }
}

/// What the trunk has found out in a step, on the device.
pub(super) struct Verified {
    pub(super) features: Features,
    /// The token after each row: accepted drafts, then the next token, then -1: `[lanes, rows]`.
    pub(super) tokens: Tensor<2, Int>,
    /// How many drafts of each lane are accepted: `[lanes]`.
    pub(super) accepted: Tensor<1, Int>,
    /// The row of each lane that the next token follows, among all rows of all lanes: `[lanes]`.
    pub(super) newest: Tensor<1, Int>,
    /// The next token of each lane: `[lanes, 1]`.
    pub(super) next: Tensor<2, Int>,
}

/// Proposes tokens from what the trunk computes.
///
/// What it keeps of the texts is a [`Cache`] with the lanes of the trunk's. Between steps, both
/// have the same positions. Everything that it does in a step is recorded with the step, so it may
/// only launch device work.
pub(super) trait Drafter: fmt::Debug + Send {
    /// What drafts, for messages.
    fn name(&self) -> &'static str;

    /// Layers of the trunk whose outputs it reads, or inputs in V4.1, ascending.
    fn taps(&self) -> &[usize] {
        &[]
    }

    /// What its cache is like.
    fn layout(&self, config: &ModelConfig) -> CacheLayout;

    /// An empty cache.
    fn new_cache(&self, options: CacheConfig) -> Result<Cache, CacheError>;

    /// Positions that a step of so many drafts needs in the cache, at least one more than there are
    /// drafts.
    fn positions(&self, drafts: usize) -> usize;

    /// Those of them that the host counts until it knows how many drafts are accepted: only the
    /// positions of these, and one, remain.
    fn counted(&self, drafts: usize) -> usize {
        self.positions(drafts)
    }

    /// Whether it may leave drafts out, so that a step verifies no more than the texts have.
    fn leaves_out(&self) -> bool {
        false
    }

    /// Shows it positions of a prompt: what the trunk has computed there, and the token after each
    /// (`[1, positions]`).
    fn observe(
        &self,
        features: Features,
        next: Tensor<2, Int>,
        cache: &mut Cache,
    ) -> Result<(), GenerateError>;

    /// Drafts `count` tokens to follow on the next token of each lane: i32 `[lanes, count]`, -1
    /// where it has no number to choose by, [`LEFT_OUT`] for one that is not worth verifying;
    /// `None` without a count. The cache keeps the positions of accepted drafts and one more, on
    /// the device.
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
struct MtpDrafter<'a> {
    model: &'a Model,
}

impl<'a> MtpDrafter<'a> {
    fn new(model: &'a Model) -> Result<Self, GenerateError> {
        match model.mtp {
            Some(_) => Ok(Self { model }),
            None => Err(GenerateError::NoDrafter),
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
        most_likely(logits.reshape([lanes, vocabulary])).map_err(GenerateError::Logits)
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
        features: Features,
        next: Tensor<2, Int>,
        cache: &mut Cache,
    ) -> Result<(), GenerateError> {
        let trace = Trace::off();
        self.model
            .forward_mtp(features.streams, next, cache, &trace)?;
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
            features,
            tokens,
            accepted,
            newest,
            ..
        } = verified;
        let streams = features.streams;
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

/// Drafts with the model's DSpark drafter: a block at once, of which the first tokens are taken.
///
/// Its cache has one row per layer and position that the trunk has processed.
#[derive(Debug)]
struct DsparkDrafter<'a> {
    model: &'a Model,
    dspark: &'a Dspark,
    /// Probability below which a draft is left out, with those after it.
    confidence: f64,
}

impl<'a> DsparkDrafter<'a> {
    fn new(
        model: &'a Model,
        dspark: &'a Dspark,
        config: &EngineConfig,
    ) -> Result<Self, GenerateError> {
        let (drafts, maximum) = (config.drafts, dspark.params.block_size);
        if drafts > maximum {
            return Err(GenerateError::TooManyDrafts { drafts, maximum });
        }
        Ok(Self {
            model,
            dspark,
            confidence: config.draft_confidence,
        })
    }

    /// The drafts, of which those are left out that are too unlikely to be accepted.
    fn confident(&self, drafts: BlockDrafts) -> Tensor<2, Int> {
        if !self.leaves_out() {
            return drafts.ids;
        }
        let (confidence, ids) = (self.dspark.confidence(&drafts), drafts.ids);
        // A draft is verified only after those before it.
        let survival = sigmoid(confidence).cumprod(1);
        let unlikely = survival.lower_elem(self.confidence);
        let left_out = unlikely.bool_and(ids.clone().greater_equal_elem(0));
        ids.mask_fill(left_out, LEFT_OUT)
    }
}

impl Drafter for DsparkDrafter<'_> {
    fn name(&self) -> &'static str {
        "the DSpark drafter (`mtp`)"
    }

    fn taps(&self) -> &[usize] {
        &self.dspark.params.target_layers
    }

    fn layout(&self, config: &ModelConfig) -> CacheLayout {
        CacheLayout::dspark(config)
    }

    fn new_cache(&self, options: CacheConfig) -> Result<Cache, CacheError> {
        self.model.new_dspark_cache(options)
    }

    fn positions(&self, drafts: usize) -> usize {
        // A row for each row of the trunk, and those of a block behind them.
        match drafts {
            0 => 1,
            _ => 1 + drafts + self.dspark.params.block_size,
        }
    }

    fn counted(&self, drafts: usize) -> usize {
        1 + drafts
    }

    fn leaves_out(&self) -> bool {
        self.confidence > 0.0
    }

    fn observe(
        &self,
        features: Features,
        _: Tensor<2, Int>,
        cache: &mut Cache,
    ) -> Result<(), GenerateError> {
        let taps = features.taps.expect("it has said which it reads");
        self.model.append_dspark(taps, cache, &Trace::off())?;
        Ok(())
    }

    fn draft(
        &self,
        verified: Verified,
        cache: &mut Cache,
        count: usize,
    ) -> Result<Option<Tensor<2, Int>>, GenerateError> {
        let trace = Trace::off();
        let [_, rows, _, _] = verified.features.streams.dims();
        self.observe(verified.features, verified.tokens, cache)?;
        // The rows of rejected drafts lie beyond its length, where the next rows are written.
        if rows > 1 {
            cache.keep_first(rows - 1, Some(verified.accepted));
        }
        if count == 0 {
            return Ok(None);
        }
        let next = verified.next;
        let streams = self.model.forward_dspark(next.clone(), cache, &trace)?;
        let streams = streams.narrow(1, 0, count);
        let output = self.model.output.val();
        let drafts = self.dspark.choose(streams, next, output, &trace);
        Ok(Some(self.confident(drafts.map_err(GenerateError::Logits)?)))
    }
}

/// The drafter of the model, if drafts are wanted.
pub(super) fn drafter<'a>(
    model: &'a Model,
    config: &EngineConfig,
) -> Result<Option<Box<dyn Drafter + 'a>>, GenerateError> {
    Ok(match (config.drafts, &model.dspark) {
        (0, _) => None,
        (_, Some(dspark)) => Some(Box::new(DsparkDrafter::new(model, dspark, config)?)),
        (_, None) => Some(Box::new(MtpDrafter::new(model)?)),
    })
}
