//! The whole model.

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::collective::GroupError;
use burn_ds4_ops::transfer::{transfer, transfer_in_turn};

use crate::attention::AttentionConfig;
use crate::block::{Block, BlockConfig, flattened, unflattened};
use crate::cache::{Cache, CacheConfig, CacheError, CacheLayout, OpenStep, Step};
use crate::checkpoint::load_all;
use crate::config::{AttentionKind, ModelConfig};
use crate::dspark::{Dspark, DsparkConfig};
use crate::flash_head::ProbedHead;
use crate::hyper_connection::{HyperConnectionConfig, HyperHead, Streams};
use crate::linear::project_f32;
use crate::moe::MoeLayerConfig;
use crate::mtp::{MtpLayer, MtpLayerConfig};
use crate::norm::{RmsNorm, RmsNormConfig};
use crate::parallel::{self, Divider, Rank, TensorParallel};
use crate::placement::{Place, Placement, PlacementError, Portion};
use crate::trace::Trace;
use crate::weights::{Random, WeightSource, all_or_nothing};

impl ModelConfig {
    /// Configuration of a trunk layer.
    ///
    /// # Panics
    ///
    /// If `layer` is not smaller than the number of layers.
    pub fn block(&self, layer: usize) -> BlockConfig {
        let hash = layer < self.num_hash_layers;
        self.block_of(self.layers[layer], hash.then_some(self.vocab_size))
    }

    /// Configuration of the MTP layer.
    pub fn mtp(&self) -> MtpLayerConfig {
        MtpLayerConfig::new(self.block_of(AttentionKind::Window, None))
    }

    /// Configuration of the DSpark drafter, if there is one.
    pub fn dspark(&self) -> Option<DsparkConfig> {
        let params = self.dspark.clone()?;
        let block = self.block_of(AttentionKind::Window, None);
        Some(DsparkConfig::new(block, self.vocab_size, params))
    }

    /// Configuration of every hyper-connection.
    pub fn hyper_connection(&self) -> HyperConnectionConfig {
        HyperConnectionConfig::new(self.hidden_size)
            .with_streams(self.hc_mult)
            .with_sinkhorn_iterations(self.hc_sinkhorn_iters)
            .with_epsilon(self.hc_eps)
            .with_norm_epsilon(self.rms_norm_eps)
    }

    fn block_of(&self, kind: AttentionKind, hash_vocabulary: Option<usize>) -> BlockConfig {
        let attention = AttentionConfig::new(
            self.hidden_size,
            self.num_attention_heads,
            self.head_dim,
            self.rope_head_dim,
            self.q_lora_rank,
            self.o_groups,
            self.o_lora_rank,
            kind,
        )
        .with_index_heads(self.index_n_heads)
        .with_index_head_dim(self.index_head_dim)
        .with_index_top_k(self.index_topk)
        .with_norm_epsilon(self.rms_norm_eps);
        let moe = MoeLayerConfig::new(
            self.hidden_size,
            self.moe_intermediate_size,
            self.n_routed_experts,
            self.num_experts_per_tok,
        )
        .with_shared_experts(self.n_shared_experts)
        .with_scale(self.routed_scaling_factor)
        .with_swiglu_limit(self.swiglu_limit)
        .with_hash_vocabulary(hash_vocabulary);
        BlockConfig::new(attention, moe, self.hyper_connection())
            .with_norm_epsilon(self.rms_norm_eps)
    }

    /// Initializes a model with random weights.
    ///
    /// # Panics
    ///
    /// If the configuration contradicts itself, see [`validate`](Self::validate).
    pub fn init(&self, device: &Device) -> Model {
        self.init_from(Random::dense(device))
    }

    pub(crate) fn init_from(&self, mut source: Random) -> Model {
        self.assert_valid();
        let model = self.build(&mut source, false);
        model.expect("any weight can be drawn")
    }

    pub(crate) fn assert_valid(&self) {
        if let Err(error) = self.validate() {
            panic!("{error}");
        }
    }

    /// The model of a checkpoint's tensors. `quantized_cache` is that of every
    /// [attention](AttentionConfig::quantized_cache).
    pub(crate) fn build(
        &self,
        source: &mut impl WeightSource,
        quantized_cache: bool,
    ) -> Option<Model> {
        let placement = source.placement(self.layers.len());
        let built = source.build_portions(&placement, |source, portion| {
            self.build_portion(source, portion, quantized_cache)
        });
        let mut built = load_all(built)?;
        let last = built.pop().expect("a placement has a device");
        let (head, norm, output) = last.conclusion.expect("it is with the last layer");
        let (embedding, layers, parallel) = match last.output_part {
            Some(own) => {
                let ranks = built.into_iter().map(Built::into_rank);
                let (others, mut parts): (Vec<Rank>, Vec<Tensor<2>>) = ranks.unzip();
                parts.push(own);
                let parallel = TensorParallel::new(placement.ranks(), others, parts);
                (last.embedding, last.layers, Some(parallel))
            }
            None => {
                let first = built.iter_mut().find_map(|part| part.embedding.take());
                let before = built.into_iter().flat_map(|part| part.layers);
                let layers = before.chain(last.layers).collect();
                (first.or(last.embedding), layers, None)
            }
        };
        let embedding = embedding.expect("it is with the first layer");
        let divider = source.divider();
        let divided = divider
            .and_then(|divider| divider.finish(&embedding.val(), &head, &norm, &output.val()));
        let model = Model {
            parallel: divided.or(parallel),
            embedding,
            layers,
            head,
            norm,
            output,
            mtp: last.mtp,
            dspark: last.dspark,
            flash_head: None,
            draft_embedding: None,
            placement,
            config: self.clone(),
        };
        model.placement.warn_of_copies();
        Some(model.with_draft_embedding())
    }

