//! An engine, and what it tells of itself.

use burn::tensor::{Device, Tensor, TensorData};
use burn_ds4_ops::device::free_memory;
use burn_ds4_ops::matmul::INVARIANT_ROWS;
use burn_ds4_ops::sampling;
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::config::EngineConfig;
use super::drafter::drafter;
use super::group::Group;
use super::lanes::{Lanes, executor};
use super::memory::Budget;
use super::prefix::PrefixCache;
use super::scheduler::{GroupId, Limits, Scheduler};
use super::setup::{Caches, LogitsProcessor, Setup, new_pool};
use super::text::{Output, Texts};
use crate::flash_head::ProbedHead;
use crate::generate::error::GenerateError;
use crate::generate::request_id::RequestId;
use crate::generate::stats::SpeculativeStats;
use crate::graph::Refusal;
use crate::model::Model;

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Those of them that the model has processed.
    pub processed: usize,
    /// Tokens that were generated.
    pub generated: usize,
}

/// Steps that are recorded at present, and the memory that they take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphUsage {
    /// Recorded steps: for each group of lanes, of up to four kinds of steps, those that were
    /// replayed last, and for each device that has layers. They are fewer where there was no memory
    /// for a text or for another recording. With [`EngineConfig::draft_confidence`], one for each
    /// number of drafts that is verified.
    pub recordings: usize,
    /// Bytes by which the memory that Burn has reserved on the device grew, from before the steps
    /// that precede a recording until after it. That counts the workspace and the graph's own
    /// tensors, and whatever other threads have allocated meanwhile. It does not count what was
    /// reserved already, nor what the driver keeps of a graph. `None` where the device does not
    /// tell.
    pub bytes: Option<u64>,
}

/// Decodes texts that join and leave at any time.
///
/// A [step](Self::step) chooses the next tokens of all texts: one for each, and one more for each
/// draft that is right. Tokens are chosen, verified and fed to the next step on the device. The
/// host reads them later. Where the device can, a step is recorded as a graph, which is replayed
/// for as long as it fits. If that fails, a warning is logged, and steps are launched from then on.
/// The tokens are the same either way. Where a device cannot tell what the failed work would only
/// have read (CUDA), the weights count as failed with it: the next step is an error that says so.
///
/// # Which tokens
///
/// Up to 16 tokens a step, a text is the same to the bit whatever the drafts are and whatever else
/// runs: chosen from the same logits, or drawn by the same seed. With more, the logits are the same
/// up to rounding.
///
/// That is true of the same request to the same build on the same device, with the same
/// [`EngineConfig::prefill_chunk`], and without prefixes that are reused, or with
/// [`EngineConfig::exact_prefix`]. A chunk of a prompt has more than 16 positions, which are summed
/// in another order than those of a step. So a text that is sent back as a part of a prompt is
/// processed anew up to rounding only, and what is then drawn by a seed may differ from what would
/// have followed at once. Positions that are removed from a [`Cache`](crate::cache::Cache) and
/// computed again have the same bits under the condition that
/// [`truncate_to`](crate::cache::Cache::truncate_to) names.
///
/// # Lanes
///
/// Texts are decoded side by side, one lane each. The number of lanes doubles at least when a text
/// joins and none is vacant; when few texts are left for some time, it becomes smaller again. The
/// cost of a step is that of all lanes, and vacant ones count as tokens of a step, too. Where a
/// text becomes longer and there is no memory for it, the youngest texts of the lowest
/// [priority](super::Request::priority) wait, and are processed again later. What texts of any
/// lengths have beyond a window is in pages of [`EngineConfig::page`] positions, which they take
/// one by one as they become longer.
///
/// With [`EngineConfig::overlap`], where the model's layers are on several devices, lanes are in as
/// many groups, so that all devices have a step to work at. Each group takes a forward call.
///
/// # Constraints
///
/// A text with a [constraint](super::Request::constraint) has only tokens that it allows. The host
/// has to read the tokens of a step before it can say what the next one may choose. So steps of
/// lanes among which one has a constraint never run ahead. What other texts have is not changed by
/// that.
///
/// # Prompts
///
/// Prompts are processed as they came, in chunks that begin at multiples of
/// [`EngineConfig::prefill_chunk`], no more tokens than that between two steps. Short ones that
/// wait take forward calls together, of up to 16 tokens, or more where steps have more than 16
/// tokens anyway; those that are the same and come one after the other are processed once. The last
/// token of a prompt is part of the text's first step.
///
/// # Example
///
/// ```
/// use ds4_model::generate::{Engine, EngineConfig, GenerateError, Request};
/// use ds4_model::model::Model;
///
/// /// Continues each prompt by the 20 tokens that are most likely, all at once.
/// fn continuations(model: &Model, prompts: &[&[u32]]) -> Result<Vec<Vec<u32>>, GenerateError> {
///     let mut engine = Engine::new(model, EngineConfig::default())?;
///     let requests = prompts.iter().map(|prompt| engine.add(Request::new(prompt, 20)));
///     let requests = requests.collect::<Result<Vec<_>, _>>()?;
///     let mut texts = vec![Vec::new(); prompts.len()];
///     while !engine.is_idle() {
///         for output in engine.step()? {
///             let text = requests.iter().position(|request| *request == output.request);
///             texts[text.expect("a request from above")].push(output.token?);
///         }
///     }
///     Ok(texts)
/// }
/// ```
#[doc(alias = "continuous_batching")]
#[derive(Debug)]
pub struct Engine<'a> {
    pub(super) groups: Vec<Group>,
    pub(super) texts: Texts,
    pub(super) scheduler: Scheduler,
    pub(super) prefixes: PrefixCache,
    /// Tokens that no step has returned yet.
    pub(super) outputs: Vec<Output>,
    pub(super) stats: SpeculativeStats,
    pub(super) prompt_calls: usize,
    /// Replays of groups that are gone.
    pub(super) replays: usize,
    /// Why one of them had no graphs.
    pub(super) refusal: Option<String>,
    /// Why a recording has failed, until a step was launched after it.
    pub(super) spoiled: Option<Refusal>,
    pub(super) requests: u64,
    pub(super) setup: Setup<'a>,
}

