//! The part of an engram in a layer.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::hyper_connection::Streams;

use crate::linear::{PackedLinear, PackedLinearConfig};
use crate::trace::Trace;
use crate::weights::{self, EngramTable, Initial, WeightSource};

/// The least magnitude of the product of stream and key, of which the gate takes the root.
const LEAST_DOT: f64 = 1e-6;

/// Configuration of [`Engram`].
#[derive(Config, Debug)]
pub struct EngramConfig {
    /// Width of a stream.
    pub d_model: usize,
    /// Number of streams.
    pub streams: usize,
    /// Rows of the table that a token reads.
    pub columns: usize,
    /// Width of a row.
    pub width: usize,
    /// Rows of the table.
    pub rows: usize,
    /// The layer that it is before.
    pub layer: usize,
    /// Epsilon of the norms of streams and keys.
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
}

impl EngramConfig {
    /// Initializes the engram with random weights, and a table of random rows that takes no memory.
    pub fn init(&self, device: &Device) -> Engram {
        weights::dense(device, |source| self.build(source, ""))
    }

    /// The engram of the tensors `{prefix}..`.
    pub(crate) fn build(&self, source: &mut impl WeightSource, prefix: &str) -> Option<Engram> {
        let (d, n) = (self.d_model, self.streams);
        let name = |name: &str| format!("{prefix}{name}");
        let linear = PackedLinearConfig::new(self.columns * self.width, (n + 1) * d);
        let projection = linear.build(source, &name("wkv"));
        let stream_weight = source.float(&name("q_weight"), [n, d], Initial::Ones);
        let key_weight = source.float(&name("k_weight"), [n, d], Initial::Ones);
        let table = source.lookup(&name("embed"), [self.rows, self.width]);
        Some(Engram {
            projection: projection?,
            stream_weight: stream_weight?,
            key_weight: key_weight?,
            table: table?,
            norm_epsilon: self.norm_epsilon,
            layer: self.layer,
        })
    }
}

/// Adds to each stream what a table has for the newest n-grams, as far as the stream asks for it.
///
/// Of the rows, a key for each stream and one value are made. The gate of a stream follows from the
/// product of its norm with the norm of its key.
///
/// # Source
///
/// DeepSeek-V4.1 `inference/engram.py`.
#[derive(Module, Debug)]
pub struct Engram {
    /// `wkv`: `[(streams + 1) · d_model, columns · width]`, the keys and then the value.
    pub projection: PackedLinear,
    /// Weight of the streams' norm: f32 `[streams, d_model]`.
    pub stream_weight: Param<Tensor<2>>,
    /// Weight of the keys' norm: f32 `[streams, d_model]`.
    pub key_weight: Param<Tensor<2>>,
    /// Epsilon of both norms.
    pub norm_epsilon: f64,
    /// The layer that it is before.
    pub layer: usize,
    /// The table, on the host.
    #[module(skip)]
    pub table: EngramTable,
}

impl Engram {
    /// Applies the engram.
    ///
    /// # Shapes
    ///
    /// - `streams`: `[tokens, n, d_model]`
    /// - `rows`: `[tokens, columns · width]`, the rows of each token side by side
    /// - output: like `streams`, with the weights of the connection before
    ///
    /// # Panics
    ///
    /// If the shapes do not fit the weights.
    pub fn forward(&self, streams: Streams, rows: Tensor<2>, trace: &Trace) -> Streams {
        let pre = streams.pre();
        let streams = streams.ready().expect("a layer that keeps shape and dtype");
        let ([tokens, n, d], dtype) = (streams.dims(), FloatDType::from(streams.dtype()));
        let projected = self.projection.forward(rows).cast(FloatDType::F32);
        let keys = projected
            .clone()
            .narrow(1, 0, n * d)
            .reshape([tokens, n, d]);
        let value = projected.narrow(1, n * d, d);
        let wide = streams.cast(FloatDType::F32);

        let inverse_rms = |x: Tensor<3>| {
            let mean = x.square().mean_dim(2);
            (mean + self.norm_epsilon).sqrt().recip()
        };
        let weight = self.stream_weight.val() * self.key_weight.val();
        let dot = (wide.clone() * weight.unsqueeze::<3>() * keys.clone()).sum_dim(2);
        let dot = dot * (d as f64).powf(-0.5);
        let dot = dot * inverse_rms(wide.clone()) * inverse_rms(keys.clone());
        let root = dot.clone().abs().clamp_min(LEAST_DOT).sqrt();
        let root = root.clone().mask_where(dot.lower_elem(0.0), -root);
        let gate = sigmoid(root);
        trace.record("key", &keys);
        trace.record("value", &value);
        trace.record("gate", &gate);
        let streams = (wide + gate * value.unsqueeze_dim(1)).cast(dtype);
        trace.record("output", &streams);
        Streams::Weighted { streams, pre }
    }
}