    fn build_portion(
        &self,
        source: &mut impl WeightSource,
        portion: &Portion,
        quantized_cache: bool,
    ) -> Option<Built> {
        let matrix = [self.vocab_size, self.hidden_size];
        let embedding = portion.embeds().then(|| {
            source.enter(Place::Embedding);
            source.embedding("embed.weight", matrix)
        });
        let layers = load_all(portion.layers.clone().map(|layer| {
            source.enter(Place::Layer(layer));
            let mut block = self.block(layer);
            block.attention.quantized_cache = quantized_cache;
            let block = block.build(source, &format!("layers.{layer}."))?;
            source.take(block, portion)
        }));
        let conclusion = portion.concludes().then(|| {
            source.enter(Place::Head);
            let head = self.hyper_connection().build_head(source, "");
            let norm = RmsNormConfig::new(self.hidden_size)
                .with_epsilon(self.rms_norm_eps)
                .build(source, "norm");
            let output = source.stored(&["head.weight".into()], matrix);
            Some((head?, norm?, output?))
        });
        let has_drafter = self.num_mtp_layers > 0 || self.dspark.is_some();
        if portion.drafts() && has_drafter {
            source.enter(Place::Drafter);
        }
        let mtp = (portion.drafts() && self.num_mtp_layers > 0).then(|| {
            let mut mtp = self.mtp();
            mtp.block.attention.quantized_cache = quantized_cache;
            mtp.build(source, "mtp.0.")
        });
        let dspark = self.dspark().filter(|_| portion.drafts());
        let dspark = dspark.map(|mut dspark| {
            dspark.block.attention.quantized_cache = quantized_cache;
            dspark.build(source, "mtp.")
        });
        let conclusion = all_or_nothing(conclusion);
        let (embedding, layers) = (all_or_nothing(embedding)?, layers?);
        let (mtp, dspark) = (all_or_nothing(mtp)?, all_or_nothing(dspark)?);
        let conclusion: Option<Conclusion> = conclusion?;
        let output_part = portion.share.zip(conclusion.as_ref());
        let output_part = output_part
            .map(|(share, (_, _, output))| share.kept_output(output.val(), &portion.device));
        let is_taken = source.is_taken(&embedding)
            && source.is_taken(&conclusion)
            && source.is_taken(&output_part)
            && source.is_taken(&mtp)
            && source.is_taken(&dspark);
        is_taken.then_some(Built {
            embedding,
            layers,
            conclusion,
            output_part,
            mtp,
            dspark,
        })
    }
}

/// Head, norm and output matrix.
type Conclusion = (HyperHead, RmsNorm, Param<Tensor<2>>);

/// What is built of a model for a [`Portion`].
struct Built {
    embedding: Option<Param<Tensor<2>>>,
    layers: Vec<Block>,
    conclusion: Option<Conclusion>,
    /// The device's rows of the output matrix, where layers are divided.
    output_part: Option<Tensor<2>>,
    mtp: Option<MtpLayer>,
    dspark: Option<Dspark>,
}

impl Built {
    /// What a device other than the last has, and its rows of the output matrix.
    fn into_rank(self) -> (Rank, Tensor<2>) {
        let every = "every device has it";
        let (head, norm, _) = self.conclusion.expect(every);
        let rank = Rank {
            embedding: self.embedding.expect(every).val(),
            layers: self.layers,
            head,
            norm,
        };
        (rank, self.output_part.expect(every))
    }
}

/// A DeepSeek-V4 model: the trunk and, where there is one, the MTP layer or the DSpark drafter.
#[derive(Module, Debug)]
pub struct Model {
    /// Token embeddings: `[vocabulary, d_model]`.
    pub embedding: Param<Tensor<2>>,
    /// The trunk's blocks.
    pub layers: Vec<Block>,
    /// Collapses the streams after the last block.
    pub head: HyperHead,
    /// Norm before the output matrix.
    pub norm: RmsNorm,
    /// Output matrix: `[vocabulary, d_model]`.
    pub output: Param<Tensor<2>>,
    /// The multi-token-prediction layer.
    pub mtp: Option<MtpLayer>,
    /// The DSpark drafter.
    pub dspark: Option<Dspark>,
    /// Head that [generation](crate::generate) uses to choose tokens in place of the output matrix.
    /// It is approximate unless it probes all clusters. It stays on its device and is not among the
    /// module's parameters, of which it holds copies.
    #[module(skip)]
    pub flash_head: Option<ProbedHead>,
    /// The token embeddings on the device of what drafts, where that is not that of the first
    /// layer. [`place`](Self::place) makes it.
    #[module(skip)]
    pub draft_embedding: Option<Tensor<2>>,
    /// The other devices that have parts of every layer, where the modules have no more than a part
    /// themselves. [`place`](Self::place) makes it.
    #[module(skip)]
    pub parallel: Option<TensorParallel>,
    /// Where the layers live. It must be true of the modules; [`place`](Self::place) moves them.
    #[module(skip)]
    pub placement: Placement,
    /// What the model was made by. Context and end-of-sequence token may be changed; the rest must
    /// be that of the modules.
    #[module(skip)]
    pub config: ModelConfig,
}