impl<'a> Engine<'a> {
    /// Makes an engine without texts.
    ///
    /// # Errors
    ///
    /// If a field of `config` is outside its range, drafts are wanted from a model without a
    /// drafter, the vocabulary is larger than what can be chosen from, or a clustered head is of
    /// another vocabulary.
    pub fn new(model: &'a Model, config: EngineConfig) -> Result<Self, GenerateError> {
        Self::with_memory(model, config, free_memory)
    }

    /// An engine that asks for the free memory of devices like this.
    pub(super) fn with_memory(
        model: &'a Model,
        config: EngineConfig,
        free_memory: fn(&Device) -> Option<u64>,
    ) -> Result<Self, GenerateError> {
        config.validate()?;
        check_vocabulary(model)?;
        let drafter = drafter(model, &config)?;
        let pool = new_pool(model, &config);
        let mut setup = Setup {
            model,
            config,
            drafter,
            processor: None,
            oracle: None,
            random_contexts: None,
            free_memory,
            pool,
            budget: Budget::NONE,
        };
        let free = setup.free_for_caches()?;
        let bound = &mut setup.config.cache_bytes;
        if let (Some(wanted), Some(free)) = (*bound, free)
            && wanted > free
        {
            log::warn!("caches take {free} bytes at most, which are left, not {wanted}");
        }
        *bound = [*bound, free].into_iter().flatten().min();
        setup.budget = setup.divided()?;
        setup.begin_tables();
        let config = &setup.config;
        Ok(Self {
            groups: Vec::new(),
            texts: Texts::new(),
            scheduler: Scheduler::new(limits(&setup)),
            prefixes: PrefixCache::new(config.prefix_bytes, config.exact_prefix),
            outputs: Vec::new(),
            stats: SpeculativeStats::default(),
            prompt_calls: 0,
            replays: 0,
            refusal: None,
            spoiled: None,
            requests: 0,
            setup,
        })
    }

