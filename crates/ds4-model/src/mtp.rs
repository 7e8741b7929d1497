//! Multi-token prediction: one more block that predicts the token after the next.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::matmul::INVARIANT_ROWS;

use crate::block::{Block, BlockConfig, flattened, unflattened};
use crate::cache::{LayerCache, Step};
use crate::hyper_connection::HyperHead;
use crate::linear::{PackedLinear, PackedLinearConfig};
use crate::norm::{RmsNorm, RmsNormConfig};
use crate::probed_head::ProbedHead;
use crate::trace::Trace;
use crate::weights::{self, WeightSource};

/// Configuration of [`MtpLayer`].
#[derive(Config, Debug)]
pub struct MtpLayerConfig {
    /// The block; its attention has a sliding window only.
    pub block: BlockConfig,
}

impl MtpLayerConfig {
    /// Initializes the layer with random weights.
    pub fn init(&self, device: &Device) -> MtpLayer {
        weights::dense(device, |source| self.build(source, ""))
    }

    /// The layer of the tensors `{prefix}..`.
    pub(crate) fn build(&self, source: &mut impl WeightSource, prefix: &str) -> Option<MtpLayer> {
        let name = |name: &str| format!("{prefix}{name}");
        let connection = &self.block.hyper_connection;
        let d = connection.d_model;
        let linear = PackedLinearConfig::new(d, d);
        let norm = RmsNormConfig::new(d).with_epsilon(self.block.norm_epsilon);
        let embedding_norm = norm.build(source, &name("enorm"));
        let embedding_projection = linear.build(source, &name("e_proj"));
        let stream_norm = norm.build(source, &name("hnorm"));
        let stream_projection = linear.build(source, &name("h_proj"));
        let block = self.block.build(source, prefix);
        let head = connection.build_head(source, prefix);
        let norm = norm.build(source, &name("norm"));
        Some(MtpLayer {
            embedding_norm: embedding_norm?,
            embedding_projection: embedding_projection?,
            stream_norm: stream_norm?,
            stream_projection: stream_projection?,
            block: block?,
            head: head?,
            norm: norm?,
            flash_head: None,
        })
    }
}

/// The multi-token-prediction layer. Embedding and output matrix are the trunk's.
#[doc(alias = "nextn")]
#[derive(Module, Debug)]
pub struct MtpLayer {
    /// Norm of the next token's embedding.
    pub embedding_norm: RmsNorm,
    /// Projection of the next token's embedding: `[d_model, d_model]`.
    pub embedding_projection: PackedLinear,
    /// Norm of each stream.
    pub stream_norm: RmsNorm,
    /// Projection of each stream: `[d_model, d_model]`.
    pub stream_projection: PackedLinear,
    /// The block.
    pub block: Block,
    /// Collapses the block's streams.
    pub head: HyperHead,
    /// Norm before the output matrix.
    pub norm: RmsNorm,
    /// Head that [drafts](crate::generate::EngineConfig::drafts) are chosen with in place of the
    /// output matrix. Fewer drafts may be accepted; the verified text is the same. As for [the
    /// trunk](crate::model::Model::flash_head), it stays on its device and is not a parameter.
    #[module(skip)]
    pub flash_head: Option<ProbedHead>,
}

impl MtpLayer {
    /// Computes the layer's streams at the new positions of `step`.
    ///
    /// # Shapes
    ///
    /// - `streams`: `[batch, positions, n, d_model]`, the trunk's before its head (or this layer's
    ///   own, to draft further)
    /// - `embedded`: `[batch, positions, d_model]`, embeddings of the token after each position
    /// - `token_ids`: `[batch, positions]`, the ids of these tokens
    /// - output: like `streams`
    pub fn forward(
        &self,
        streams: Tensor<4>,
        embedded: Tensor<3>,
        token_ids: Tensor<2, Int>,
        step: &Step,
        cache: &mut LayerCache,
        trace: &Trace,
    ) -> Tensor<4> {
        let embedded = self
            .embedding_projection
            .forward(self.embedding_norm.forward(embedded));
        let streams = self.project_streams(self.stream_norm.forward(streams));
        let streams = streams + embedded.unsqueeze_dim::<4>(2);
        let positions = token_ids.dims();
        let streams = flattened(streams);
        let streams = self.block.forward(streams, token_ids, step, cache, trace);
        unflattened(streams, positions)
    }

    /// Projects up to [`INVARIANT_ROWS`] tokens in parts: their streams together may be more rows
    /// than the number up to which products are row-invariant.
    fn project_streams(&self, streams: Tensor<4>) -> Tensor<4> {
        let [batch, positions, n, d] = streams.dims();
        let tokens = batch * positions;
        if tokens > INVARIANT_ROWS || tokens * n <= INVARIANT_ROWS {
            return self.stream_projection.forward(streams);
        }
        let parts = streams
            .reshape([tokens, n, d])
            .split((INVARIANT_ROWS / n).max(1), 0);
        let projected = parts
            .into_iter()
            .map(|part| self.stream_projection.forward(part));
        Tensor::cat(projected.collect(), 0).reshape([batch, positions, n, d])
    }

    /// Collapses and normalises the layer's streams, as input of the output matrix:
    /// `[batch, positions, d_model]`.
    pub fn hidden(&self, streams: Tensor<4>) -> Tensor<3> {
        let [batch, positions, _, d] = streams.dims();
        let hidden = self.head.forward_norm(flattened(streams), &self.norm);
        hidden.reshape([batch, positions, d])
    }
}