impl Model {
    /// What the model was made by.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Moves the layers to where `placement` has them, the embedding to the first of them, the head
    /// and what drafts to the last. [Clustered heads](Self::flash_head) stay where they are.
    ///
    /// # Errors
    ///
    /// If the placement is of another number of layers, or has parts of layers that cannot be
    /// divided, or that are divided already.
    pub fn place(self, placement: Placement) -> Result<Self, PlacementError> {
        if self.parallel.is_some() {
            return Err(PlacementError::Divided);
        }
        let ranks = placement.ranks().to_vec();
        if !ranks.is_empty() {
            parallel::check(&self.config, ranks.len())?;
        }
        let (layers, runs) = (self.layers.len(), placement.runs().iter());
        let split: Vec<usize> = runs.map(|run| run.layers.len()).collect();
        if placement.layers() != layers {
            return Err(PlacementError::SplitSum {
                sum: placement.layers(),
                split,
                layers,
            });
        }
        placement.warn_of_copies();
        let mut divider = Divider::new(&ranks);
        let layers = self.layers.into_iter().enumerate();
        let layers = layers.map(|(index, layer)| {
            let device = placement.device(Place::Layer(index));
            divider.take(moved(layer, device))
        });
        let layers = layers.collect();
        let (first, last) = (placement.first(), placement.last());
        let (embedding, output) = (moved(self.embedding, first), moved(self.output, last));
        let (head, norm) = (moved(self.head, last), moved(self.norm, last));
        let model = Self {
            parallel: divider.finish(&embedding.val(), &head, &norm, &output.val()),
            embedding,
            layers,
            head,
            norm,
            output,
            mtp: self.mtp.map(|mtp| moved(mtp, last)),
            dspark: self.dspark.map(|dspark| moved(dspark, last)),
            flash_head: self.flash_head,
            draft_embedding: None,
            placement: placement.clone(),
            config: self.config,
        };
        Ok(model.with_draft_embedding())
    }

    /// The same with a copy of the embeddings for what drafts, if it needs one.
    fn with_draft_embedding(self) -> Self {
        let drafts = self.mtp.is_some() || self.dspark.is_some();
        let own = (drafts && self.placement.is_divided())
            .then(|| transfer(self.embedding.val(), self.placement.last()));
        Self {
            draft_embedding: own,
            ..self
        }
    }

    /// Sets the head that drafts are chosen with, if the model has what drafts; `None` for the
    /// output matrix.
    pub fn set_draft_head(&mut self, head: Option<ProbedHead>) {
        if let Some(mtp) = &mut self.mtp {
            mtp.flash_head = head;
        } else if let Some(dspark) = &mut self.dspark {
            dspark.flash_head = head;
        }
    }

    /// Makes an empty cache for the trunk, its rows in the dtype of the model's activations.
    ///
    /// # Errors
    ///
    /// As [`Cache::new`].
    pub fn new_cache(&self, options: CacheConfig) -> Result<Cache, CacheError> {
        let (layout, placement) = self.trunk_cache();
        self.cache_of(layout, options, &placement)
    }

    /// Makes an empty cache for the MTP layer.
    ///
    /// # Errors
    ///
    /// As [`Cache::new`].
    pub fn new_mtp_cache(&self, options: CacheConfig) -> Result<Cache, CacheError> {
        self.drafter_cache(CacheLayout::mtp(&self.config), options)
    }

    /// Makes an empty cache for the DSpark drafter.
    ///
    /// # Errors
    ///
    /// As [`Cache::new`].
    ///
    /// # Panics
    ///
    /// If the configuration has no DSpark drafter.
    pub fn new_dspark_cache(&self, options: CacheConfig) -> Result<Cache, CacheError> {
        self.drafter_cache(CacheLayout::dspark(&self.config), options)
    }

    /// The layers of the trunk's cache, and where they are: all of them on each device that has
    /// parts of layers.
    pub(crate) fn trunk_cache(&self) -> (CacheLayout, Placement) {
        let mut layout = CacheLayout::trunk(&self.config);
        let ranks = self.placement.ranks().len().max(1);
        layout.layers = layout.layers.repeat(ranks);
        (layout, self.placement.of_caches())
    }

    fn drafter_cache(
        &self,
        layout: CacheLayout,
        options: CacheConfig,
    ) -> Result<Cache, CacheError> {
        let placement = Placement::single(self.placement.last(), layout.layers.len());
        self.cache_of(layout, options, &placement)
    }

