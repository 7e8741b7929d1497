//! DSpark: three more blocks that draft several tokens in one forward pass.
//!
//! The drafter reads what leaves some trunk layers, or in V4.1 what enters them, at the positions
//! whose tokens are known (the taps), of which it keeps a key/value row per position and layer. To
//! draft, it runs a block of tokens through its layers: the newest token, and a filler in the
//! places of the drafts. A Markov head then chooses the drafts one after the other, each by the one
//! before it.
//!
//! # Source
//!
//! DeepSeek-V4-Flash-0731 and V4.1 `inference/model.py`.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::markov::markov_drafts;
use burn_ds4_ops::topk::{Order, Windows, top_k};

use crate::block::{Block, BlockConfig, flattened};
use crate::cache::{LayerCache, Step};
use crate::config::DsparkParams;
use crate::hyper_connection::HyperHead;
use crate::linear::{PackedLinear, PackedLinearConfig, project_f32};
use crate::norm::{RmsNorm, RmsNormConfig};
use crate::probed_head::ProbedHead;
use crate::trace::Trace;
use crate::weights::{self, WeightSource, load_all};

/// Configuration of [`Dspark`].
#[derive(Config, Debug)]
pub struct DsparkConfig {
    /// A layer; its attention has a sliding window only.
    pub block: BlockConfig,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Sizes of the drafter.
    pub params: DsparkParams,
}

impl DsparkConfig {
    /// Initializes the drafter with random weights.
    ///
    /// # Panics
    ///
    /// If there are no layers.
    pub fn init(&self, device: &Device) -> Dspark {
        weights::dense(device, |source| self.build(source, ""))
    }

    /// The drafter of the tensors `{prefix}0..`, `{prefix}1..` and so on.
    pub(crate) fn build(&self, source: &mut impl WeightSource, prefix: &str) -> Option<Dspark> {
        let last = self.params.layers.checked_sub(1);
        let last = last.expect("a drafter has at least one layer");
        let first = |name: &str| format!("{prefix}0.{name}");
        let last = |name: &str| format!("{prefix}{last}.{name}");
        let connection = &self.block.hyper_connection;
        let (d, rank) = (connection.d_model, self.params.markov_rank);
        let taps = self.params.target_layers.len() * d;
        let norm = RmsNormConfig::new(d).with_epsilon(self.block.norm_epsilon);
        let projection = PackedLinearConfig::new(taps, d).build(source, &first("main_proj"));
        let context_norm = norm.build(source, &first("main_norm"));
        let layers = load_all((0..self.params.layers).map(|layer| {
            let prefix = format!("{prefix}{layer}.");
            self.block.build(source, &prefix)
        }));
        let head = connection.build_head(source, &last(""));
        let norm = norm.build(source, &last("norm"));
        let matrix = [self.vocab_size, rank];
        let embedding = source.embedding(&last("markov_head.markov_w1.weight"), matrix);
        let output = source.stored(&[last("markov_head.markov_w2.weight")], matrix);
        let confidence = source.stored(&[last("confidence_head.proj.weight")], [1, d + rank]);
        Some(Dspark {
            projection: projection?,
            context_norm: context_norm?,
            layers: layers?,
            head: head?,
            norm: norm?,
            markov_embedding: embedding?,
            markov_output: output?,
            confidence: confidence?,
            flash_head: None,
            params: self.params.clone(),
        })
    }
}

/// The DSpark drafter. Embedding and output matrix are the trunk's.
#[derive(Module, Debug)]
pub struct Dspark {
    /// `main_proj`: `[d_model, target layers · d_model]`.
    pub projection: PackedLinear,
    /// Norm of what is projected.
    pub context_norm: RmsNorm,
    /// The blocks.
    pub layers: Vec<Block>,
    /// Collapses the last block's streams.
    pub head: HyperHead,
    /// Norm before the output matrix.
    pub norm: RmsNorm,
    /// Embedding of the token before a draft: `[vocabulary, rank]`.
    pub markov_embedding: Param<Tensor<2>>,
    /// What such an embedding adds to the logits: `[vocabulary, rank]`.
    pub markov_output: Param<Tensor<2>>,
    /// Projects a draft's hidden state and embedding to its confidence: `[1, d_model + rank]`.
    pub confidence: Param<Tensor<2>>,
    /// Head that drafts are chosen with in place of the output matrix. Fewer drafts may be
    /// accepted; the verified text is the same. It stays on its device and is not a parameter.
    #[module(skip)]
    pub flash_head: Option<ProbedHead>,
    /// Sizes of the drafter.
    #[module(skip)]
    pub params: DsparkParams,
}

/// Drafts of a block, and what the [confidence](Dspark::confidence) in them depends on.
#[derive(Clone, Debug)]
pub struct BlockDrafts {
    /// The drafts, in order, -1 where there is no number to choose by: `[batch, drafts]`.
    pub ids: Tensor<2, Int>,
    /// The collapsed streams that they are chosen from: `[batch, drafts, d_model]`.
    pub hidden: Tensor<3>,
    /// The token before the first: `[batch, 1]`.
    pub tokens: Tensor<2, Int>,
}

