//! The modules of a model, and where they live.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_ds4_ops::transfer::transfer;

use crate::block::Block;
use crate::cache::{Cache, CacheConfig, CacheError, CacheLayout, PagePool};
use crate::config::ModelConfig;
use crate::dspark::Dspark;
use crate::engram::EngramLookup;
use crate::hyper_connection::HyperHead;
use crate::mtp::MtpLayer;
use crate::norm::RmsNorm;
use crate::parallel::{self, Divider, TensorParallel};
use crate::placement::{Place, Placement, PlacementError, check_shared};
use crate::probed_head::ProbedHead;

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
    /// What ids and hashes engrams read their tables by, where there are some.
    #[module(skip)]
    pub engrams: Option<EngramLookup>,
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
        let begins = placement.runs().iter().map(|run| run.layers.start);
        check_shared(&self.config, begins, placement.ranks().is_empty())?;
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
            engrams: self.engrams,
            placement: placement.clone(),
            config: self.config,
        };
        Ok(model.with_draft_embedding())
    }

    /// The same with a copy of the embeddings for what drafts, if it needs one.
    pub(super) fn with_draft_embedding(self) -> Self {
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

    /// Makes an empty pool of pages for caches of the trunk, of so many positions each.
    pub fn new_page_pool(&self, positions: usize) -> PagePool {
        let (layout, placement) = self.trunk_cache();
        let dtype = self.embedding.val().dtype();
        PagePool::new(&layout, dtype.into(), &placement, positions)
    }

    /// Makes an empty cache like [`new_cache`](Self::new_cache), whose compressed rows are in pages
    /// of this model's [pool](Self::new_page_pool).
    ///
    /// # Errors
    ///
    /// As [`Cache::in_pages`].
    pub fn new_cache_in_pages(
        &self,
        options: CacheConfig,
        pool: &PagePool,
    ) -> Result<Cache, CacheError> {
        let (layout, placement) = self.trunk_cache();
        let options = self.of_activations(options);
        Cache::in_pages(layout, options, &placement, pool)
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
        Cache::placed(layout, self.of_activations(options), placement)
    }

    fn of_activations(&self, options: CacheConfig) -> CacheConfig {
        CacheConfig {
            dtype: self.embedding.val().dtype().into(),
            ..options
        }
    }
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