    fn cache_of(
        &self,
        layout: CacheLayout,
        options: CacheConfig,
        placement: &Placement,
    ) -> Result<Cache, CacheError> {
        let options = CacheConfig {
            dtype: self.embedding.val().dtype().into(),
            ..options
        };
        Cache::placed(layout, options, placement)
    }

    /// Runs the trunk over new tokens of every sequence, and returns the logits at each: f32
    /// `[batch, positions, vocabulary]`.
    ///
    /// # Arguments
    ///
    /// * `token_ids` - `[batch, positions]`; ids outside the vocabulary are read as the nearest id
    ///   inside it.
    /// * `cache` - the positions so far; the new positions are added to it.
    ///
    /// # Errors
    ///
    /// If batch or layers are not those of the cache, or the cache [cannot take](Cache::begin) the
    /// new positions.
    ///
    /// # Example
    ///
    /// The token after a prompt.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor, s};
    /// use ds4_model::{cache::CacheConfig, generate::SpecialTokens, pipeline::Pipeline};
    ///
    /// let device = Device::flex();
    /// let pipeline = Pipeline::open("../../assets/ds4-tiny".as_ref(), &device)?;
    /// let prompt = pipeline.encode("Once upon a time")?;
    /// let ids: Vec<i64> = prompt.into_iter().map(i64::from).collect();
    /// let ids = Tensor::<1, Int>::from_data(ids.as_slice(), &device).unsqueeze();
    /// let mut cache = pipeline.model.new_cache(CacheConfig::default())?;
    /// let logits = pipeline.model.forward(ids, &mut cache)?;
    /// let next = logits.slice(s![.., -1..]).argmax(2).into_data().iter::<u32>().next();
    /// let next = pipeline.tokenizer.decode(&[next.unwrap()], SpecialTokens::Keep)?;
    /// assert_eq!(next, ",");
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward(
        &self,
        token_ids: Tensor<2, Int>,
        cache: &mut Cache,
    ) -> Result<Tensor<3>, CacheError> {
        let hidden = self.forward_hidden(token_ids, cache)?;
        Ok(self.logits_of(hidden))
    }