    /// Lets `processor` change the logits before anything else does.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, s};
    /// use ds4_model::generate::{Engine, EngineConfig, Request};
    /// use ds4_model::pipeline::Pipeline;
    ///
    /// let pipeline = Pipeline::open("../../assets/ds4-tiny".as_ref(), &Device::flex())?;
    /// // No token below 500.
    /// let mut engine = Engine::new(&pipeline.model, EngineConfig::default())?
    ///     .with_logits_processor(|logits| {
    ///         logits.slice_fill(s![.., .., ..500], f32::NEG_INFINITY)
    ///     });
    /// engine.add(Request::new(&pipeline.encode("And God said,")?, 4))?;
    /// while !engine.is_idle() {
    ///     for output in engine.step()? {
    ///         assert!(output.token? >= 500);
    ///     }
    /// }
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_logits_processor(mut self, processor: LogitsProcessor) -> Self {
        self.setup.processor = Some(processor);
        self
    }

    /// Takes rows drawn at random for those of a prompt, of which no more than the last
    /// `processed` tokens are processed, besides that of the first step.
    ///
    /// For contexts that would take long to compute, where only time counts or what is compiled.
    /// The text means nothing.
    #[must_use]
    pub fn with_random_contexts(mut self, processed: usize) -> Self {
        self.setup.random_contexts = Some(processed);
        self.scheduler.limits = limits(&self.setup);
        self
    }

    /// Accepts each draft with a probability of `rate`, whether it is right or not, by random
    /// numbers of `seed`.
    ///
    /// For measurements with random weights, whose drafts are never right. The text means nothing.
    #[must_use]
    pub fn with_acceptance(mut self, rate: f64, seed: u64) -> Self {
        let positions = self.scheduler.limits.reach;
        let drafts = self.setup.config.drafts;
        let mut random = ChaCha12Rng::seed_from_u64(seed);
        let mut stands = || (random.next_u32() as f64) < rate * (1u64 << 32) as f64;
        let accepted = |_| (0..drafts).take_while(|_| stands()).count() as i32;
        let accepted: Vec<i32> = (0..=positions).map(accepted).collect();
        let accepted = TensorData::new(accepted, [positions + 1]);
        self.setup.oracle = Some(Tensor::from_data(accepted, self.setup.device()));
        self
    }

    /// Texts that are being decoded.
    pub fn running(&self) -> usize {
        self.scheduler.running()
    }

    /// Texts whose prompts are not in a lane yet.
    pub fn waiting(&self) -> usize {
        self.scheduler.waiting()
    }

    /// Whether no token is left to return, until another text is added.
    pub fn is_idle(&self) -> bool {
        self.running() == 0 && self.waiting() == 0 && self.outputs.is_empty()
    }

    /// How far a request is, unless it has ended.
    pub fn progress(&self, request: RequestId) -> Option<Progress> {
        let text = self.texts.get(&request)?;
        Some(Progress {
            prompt: text.prompt,
            processed: text.processed,
            generated: text.tokens.len() - text.prompt,
        })
    }

    /// Lanes that there are.
    pub fn lanes(&self) -> usize {
        self.groups.iter().map(|group| group.lanes.lanes()).sum()
    }

    /// Positions of the pages that a request has, once it has a lane.
    pub fn capacity(&self, request: RequestId) -> Option<usize> {
        let (group, lane) = self.lane(request)?;
        let trunk = &self.group(group).lanes.caches().trunk;
        Some(trunk.pages_of_sequence(lane) * self.setup.pool.positions())
    }

    /// Bytes that the caches of all lanes take, and of prompts in progress: the pages that texts
    /// have, those that are kept among them, and what is not in pages.
    pub fn cache_bytes(&self) -> usize {
        let groups = self.groups.iter();
        let lanes: usize = groups.map(|group| group.lanes.caches().bytes()).sum();
        let prompts = self.texts.values().filter_map(|text| text.caches.as_ref());
        let pool = &self.setup.pool;
        let page: usize = pool.page_bytes().iter().map(|(_, bytes)| bytes).sum();
        let pages = (pool.len() - pool.free()) * page;
        lanes + prompts.map(Caches::bytes).sum::<usize>() + pages
    }

    /// The most bytes that these may be: [`EngineConfig::cache_bytes`], or what was left on the
    /// devices when the engine was made.
    pub fn cache_limit(&self) -> Option<usize> {
        self.setup.config.cache_bytes
    }

