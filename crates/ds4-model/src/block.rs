//! One transformer block: attention and mixture of experts, each inside hyper-connections.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

use crate::attention::{Attention, AttentionConfig};
use crate::cache::{LayerCache, Step};
use crate::hyper_connection::{HyperConnection, HyperConnectionConfig, Streams};
use crate::moe::{MoeLayer, MoeLayerConfig};
use crate::norm::{RmsNorm, RmsNormConfig};
use crate::trace::Trace;

/// Configuration of [`Block`].
#[derive(Config, Debug)]
pub struct BlockConfig {
    /// The attention.
    pub attention: AttentionConfig,
    /// The mixture of experts.
    pub moe: MoeLayerConfig,
    /// The hyper-connections of both.
    pub hyper_connection: HyperConnectionConfig,
    /// Epsilon of the two norms.
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
}

impl BlockConfig {
    /// Initializes the block with random weights.
    pub fn init(&self, device: &Device) -> Block {
        let norm = || {
            RmsNormConfig::new(self.hyper_connection.d_model)
                .with_epsilon(self.norm_epsilon)
                .init(device)
        };
        Block {
            attention_connection: self.hyper_connection.init(device),
            attention_norm: norm(),
            attention: self.attention.init(device),
            moe_connection: self.hyper_connection.init(device),
            moe_norm: norm(),
            moe: self.moe.init(device),
        }
    }
}

/// One transformer block.
#[derive(Module, Debug)]
pub struct Block {
    /// Hyper-connection around the attention.
    pub attention_connection: HyperConnection,
    /// Norm of the attention's input.
    pub attention_norm: RmsNorm,
    /// The attention.
    pub attention: Attention,
    /// Hyper-connection around the mixture of experts.
    pub moe_connection: HyperConnection,
    /// Norm of the mixture's input.
    pub moe_norm: RmsNorm,
    /// The mixture of experts.
    pub moe: MoeLayer,
}

impl Block {
    /// Applies the block to the new positions of `step`. What the mixture of experts makes is left to be mixed into the streams by
    /// whoever needs them next.
    ///
    /// # Shapes
    ///
    /// - `streams`: `[batch * positions, n, d_model]`
    /// - `token_ids`: `[batch, positions]`, used where the experts are looked up by token id
    /// - output: like `streams`
    pub fn forward(
        &self,
        streams: Streams,
        token_ids: Tensor<2, Int>,
        step: &Step,
        cache: &mut LayerCache,
        trace: &Trace,
    ) -> Streams {
        let positions = token_ids.dims();
        let streams = self.attention_connection.forward(
            streams,
            positions,
            &self.attention_norm,
            &trace.scope("attention_connection"),
            |x| {
                self.attention
                    .forward_traced(x, step, cache, &trace.scope("attention"))
            },
        );
        let streams = self.moe_connection.forward(
            streams,
            positions,
            &self.moe_norm,
            &trace.scope("moe_connection"),
            |x| self.moe.forward_traced(x, token_ids, &trace.scope("moe")),
        );
        trace.record_with("output", || unflattened(streams.clone(), positions));
        streams
    }
}

/// `[tokens, n, d]` to `[batch, positions, n, d]`, with nothing pending.
pub(crate) fn unflattened(streams: Streams, [batch, positions]: [usize; 2]) -> Tensor<4> {
    let [_, n, d] = streams.dims();
    let streams = streams.ready();
    let streams = streams.expect("a layer that keeps shape and dtype");
    streams.reshape([batch, positions, n, d])
}

/// `[batch, positions, n, d]` to `[tokens, n, d]`.
pub(crate) fn flattened(streams: Tensor<4>) -> Streams {
    let [batch, positions, n, d] = streams.dims();
    streams.reshape([batch * positions, n, d]).into()
}