    /// Runs the trunk like [`forward`](Self::forward), and returns the hidden states that the
    /// output matrix multiplies: `[batch, positions, d_model]`.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    pub fn forward_hidden(
        &self,
        token_ids: Tensor<2, Int>,
        cache: &mut Cache,
    ) -> Result<Tensor<3>, CacheError> {
        let positions = token_ids.dims();
        let (streams, _) = self.run(token_ids, cache, &[], &Trace::off())?;
        Ok(self.hidden_of(streams, positions))
    }

    /// Runs the trunk like [`forward`](Self::forward), and returns the streams before the head:
    /// `[batch, positions, n, d_model]`.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    pub fn forward_streams(
        &self,
        token_ids: Tensor<2, Int>,
        cache: &mut Cache,
        trace: &Trace,
    ) -> Result<Tensor<4>, CacheError> {
        let (streams, _) = self.forward_tapped(token_ids, cache, &[], trace)?;
        Ok(streams)
    }

    /// Runs the trunk like [`forward_streams`](Self::forward_streams). The second result are the
    /// taps: the mean over the streams of the output of each layer in `taps`, in ascending order,
    /// side by side: `[batch, positions, taps · d_model]`; `None` without any.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    pub fn forward_tapped(
        &self,
        token_ids: Tensor<2, Int>,
        cache: &mut Cache,
        taps: &[usize],
        trace: &Trace,
    ) -> Result<(Tensor<4>, Option<Tensor<3>>), CacheError> {
        let positions = token_ids.dims();
        let (streams, taps) = self.run(token_ids, cache, taps, trace)?;
        Ok((unflattened(streams, positions), taps))
    }

    /// The streams before the head, `[batch * positions, n, d_model]`, and the taps.
    fn run(
        &self,
        token_ids: Tensor<2, Int>,
        cache: &mut Cache,
        taps: &[usize],
        trace: &Trace,
    ) -> Result<(Streams, Option<Tensor<3>>), CacheError> {
        let [batch, positions] = token_ids.dims();
        check_batch("token_ids", batch, cache)?;
        let open = self.open(positions, cache)?;
        if let Some(parallel) = &self.parallel {
            let devices = parallel.devices().iter();
            let token_ids = devices.map(|device| transfer(token_ids.clone(), device));
            let ranks = self.run_ranks((0, token_ids.collect()), open, cache, taps, trace);
            cache.close(open)?;
            let last = ranks.into_iter().next_back();
            return Ok(last.expect("there is a rank at least").into_parts());
        }
        let mut passing: Option<Passing> = None;
        for (part, run) in self.placement.runs().iter().enumerate() {
            let (given, token_ids) = match passing {
                None => (None, transfer(token_ids.clone(), &run.device)),
                Some(passing) => {
                    let rows = transfer(passing.rows(), &run.device);
                    // The host must not wait: it has to launch the sender's next chunk meanwhile.
                    // SAFETY: all that the device still has to do is to receive the rows.
                    let token_ids = unsafe { transfer_in_turn(token_ids.clone(), &run.device) };
                    (Some(self.passed(rows, [batch, positions])), token_ids)
                }
            };
            let step = cache.step(open, part);
            passing = Some(self.run_part(part, (token_ids, given), (&step, cache), taps, trace));
            cache.advance(part, step);
        }
        cache.close(open)?;
        Ok(passing.expect("there is at least one run").into_parts())
    }

    /// Runs all layers on the devices of some ranks, the first of them with the first of the token
    /// ids `[batch, positions]`. The caches take their rows, and the lengths there advance.
    pub(crate) fn run_ranks(
        &self,
        (first, token_ids): (usize, Vec<Tensor<2, Int>>),
        open: OpenStep,
        cache: &mut Cache,
        taps: &[usize],
        trace: &Trace,
    ) -> Vec<Passing> {
        let parallel = self.parallel.as_ref().expect("layers in parts");
        let (layers, last) = (self.layers.len(), parallel.ranks() - 1);
        let all = Trace::off();
        let trace = |rank: usize| if rank == last { trace } else { &all };
        let ids = token_ids.into_iter().map(|ids| self.in_vocabulary(ids));
        let ids: Vec<Tensor<2, Int>> = ids.collect();
        let positions = ids[0].dims();
        let ranks = first..first + ids.len();
        let steps = ranks.clone().map(|rank| cache.step(open, rank));
        let steps: Vec<Step> = steps.collect();
        let mut passings: Vec<Passing> = ranks
            .clone()
            .zip(&ids)
            .map(|(rank, ids)| {
                let embedding = match parallel.other(rank) {
                    Some(rank) => rank.embedding.clone(),
                    None => self.embedding.val(),
                };
                self.embedded(embedding, ids.clone())
            })
            .collect();
        for index in 0..layers {
            let block = |rank: usize| match parallel.other(rank) {
                Some(rank) => &rank.layers[index],
                None => &self.layers[index],
            };
            let name = format!("layer{index}");
            let given = passings.iter().zip(ranks.clone()).zip(&steps);
            let partials = given.map(|((passing, rank), step)| {
                let cache = &mut cache.layers_mut()[rank * layers + index];
                let (streams, trace) = (passing.streams.clone(), trace(rank).scope(&name));
                block(rank).attend(streams, positions, step, cache, &trace)
            });
            let attended = parallel.sum(first, partials.collect());
            let given = attended.into_iter().zip(ranks.clone()).zip(&ids);
            let partials = given.map(|((streams, rank), ids)| {
                let trace = trace(rank).scope(&name);
                block(rank).mix_experts(streams, ids.clone(), &trace)
            });
            let mixed = parallel.sum(first, partials.collect());
            for ((passing, streams), rank) in passings.iter_mut().zip(mixed).zip(ranks.clone()) {
                passing.streams = streams;
                let trace = trace(rank).scope(&name);
                trace.record_with("output", || unflattened(passing.streams.clone(), positions));
                if rank == last && taps.contains(&index) {
                    passing.tap(positions);
                }
            }
        }
        for (rank, step) in ranks.zip(steps) {
            cache.advance(rank, step);
        }
        passings
    }

    /// The streams of token ids `[batch, positions]` before the first layer.
    fn embedded(&self, embedding: Tensor<2>, token_ids: Tensor<2, Int>) -> Passing {
        let embedded = embed(embedding, token_ids);
        let streams = embedded
            .unsqueeze_dim::<4>(2)
            .repeat_dim(2, self.config.hc_mult);
        Passing {
            streams: flattened(streams),
            tapped: Vec::new(),
        }
    }

    /// The logits at what the ranks from `first` on have, where layers are in parts:
    /// `[batch, positions, vocabulary]` on each of them.
    pub(crate) fn logits_of_ranks(
        &self,
        first: usize,
        streams: Vec<Streams>,
        [batch, positions]: [usize; 2],
    ) -> Vec<Tensor<3>> {
        let parallel = self.parallel.as_ref().expect("layers in parts");
        let hidden = streams.into_iter().zip(first..);
        let hidden = hidden.map(|(streams, rank)| match parallel.other(rank) {
            Some(rank) => rank.head.forward_norm(streams, &rank.norm),
            None => self.head.forward_norm(streams, &self.norm),
        });
        let logits = parallel.logits(first, hidden.collect()).into_iter();
        let logits = logits.map(|logits| {
            let [_, vocabulary] = logits.dims();
            logits.reshape([batch, positions, vocabulary])
        });
        logits.collect()
    }

    /// Waits for what the calling thread has launched, and tells whether a device that has parts of
    /// the layers has waited in vain for another. What has been computed since this was asked last
    /// is worth nothing then.
    ///
    /// # Errors
    ///
    /// If one has.
    pub fn check_group(&self) -> Result<(), GroupError> {
        let parallel = self.parallel.as_ref();
        parallel.map_or(Ok(()), |parallel| parallel.group().check())
    }

    /// What the device before has passed on as [rows](Passing::rows).
    pub(crate) fn passed(&self, rows: Tensor<2>, positions: [usize; 2]) -> Passing {
        let [_, d_model] = self.embedding.dims();
        Passing::of_rows(rows, self.config.hc_mult, d_model, positions)
    }

    /// Begins a step of the trunk.
    pub(crate) fn open(&self, positions: usize, cache: &mut Cache) -> Result<OpenStep, CacheError> {
        let kinds = self.layers.iter().map(|layer| layer.attention.kind());
        let kinds: Vec<AttentionKind> = kinds.collect();
        let ranks = self.parallel.as_ref().map_or(1, TensorParallel::ranks);
        cache.check_layers(kinds.repeat(ranks).into_iter())?;
        if let Some(parallel) = &self.parallel {
            parallel.group().prepare()?;
        }
        cache.open(positions)
    }

    /// Runs the layers of one device over token ids `[batch, positions]`, after what the device
    /// before it has passed on.
    pub(crate) fn run_part(
        &self,
        part: usize,
        (token_ids, given): (Tensor<2, Int>, Option<Passing>),
        (step, cache): (&Step, &mut Cache),
        taps: &[usize],
        trace: &Trace,
    ) -> Passing {
        let positions = token_ids.dims();
        let token_ids = self.in_vocabulary(token_ids);
        let mut passing =
            given.unwrap_or_else(|| self.embedded(self.embedding.val(), token_ids.clone()));
        for index in self.placement.runs()[part].layers.clone() {
            let (layer, cache) = (&self.layers[index], &mut cache.layers_mut()[index]);
            let trace = trace.scope(&format!("layer{index}"));
            let streams = passing.streams;
            passing.streams = layer.forward(streams, token_ids.clone(), step, cache, &trace);
            if taps.contains(&index) {
                passing.tap(positions);
            }
        }
        passing
    }

    /// The trunk's logits at streams `[batch, positions, n, d_model]`: f32
    /// `[batch, positions, vocabulary]`.
    pub fn logits(&self, streams: Tensor<4>) -> Tensor<3> {
        self.logits_of(self.hidden(streams))
    }

    /// The hidden states that the output matrix multiplies, from streams
    /// `[batch, positions, n, d_model]`: `[batch, positions, d_model]`.
    pub fn hidden(&self, streams: Tensor<4>) -> Tensor<3> {
        let [batch, positions, _, _] = streams.dims();
        self.hidden_of(flattened(streams), [batch, positions])
    }

    fn hidden_of(&self, streams: Streams, [batch, positions]: [usize; 2]) -> Tensor<3> {
        let [_, _, d_model] = streams.dims();
        let hidden = self.head.forward_norm(streams, &self.norm);
        hidden.reshape([batch, positions, d_model])
    }

    /// Multiplies hidden states `[batch, positions, d_model]` by the output matrix: f32
    /// `[batch, positions, vocabulary]`.
    pub fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3> {
        project_f32(hidden, self.output.val())
    }

    /// Runs the MTP layer over new positions of every sequence, and returns its streams.
    ///
    /// # Arguments
    ///
    /// * `streams` - `[batch, positions, n, d_model]`: the trunk's at these positions or, to draft
    ///   further, the MTP layer's own.
    /// * `next_ids` - `[batch, positions]`: the token after each position.
    /// * `cache` - the cache of the MTP layer, which holds all positions before these.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    ///
    /// # Panics
    ///
    /// If the model has no MTP layer, or `streams` and `next_ids` differ in batch or positions.
    ///
    /// # Example
    ///
    /// The token after a prompt, and a draft of the one that follows it.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor, s};
    /// use ds4_model::{cache::CacheConfig, generate::SpecialTokens};
    /// use ds4_model::{pipeline::Pipeline, trace::Trace};
    ///
    /// let (device, off, options) = (Device::flex(), Trace::off(), CacheConfig::default());
    /// let pipeline = Pipeline::open("../../assets/ds4-tiny".as_ref(), &device)?;
    /// let (model, tokenizer) = (&pipeline.model, &pipeline.tokenizer);
    /// let (mut cache, mut drafter) = (model.new_cache(options)?, model.new_mtp_cache(options)?);
    /// let ids: Vec<i64> = tokenizer.encode("And God said,")?.into_iter().map(i64::from).collect();
    /// let ids = Tensor::<1, Int>::from_data(ids.as_slice(), &device).unsqueeze::<2>();
    /// let most_likely = |logits: Tensor<3>| logits.slice(s![.., -1..]).argmax(2).squeeze_dim(2);
    ///
    /// let streams = model.forward_streams(ids.clone(), &mut cache, &off)?;
    /// let token: Tensor<2, Int> = most_likely(model.logits(streams.clone()));
    /// let next_ids = Tensor::cat(vec![ids.slice(s![.., 1..]), token.clone()], 1);
    /// let streams = model.forward_mtp(streams, next_ids, &mut drafter, &off)?;
    /// let draft = most_likely(model.mtp_logits(streams));
    /// let text: Vec<u32> = Tensor::cat(vec![token, draft], 1).into_data().iter().collect();
    /// assert_eq!(tokenizer.decode(&text, SpecialTokens::Skip)?, " Thou");
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward_mtp(
        &self,
        streams: Tensor<4>,
        next_ids: Tensor<2, Int>,
        cache: &mut Cache,
        trace: &Trace,
    ) -> Result<Tensor<4>, CacheError> {
        let mtp = self.mtp.as_ref().expect("the model has no MTP layer");
        let [batch, positions] = next_ids.dims();
        check_batch("next_ids", batch, cache)?;
        cache.check_layers([mtp.block.attention.kind()].into_iter())?;
        assert_eq!(
            streams.dims()[..2],
            [batch, positions],
            "streams and next_ids must have the same batch and positions"
        );
        let step = cache.begin(positions)?;
        let next_ids = transfer(self.in_vocabulary(next_ids), self.placement.last());
        let embedded = self.embed_for_drafter(next_ids.clone());
        let layer = &mut cache.layers_mut()[0];
        let streams = mtp.forward(
            streams,
            embedded,
            next_ids,
            &step,
            layer,
            &trace.scope("mtp"),
        );
        cache.commit(step)?;
        Ok(streams)
    }

    /// The MTP layer's logits at its streams: row t predicts the token at t + 2; f32
    /// `[batch, positions, vocabulary]`.
    ///
    /// # Panics
    ///
    /// If the model has no MTP layer.
    pub fn mtp_logits(&self, streams: Tensor<4>) -> Tensor<3> {
        let mtp = self.mtp.as_ref().expect("the model has no MTP layer");
        self.logits_of(mtp.hidden(streams))
    }

    /// Tells the DSpark drafter of new positions of every sequence, by the trunk's
    /// [taps](Self::forward_tapped) of the drafter's target layers.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    ///
    /// # Panics
    ///
    /// If the model has no DSpark drafter, or the taps are of other layers.
    pub fn append_dspark(
        &self,
        taps: Tensor<3>,
        cache: &mut Cache,
        trace: &Trace,
    ) -> Result<(), CacheError> {
        let dspark = self.expect_dspark();
        let [batch, positions, _] = taps.dims();
        let step = self.begin_dspark("taps", [batch, positions], cache)?;
        dspark.append(taps, &step, cache.layers_mut(), &trace.scope("dspark"));
        cache.commit(step)
    }

    /// Runs the DSpark drafter over a block that begins with `tokens`, and returns its streams:
    /// `[batch, block, n, d_model]`, of which [`Dspark::choose`] makes drafts.
    ///
    /// The cache does not count the positions of the block: the next ones take their places.
    ///
    /// # Arguments
    ///
    /// * `tokens` - `[batch, 1]`: the token after the positions that the drafter was [told
    ///   of](Self::append_dspark).
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    ///
    /// # Panics
    ///
    /// If the model has no DSpark drafter.
    ///
    /// # Example
    ///
    /// The token after a prompt is a comma. These are the drafts that follow it, of which the model
    /// accepts the first.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor, s};
    /// use ds4_model::{cache::CacheConfig, generate::SpecialTokens};
    /// use ds4_model::{pipeline::Pipeline, trace::Trace};
    ///
    /// let (device, off, options) = (Device::flex(), Trace::off(), CacheConfig::default());
    /// let pipeline = Pipeline::open("../../assets/ds4-tiny-dspark".as_ref(), &device)?;
    /// let model = &pipeline.model;
    /// let mut cache = model.new_cache(options)?;
    /// let mut drafter = model.new_dspark_cache(options)?;
    /// let prompt = pipeline.encode("Once upon a time")?;
    /// let ids: Vec<i64> = prompt.into_iter().map(i64::from).collect();
    /// let ids = Tensor::<1, Int>::from_data(ids.as_slice(), &device).unsqueeze::<2>();
    ///
    /// let dspark = model.dspark.as_ref().expect("a DSpark drafter");
    /// let targets = &dspark.params.target_layers;
    /// let (streams, taps) = model.forward_tapped(ids, &mut cache, targets, &off)?;
    /// model.append_dspark(taps.expect("of its layers"), &mut drafter, &off)?;
    /// let token = model.logits(streams.slice(s![.., -1..])).argmax(2).squeeze_dim::<2>(2);
    /// let block = model.forward_dspark(token.clone(), &mut drafter, &off)?;
    /// let drafts = dspark.choose(block, token, model.output.val(), &off)?;
    /// let text: Vec<u32> = drafts.ids.into_data().iter().collect();
    /// let text = pipeline.tokenizer.decode(&text, SpecialTokens::Skip)?;
    /// assert_eq!(text, " and the LORD, and");
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward_dspark(
        &self,
        tokens: Tensor<2, Int>,
        cache: &mut Cache,
        trace: &Trace,
    ) -> Result<Tensor<4>, CacheError> {
        let dspark = self.expect_dspark();
        let size = dspark.params.block_size;
        let [batch, _] = tokens.dims();
        let step = self.begin_dspark("tokens", [batch, size], cache)?;
        let step = step.not_causal();
        let tokens = transfer(self.in_vocabulary(tokens), self.placement.last());
        let filler = i64::from(dspark.params.noise_token_id);
        let like = (&tokens.device(), tokens.dtype());
        let block = Tensor::full([batch, size], filler, like);
        let block = block.slice_assign([0..batch, 0..1], tokens);
        let embedded = self.embed_for_drafter(block.clone());
        let layers = cache.layers_mut();
        let trace = trace.scope("dspark");
        Ok(dspark.forward(embedded, block, &step, layers, &trace))
    }

    fn begin_dspark(
        &self,
        argument: &'static str,
        [batch, positions]: [usize; 2],
        cache: &mut Cache,
    ) -> Result<Step, CacheError> {
        check_batch(argument, batch, cache)?;
        let layers = self.expect_dspark().layers.iter();
        cache.check_layers(layers.map(|layer| layer.attention.kind()))?;
        cache.begin(positions)
    }

    fn expect_dspark(&self) -> &Dspark {
        let dspark = self.dspark.as_ref();
        dspark.expect("the model has no DSpark drafter")
    }

    fn in_vocabulary(&self, token_ids: Tensor<2, Int>) -> Tensor<2, Int> {
        let [vocabulary, _] = self.embedding.dims();
        token_ids.clamp(0, vocabulary as i64 - 1)
    }

    /// Embeddings `[batch, positions, d_model]` on the device of what drafts.
    fn embed_for_drafter(&self, token_ids: Tensor<2, Int>) -> Tensor<3> {
        let own = self.draft_embedding.clone();
        embed(own.unwrap_or_else(|| self.embedding.val()), token_ids)
    }
}

