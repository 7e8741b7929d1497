//! One transformer block: attention and mixture of experts, each inside hyper-connections.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

use crate::attention::{Attention, AttentionConfig};
use crate::cache::{LayerCache, Step};
use crate::engram::{Engram, EngramConfig};
use crate::hyper_connection::{HyperConnection, HyperConnectionConfig, Streams};
use crate::moe::{MoeLayer, MoeLayerConfig};
use crate::norm::{RmsNorm, RmsNormConfig};
use crate::trace::Trace;
use crate::weights::{self, WeightSource, all_or_nothing};

/// Configuration of [`Block`].
#[derive(Config, Debug)]
pub struct BlockConfig {
    /// The attention.
    pub attention: AttentionConfig,
    /// The mixture of experts.
    pub moe: MoeLayerConfig,
    /// The hyper-connections of both.
    pub hyper_connection: HyperConnectionConfig,
    /// The engram before both, if there is one.
    pub engram: Option<EngramConfig>,
    /// Epsilon of the two norms.
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
}

impl BlockConfig {
    /// Initializes the block with random weights.
    pub fn init(&self, device: &Device) -> Block {
        weights::dense(device, |source| self.build(source, ""))
    }

    /// The block of the tensors `{prefix}..`.
    pub(crate) fn build(&self, source: &mut impl WeightSource, prefix: &str) -> Option<Block> {
        let name = |name: &str| format!("{prefix}{name}");
        let connection = &self.hyper_connection;
        let norm = RmsNormConfig::new(connection.d_model).with_epsilon(self.norm_epsilon);
        let attention_connection = connection.build(source, &name("hc_attn"));
        let attention_norm = norm.build(source, &name("attn_norm"));
        let attention = self.attention.build(source, &name("attn."));
        let moe_connection = connection.build(source, &name("hc_ffn"));
        let moe_norm = norm.build(source, &name("ffn_norm"));
        let moe = self.moe.build(source, &name("ffn."));
        let engram = self.engram.as_ref();
        let engram = engram.map(|engram| engram.build(source, &name("engram.")));
        Some(Block {
            engram: all_or_nothing(engram)?,
            attention_connection: attention_connection?,
            attention_norm: attention_norm?,
            attention: attention?,
            moe_connection: moe_connection?,
            moe_norm: moe_norm?,
            moe: moe?,
        })
    }
}

/// One transformer block.
#[derive(Module, Debug)]
pub struct Block {
    /// Changes the streams before anything else.
    pub engram: Option<Engram>,
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
    /// Applies the block to the new positions of `step`. The output of the mixture of experts stays
    /// pending: whichever module needs the streams next mixes it in.
    ///
    /// # Shapes
    ///
    /// - `streams`: `[batch * positions, n, d_model]`
    /// - `token_ids`: `[batch, positions]`, used where the experts are looked up by token id
    /// - output: like `streams`
    ///
    /// # Panics
    ///
    /// As [`Attention::forward`]. A block with an engram panics, too: only a forward call of the
    /// model looks up what the tables have for a step.
    ///
    /// # Example
    ///
    /// A block with random weights and a cache of its own, two positions.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use ds4_model::cache::{Cache, CacheConfig, CacheLayout};
    /// use ds4_model::{checkpoint::Checkpoint, trace::Trace};
    ///
    /// let device = Device::flex();
    /// let config = Checkpoint::open("../../assets/ds4-tiny".as_ref())?.config().clone();
    /// let block = config.block(0).init(&device);
    /// let layout = CacheLayout { layers: vec![config.layers[0]], ..CacheLayout::trunk(&config) };
    /// let mut cache = Cache::new(layout, CacheConfig::default(), &device)?;
    /// let shape = [2, config.hc_mult, config.hidden_size];
    /// let streams = Tensor::<3>::ones(shape, &device);
    /// let ids = Tensor::from_ints([[7, 8]], &device);
    /// let step = cache.begin(2)?;
    /// let layer = &mut cache.layers_mut()[0];
    /// let streams = block.forward(streams.into(), ids, &step, layer, &Trace::off());
    /// cache.commit(step)?;
    /// assert_eq!(streams.ready()?.dims(), shape);
    /// assert_eq!(cache.lengths(), [2]);
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward(
        &self,
        streams: Streams,
        token_ids: Tensor<2, Int>,
        step: &Step,
        cache: &mut LayerCache,
        trace: &Trace,
    ) -> Streams {
        let streams = self.enter(streams, step, trace);
        self.pass(streams, token_ids, step, cache, trace)
    }

    /// Applies the engram, if there is one. What it has for the positions of the step must have
    /// been handed on.
    pub(crate) fn enter(&self, streams: Streams, step: &Step, trace: &Trace) -> Streams {
        let Some(engram) = &self.engram else {
            return streams;
        };
        let layer = trace.scope("engram");
        let rows = step.handed().engrams.remove(&engram.layer);
        engram.forward(streams, rows.expect("rows of the step"), &layer)
    }

    /// Applies all that comes after [`enter`](Self::enter).
    pub(crate) fn pass(
        &self,
        streams: Streams,
        token_ids: Tensor<2, Int>,
        step: &Step,
        cache: &mut LayerCache,
        trace: &Trace,
    ) -> Streams {
        let positions = token_ids.dims();
        let streams = self.attend(streams, positions, step, cache, trace);
        let streams = self.mix_experts(streams, token_ids, step, trace);
        trace.record_with("output", || unflattened(streams.clone(), positions));
        streams
    }

    /// Applies the attention, whose output stays pending.
    pub(crate) fn attend(
        &self,
        streams: Streams,
        positions: [usize; 2],
        step: &Step,
        cache: &mut LayerCache,
        trace: &Trace,
    ) -> Streams {
        self.attention_connection.forward(
            streams,
            positions,
            &self.attention_norm,
            &trace.scope("attention_connection"),
            |x| {
                self.attention
                    .forward_traced(x, step, cache, &trace.scope("attention"))
            },
        )
    }

    /// Applies the mixture of experts, whose output stays pending.
    pub(crate) fn mix_experts(
        &self,
        streams: Streams,
        token_ids: Tensor<2, Int>,
        step: &Step,
        trace: &Trace,
    ) -> Streams {
        self.moe_connection.forward(
            streams,
            token_ids.dims(),
            &self.moe_norm,
            &trace.scope("moe_connection"),
            |x| {
                let trace = trace.scope("moe");
                self.moe.forward_traced(x, token_ids, step.vacant(), &trace)
            },
        )
    }
}

/// Mixes in pending output, and reshapes `[tokens, n, d]` to `[batch, positions, n, d]`.
pub(crate) fn unflattened(streams: Streams, [batch, positions]: [usize; 2]) -> Tensor<4> {
    let [_, n, d] = streams.dims();
    let streams = streams.ready();
    let streams = streams.expect("a layer that keeps shape and dtype");
    streams.reshape([batch, positions, n, d])
}

/// Reshapes `[batch, positions, n, d]` to `[tokens, n, d]`.
pub(crate) fn flattened(streams: Tensor<4>) -> Streams {
    let [batch, positions, n, d] = streams.dims();
    streams.reshape([batch * positions, n, d]).into()
}
