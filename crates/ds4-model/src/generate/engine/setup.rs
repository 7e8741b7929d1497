//! What all lanes of an engine share, and the caches that it makes for them.

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::config::{EngineConfig, fewer_drafts};
use super::drafter::{Drafter, Features};
use super::memory::Budget;
use super::recorder;
use super::scheduler::Size;
use crate::cache::{Cache, CacheConfig, PagePool, Rollback};
use crate::generate::error::{GenerateError, device_error};
use crate::model::Model;
use crate::placement;
use crate::trace::Trace;

/// Changes logits (f32 `[lanes, 1 + drafts, vocabulary]`) before anything else does.
///
/// It may only launch device work: a read, an upload or much memory makes recording fail, or is
/// part of every replay as it was when it was recorded.
pub type LogitsProcessor = fn(Tensor<3>) -> Tensor<3>;

/// What all groups of lanes share.
#[derive(Debug)]
pub(super) struct Setup<'a> {
    pub(super) model: &'a Model,
    pub(super) config: EngineConfig,
    pub(super) drafter: Option<Box<dyn Drafter + 'a>>,
    pub(super) processor: Option<LogitsProcessor>,
    /// Accepted drafts at each position, in place of those that are right.
    pub(super) oracle: Option<Tensor<1, Int>>,
    /// Tokens of a prompt that are processed where what is before them is drawn at random.
    pub(super) random_contexts: Option<usize>,
    /// What a device has left: [`free_memory`](burn_ds4_ops::device::free_memory).
    pub(super) free_memory: fn(&Device) -> Option<u64>,
    /// Where the compressed rows of all texts are.
    pub(super) pool: PagePool,
    /// What all of that may take.
    pub(super) budget: Budget,
}

impl Setup<'_> {
    /// The device that tokens are chosen on, and drafted: that of the last layer.
    pub(super) fn device(&self) -> &Device {
        self.model.placement.last()
    }

    /// The device that a step begins on: that of the first layer.
    pub(super) fn first_device(&self) -> &Device {
        self.model.placement.first()
    }

    /// What a device that results were read from has said. If others have a part of the step, it
    /// may be one of them that has failed: each tells of its own work.
    pub(super) fn device_error(&self, error: impl ToString) -> GenerateError {
        let failed = self.step_devices();
        let failed = failed.iter().filter(|device| device.sync().is_err());
        let mut names: Vec<String> = failed.map(placement::name).collect();
        names.dedup();
        if names.is_empty() {
            names.push(placement::name(self.device()));
        }
        device_error(names.join(", "), error)
    }

    /// The devices that have a part of a step each, in the order of the parts: those of all runs of
    /// layers, or those that have parts of every layer.
    pub(super) fn step_devices(&self) -> Vec<Device> {
        let placement = self.model.trunk_cache().1;
        let runs = placement.runs().iter();
        runs.map(|run| run.device.clone()).collect()
    }

    /// Groups that lanes are divided into, so that each device has a step to work at.
    pub(super) fn ways(&self) -> usize {
        match self.config.overlap {
            true => self.model.placement.runs().len().min(self.config.lanes),
            false => 1,
        }
    }

    /// Layers of the trunk that the drafter [taps](super::drafter::Drafter::taps).
    pub(super) fn taps(&self) -> &[usize] {
        self.drafter.as_ref().map_or(&[], |drafter| drafter.taps())
    }

    /// Whether a step verifies no more drafts than the texts have, which the host has to read then
    /// before it begins the step.
    pub(super) fn leaves_out(&self) -> bool {
        let drafter = self.drafter.as_ref();
        drafter.is_some_and(|drafter| drafter.leaves_out())
    }

    /// Positions that a step of so many drafts needs at most, in any cache.
    pub(super) fn positions(&self, drafts: usize) -> usize {
        let drafter = self.drafter.as_ref();
        drafter.map_or(1, |drafter| drafter.positions(drafts))
    }

    /// Those of the drafter's cache that the host [counts](Drafter::counted).
    pub(super) fn counted(&self, drafts: usize) -> usize {
        let drafter = self.drafter.as_ref();
        drafter.map_or(1, |drafter| drafter.counted(drafts))
    }

    /// Runs the trunk over new tokens of every lane, and returns what it and the drafter go on
    /// with.
    pub(super) fn forward(
        &self,
        token_ids: Tensor<2, Int>,
        cache: &mut Cache,
    ) -> Result<Features, GenerateError> {
        recorder::note_launch();
        let (streams, taps) =
            self.model
                .forward_tapped(token_ids, cache, self.taps(), &Trace::off())?;
        Ok(Features { streams, taps })
    }

    /// The positions of any cache that steps add before the host has counted them, at most: those
    /// of steps that are ahead, of a recording, and of the others that are made with it.
    pub(super) fn uncounted(&self) -> usize {
        let (drafts, runs) = (self.config.drafts, recorder::WARM_UPS + 1);
        let steps = self.config.steps_ahead.saturating_add(runs);
        let others = fewer_drafts(drafts, self.leaves_out()).map(|drafts| runs * (1 + drafts));
        let positions = self.positions(drafts).saturating_mul(steps);
        positions.saturating_add(others.sum())
    }

    /// Positions that a cache can reach: those of the longest text, and of a step.
    pub(super) fn reach(&self) -> usize {
        let model = self.model.config();
        let longest = self.config.longest(model);
        let positions = self.positions(self.config.drafts);
        let reach = longest.saturating_add(positions);
        reach.min(model.max_position_embeddings)
    }

    /// Positions that a text needs pages for before its next steps, which has processed so many
    /// tokens and has `all` in the end.
    pub(super) fn needed(&self, length: usize, all: usize) -> usize {
        let positions = length.saturating_add(self.uncounted());
        positions.min(all).min(self.reach())
    }

    /// What caches of a size are made by. A text may end before the steps that the host counts
    /// late.
    pub(super) fn cache_config(&self, [batch, padding]: Size) -> CacheConfig {
        CacheConfig {
            batch,
            capacity: self.reach(),
            rollback: Rollback::Bounded(self.uncounted().saturating_add(padding)),
            dtype: self.model.embedding.val().dtype().into(),
        }
    }

    /// Empty caches of trunk and drafter.
    pub(super) fn new_caches(&self, size: Size) -> Result<Caches, GenerateError> {
        recorder::note_launch();
        let options = self.cache_config(size);
        let drafter = self.drafter.as_ref();
        let mut trunk = self.model.new_cache_in_pages(options, &self.pool)?;
        trunk.take_no_pages();
        Ok(Caches {
            trunk,
            draft: drafter
                .map(|drafter| drafter.new_cache(options))
                .transpose()?,
        })
    }
}