impl Dspark {
    /// Stores the rows of positions whose tokens are known.
    ///
    /// # Shapes
    ///
    /// - `taps`: `[batch, positions, target layers · d_model]`
    pub(crate) fn append(
        &self,
        taps: Tensor<3>,
        step: &Step,
        layers: &mut [LayerCache],
        trace: &Trace,
    ) {
        let context = self.context_norm.forward(self.projection.forward(taps));
        trace.record("context", &context);
        for (layer, cache) in self.layers.iter().zip(layers) {
            layer.attention.append(context.clone(), step, cache);
        }
    }

    /// The last layer's streams `[batch, block, n, d_model]` (n is 1 where they are [collapsed by
    /// the last connection](crate::config::ModelConfig::late_pre_mix)), for the block's embeddings
    /// `[batch, block, d_model]` and token ids.
    pub(crate) fn forward(
        &self,
        embedded: Tensor<3>,
        token_ids: Tensor<2, Int>,
        step: &Step,
        layers: &mut [LayerCache],
        trace: &Trace,
    ) -> Tensor<4> {
        let positions = token_ids.dims();
        let streams = self.layers[0].attention_connection.streams();
        let mut streams = flattened(embedded.unsqueeze_dim::<4>(2).repeat_dim(2, streams));
        for (index, (layer, cache)) in self.layers.iter().zip(layers).enumerate() {
            let trace = trace.scope(&format!("layer{index}"));
            streams = layer.forward(streams, token_ids.clone(), step, cache, &trace);
        }
        self.head.end(streams, positions)
    }

    /// Chooses drafts one after the other: each is the token with the highest logit, of equal ones
    /// the lowest id.
    ///
    /// # Arguments
    ///
    /// * `streams` - `[batch, drafts, n, d_model]`, n being 1 in V4.1: of those of the
    ///   [block](crate::model::Model::forward_dspark) the first, as many as drafts are wanted.
    /// * `tokens` - `[batch, 1]`: the token before the first draft.
    /// * `output` - the trunk's output matrix, `[vocabulary, d_model]`.
    ///
    /// # Errors
    ///
    /// [`OpError`] where the [clustered head](Self::flash_head) is of another width or dtype.
    pub fn choose(
        &self,
        streams: Tensor<4>,
        tokens: Tensor<2, Int>,
        output: Tensor<2>,
        trace: &Trace,
    ) -> Result<BlockDrafts, OpError> {
        let [batch, count, _, _] = streams.dims();
        let trace = trace.scope("dspark");
        let hidden = self.head.forward(streams);
        trace.record("hidden", &hidden);
        let normed = self.norm.forward(hidden.clone());
        let (logits, ids) = match &self.flash_head {
            None => (project_f32(normed, output), None),
            Some(head) => {
                let found = head.candidates(normed)?;
                let shape = [batch, count, found.ids.dims()[1]];
                (found.logits.reshape(shape), Some(found.ids.reshape(shape)))
            }
        };
        trace.record("logits", &logits);
        let drafts = markov_drafts(
            logits,
            ids,
            tokens.clone(),
            self.markov_embedding.val(),
            self.markov_output.val(),
        )?;
        let drafts = BlockDrafts {
            ids: drafts,
            hidden,
            tokens,
        };
        trace.record("drafts", &drafts.ids);
        trace.record_with("confidence", || self.confidence(&drafts));
        Ok(drafts)
    }

    /// The logit of each draft's probability to be accepted, if those before it are: f32 `[batch,
    /// drafts]`.
    pub fn confidence(&self, drafts: &BlockDrafts) -> Tensor<2> {
        let BlockDrafts {
            ids,
            hidden,
            tokens,
        } = drafts;
        let ([batch, count], [vocabulary, rank]) = (ids.dims(), self.markov_embedding.dims());
        let first = tokens.clone().cast(ids.dtype());
        let before = Tensor::cat(vec![first, ids.clone()], 1).narrow(1, 0, count);
        let before = before.clamp(0, vocabulary as i64 - 1);
        let embedding = self.markov_embedding.val();
        let embedded = embedding.select(0, before.reshape([batch * count]));
        let embedded = embedded.reshape([batch, count, rank]);
        let inputs = Tensor::cat(vec![hidden.clone(), embedded], 2);
        project_f32(inputs, self.confidence.val()).squeeze_dim(2)
    }
}

/// The token with the highest logit of each row `[rows, vocabulary]`, of equal ones the lowest id:
/// `[rows, 1]`; -1 where no logit is a number above `-inf`.
pub(crate) fn most_likely(logits: Tensor<2>) -> Result<Tensor<2, Int>, OpError> {
    let (values, ids) = top_k(logits, Windows::All, 1, Order::Column)?;
    // Not so for NaN, which ranks last, nor for infinity below.
    let is_number = values.greater_equal_elem(f32::MIN);
    Ok(ids.mask_fill(is_number.bool_not(), -1))
}