/// What the layers of one device pass on to those of the next.
pub(crate) struct Passing {
    /// `[batch * positions, n, d_model]`
    pub(crate) streams: Streams,
    /// The mean over the streams of each layer that is tapped: `[batch, positions, d_model]`.
    pub(crate) tapped: Vec<Tensor<3>>,
}

impl Passing {
    /// Adds the tap of the layer that was the last.
    fn tap(&mut self, positions: [usize; 2]) {
        // A copy: what the trunk computes must not depend on whether somebody looks on.
        let output = unflattened(self.streams.clone(), positions);
        self.tapped.push(output.mean_dim(2).squeeze_dim::<3>(2));
    }

    /// The streams, and the taps side by side: `[batch, positions, taps · d_model]`.
    pub(crate) fn into_parts(self) -> (Streams, Option<Tensor<3>>) {
        let Self { streams, tapped } = self;
        let taps = (!tapped.is_empty()).then(|| Tensor::cat(tapped, 2));
        (streams, taps)
    }

    /// All of it side by side, so that it is moved at once: `[batch * positions, columns]`.
    pub(crate) fn rows(self) -> Tensor<2> {
        let [tokens, n, d] = self.streams.dims();
        let streams = self
            .streams
            .ready()
            .expect("a layer that keeps shape and dtype");
        let streams = streams.reshape([tokens, n * d]);
        if self.tapped.is_empty() {
            return streams;
        }
        let tapped = self.tapped.into_iter().map(|tap| tap.reshape([tokens, d]));
        Tensor::cat(std::iter::once(streams).chain(tapped).collect(), 1)
    }