/// Pages for the texts of an engine, of which there are none yet. None is longer than a text.
pub(super) fn new_pool(model: &Model, config: &EngineConfig) -> PagePool {
    let longest = config.longest(model.config());
    model.new_page_pool(config.page.min(longest))
}

/// Token ids on a device: `[1, ids]`.
pub(super) fn upload(ids: impl Iterator<Item = i32>, device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = ids.collect();
    let count = ids.len();
    Tensor::from_data(TensorData::new(ids, [1, count]), device)
}

/// The caches of the trunk and of the drafter, which are equally long between steps.
#[derive(Clone, Debug)]
pub(super) struct Caches {
    pub(super) trunk: Cache,
    pub(super) draft: Option<Cache>,
}

impl Caches {
    pub(super) fn both(&self) -> impl Iterator<Item = &Cache> {
        std::iter::once(&self.trunk).chain(&self.draft)
    }

    pub(super) fn both_mut(&mut self) -> impl Iterator<Item = &mut Cache> {
        std::iter::once(&mut self.trunk).chain(&mut self.draft)
    }

    /// Caches of these lanes, as [`Cache::with_sequences`] has it.
    pub(super) fn with_sequences(&self, lanes: &[Option<usize>]) -> Result<Self, GenerateError> {
        let draft = self.draft.as_ref();
        Ok(Self {
            trunk: self.trunk.with_sequences(lanes)?,
            draft: draft.map(|draft| draft.with_sequences(lanes)).transpose()?,
        })
    }

    /// Bytes of all that is not in pages.
    pub(super) fn bytes(&self) -> usize {
        self.both().map(Cache::bytes).sum()
    }

    /// Positions of the longest text.
    pub(super) fn longest(&self) -> usize {
        let lengths = self.both().flat_map(Cache::lengths);
        lengths.max().copied().unwrap_or(0)
    }

    pub(super) fn capacity(&self) -> usize {
        self.trunk.capacity()
    }

    /// Lets a text have pages for so many positions.
    pub(super) fn provide(&mut self, lane: usize, positions: usize) -> Result<(), GenerateError> {
        let before = self.trunk.pages_of_sequence(lane);
        self.trunk.provide(lane, positions)?;
        if self.trunk.pages_of_sequence(lane) > before {
            recorder::note_launch();
        }
        Ok(())
    }

    /// Makes lanes from index `lane` on copies of those from index `from` on of others, each as
    /// short as `lengths` says. They have the same pages; where the others are not left for good,
    /// the last one is copied.
    pub(super) fn adopt(
        &mut self,
        lane: usize,
        (source, from): (&Self, usize),
        lengths: &[usize],
        is_left: bool,
    ) -> Result<(), GenerateError> {
        recorder::note_launch();
        for (own, source) in self.both_mut().zip(source.both()) {
            own.adopt_run(lane, source, from, lengths, is_left)?;
        }
        Ok(())
    }
}