    /// The logits that the last token of a request was chosen by, an entry for each token. `None`
    /// unless the request has a lane, the token came from the last step, none runs ahead (see
    /// [`EngineConfig::steps_ahead`]), and logits were computed for all tokens.
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn logits(&self, request: RequestId) -> Result<Option<Vec<f32>>, GenerateError> {
        let Some((group, lane)) = self.lane(request) else {
            return Ok(None);
        };
        let lanes = &self.group(group).lanes;
        let row = self.texts.get(&request).and_then(|text| text.last_row);
        row.map_or(Ok(None), |row| lanes.logits(&self.setup, lane, row))
    }

    /// Drafts made and accepted so far.
    pub fn stats(&self) -> &SpeculativeStats {
        &self.stats
    }

    /// Forward calls over tokens of prompts.
    pub fn prompt_calls(&self) -> usize {
        self.prompt_calls
    }

    /// Steps that were replayed.
    pub fn replays(&self) -> usize {
        let groups = self.groups.iter();
        self.replays + groups.map(|group| group.lanes.replays()).sum::<usize>()
    }

    /// Why there are no graphs, though they were wanted and the device has them.
    pub fn graph_refusal(&self) -> Option<&str> {
        let mut groups = self.groups.iter();
        let refusal = groups.find_map(|group| group.lanes.refusal());
        refusal.or(self.refusal.as_deref())
    }

    /// What is recorded at present.
    pub fn graphs(&self) -> GraphUsage {
        let groups = || self.groups.iter().map(|group| &group.lanes);
        let recorded = groups().filter(|lanes| lanes.recordings() > 0);
        GraphUsage {
            recordings: groups().map(Lanes::recordings).sum(),
            bytes: recorded.map(Lanes::graph_bytes).sum(),
        }
    }

    pub(super) fn index(&self, id: GroupId) -> usize {
        let index = self.groups.iter().position(|group| group.id == id);
        index.expect("a group that was made")
    }

    pub(super) fn group(&self, id: GroupId) -> &Group {
        &self.groups[self.index(id)]
    }

    /// Group and lane of a text that is decoded.
    pub(super) fn lane(&self, request: RequestId) -> Option<(GroupId, usize)> {
        self.groups.iter().find_map(|group| {
            let mut lanes = group.texts.iter();
            let lane = lanes.position(|text| *text == Some(request))?;
            Some((group.id, lane))
        })
    }
}

/// What texts are scheduled by.
fn limits(setup: &Setup) -> Limits {
    let config = &setup.config;
    let chunk = config.prefill_chunk;
    Limits {
        lanes: config.lanes,
        ways: setup.ways(),
        chunk,
        call: executor(setup.model).call_tokens().min(chunk),
        lane_rows: 1 + config.drafts,
        exact_rows: INVARIANT_ROWS.min(chunk),
        marks: config.prefix_bytes > 0 && !config.exact_prefix,
        page: setup.pool.positions(),
        shares: setup.random_contexts.is_none(),
        ahead: setup.uncounted(),
        reach: setup.reach(),
        bytes: setup.budget.rings,
    }
}

/// Checks that a token can be chosen from the vocabulary, and that clustered heads are of it.
fn check_vocabulary(model: &Model) -> Result<(), GenerateError> {
    let vocab_size = model.config().vocab_size;
    if vocab_size > sampling::MAX_COLUMNS {
        return Err(GenerateError::VocabularyTooLarge {
            vocab_size,
            maximum: sampling::MAX_COLUMNS,
        });
    }
    let mtp = model.mtp.iter().filter_map(|mtp| mtp.flash_head.as_ref());
    let dspark = model.dspark.iter();
    let dspark = dspark.filter_map(|dspark| dspark.flash_head.as_ref());
    let heads = model.flash_head.iter().chain(mtp).chain(dspark);
    let mut sizes = heads.map(|head: &ProbedHead| head.head().vocabulary());
    match sizes.find(|tokens| *tokens != vocab_size) {
        Some(tokens) => Err(GenerateError::HeadVocabulary { tokens, vocab_size }),
        None => Ok(()),
    }
}