    /// What [`rows`](Self::rows) has been made of, `n` streams and any number of taps.
    pub(crate) fn of_rows(
        rows: Tensor<2>,
        n: usize,
        d_model: usize,
        [batch, positions]: [usize; 2],
    ) -> Self {
        let [tokens, columns] = rows.dims();
        let taps = columns / d_model - n;
        if taps == 0 {
            let streams = rows.reshape([tokens, n, d_model]);
            return Self {
                streams: streams.into(),
                tapped: Vec::new(),
            };
        }
        let streams = rows.clone().narrow(1, 0, n * d_model);
        let tapped = (0..taps).map(|tap| {
            let rows = rows.clone().narrow(1, (n + tap) * d_model, d_model);
            rows.reshape([batch, positions, d_model])
        });
        Self {
            tapped: tapped.collect(),
            streams: streams.reshape([tokens, n, d_model]).into(),
        }
    }
}

/// Rows `[batch, positions, d_model]` of a matrix `[vocabulary, d_model]`.
fn embed(embedding: Tensor<2>, token_ids: Tensor<2, Int>) -> Tensor<3> {
    let ([batch, positions], [_, d_model]) = (token_ids.dims(), embedding.dims());
    let embedded = embedding.select(0, token_ids.reshape([batch * positions]));
    embedded.reshape([batch, positions, d_model])
}

/// A module on another device. The host waits for it: the memory that it had may be used again.
fn moved<M: Module>(module: M, device: &Device) -> M {
    let from = module.devices();
    if from.iter().all(|from| from == device) {
        return module;
    }
    // What has failed is told by whoever reads it.
    let _ = device.sync();
    let module = module.to_device(device);
    let _ = device.sync();
    module
}

fn check_batch(argument: &'static str, actual: usize, cache: &Cache) -> Result<(), CacheError> {
    if actual == cache.batch() {
        return Ok(());
    }
    Err(CacheError::BatchMismatch {
        argument,
        expected: cache.batch(),
        actual,
    })
}
