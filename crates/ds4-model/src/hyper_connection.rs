//! Hyper-connections around a sub-layer, and the head that collapses the streams at the end of a
//! model.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
pub use burn_ds4_ops::hyper_connection::Streams;
use burn_ds4_ops::hyper_connection::{self as ops, Norm, Sinkhorn};

use crate::norm::RmsNorm;
use crate::trace::Trace;
use crate::weights::{self, Initial, WeightSource};

/// Configuration of [`HyperConnection`] and [`HyperHead`].
#[derive(Config, Debug)]
pub struct HyperConnectionConfig {
    /// Width of a stream.
    pub d_model: usize,
    /// Number of streams.
    #[config(default = 4)]
    pub streams: usize,
    /// Sinkhorn iterations of the mixing matrix.
    #[config(default = 20)]
    pub sinkhorn_iterations: usize,
    /// Epsilon of gates and mixing matrix.
    #[config(default = 1e-6)]
    pub epsilon: f64,
    /// Epsilon of the RMS norm over all streams.
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
}

impl HyperConnectionConfig {
    /// Initializes the connection of one sub-layer.
    pub fn init(&self, device: &Device) -> HyperConnection {
        weights::dense(device, |source| self.build(source, ""))
    }

    /// Initializes the head at the end of a model.
    pub fn init_head(&self, device: &Device) -> HyperHead {
        weights::dense(device, |source| self.build_head(source, ""))
    }

    /// The connection of the tensors `{prefix}_..`.
    pub(crate) fn build(
        &self,
        source: &mut impl WeightSource,
        prefix: &str,
    ) -> Option<HyperConnection> {
        let n = self.streams;
        let outputs = (2 + n) * n;
        let projection = [outputs, n * self.d_model];
        let function = source.float(&format!("{prefix}_fn"), projection, Initial::Random);
        let base = source.float(&format!("{prefix}_base"), [outputs], Initial::Zeros);
        let name = format!("{prefix}_scale");
        let scale = source.arranged(&name, [3], [outputs], Initial::Ones, |scale| {
            let parts = scale.split(1, 0).into_iter().zip([n, n, n * n]);
            Tensor::cat(parts.map(|(part, times)| part.expand([times])).collect(), 0)
        });
        Some(HyperConnection {
            function: function?,
            base: base?,
            scale: scale?,
            sinkhorn_iterations: self.sinkhorn_iterations,
            epsilon: self.epsilon,
            norm_epsilon: self.norm_epsilon,
        })
    }

    /// The head of the tensors `{prefix}hc_head_..`.
    pub(crate) fn build_head(
        &self,
        source: &mut impl WeightSource,
        prefix: &str,
    ) -> Option<HyperHead> {
        let n = self.streams;
        let projection = [n, n * self.d_model];
        let function = source.float(&format!("{prefix}hc_head_fn"), projection, Initial::Random);
        let base = source.float(&format!("{prefix}hc_head_base"), [n], Initial::Zeros);
        let scale = source.float(&format!("{prefix}hc_head_scale"), [1], Initial::Ones);
        Some(HyperHead {
            function: function?,
            base: base?,
            scale: scale?,
            epsilon: self.epsilon,
            norm_epsilon: self.norm_epsilon,
        })
    }
}

/// Collapses the streams before a sub-layer and spreads its output after it. All coefficients are
/// computed in f32.
#[doc(alias = "mhc")]
#[derive(Module, Debug)]
pub struct HyperConnection {
    /// Projection of all streams to the coefficients: f32 `[(2 + n)·n, n·d]`.
    pub function: Param<Tensor<2>>,
    /// Offset of each coefficient: f32 `[(2 + n)·n]`.
    pub base: Param<Tensor<1>>,
    /// Scale of each coefficient: f32 `[(2 + n)·n]` (the three released scales, repeated n, n and
    /// n·n times).
    pub scale: Param<Tensor<1>>,
    /// Sinkhorn iterations of the mixing matrix.
    pub sinkhorn_iterations: usize,
    /// Epsilon of gates and mixing matrix.
    pub epsilon: f64,
    /// Epsilon of the RMS norm over all streams.
    pub norm_epsilon: f64,
}

impl HyperConnection {
    /// Number of streams.
    pub(crate) fn streams(&self) -> usize {
        let [projections, _] = self.function.dims();
        // Of a number n of streams, there are (2 + n)·n coefficients.
        (projections + 1).isqrt() - 1
    }

    /// Runs `layer` on the norm of the collapsed streams. The layer's output stays pending: the
    /// next connection, or the head, mixes it back together with its own work.
    ///
    /// # Shapes
    ///
    /// - `streams` and result: `[batch * positions, n, d]`
    /// - input and output of `layer`: `[batch, positions, d]`
    ///
    /// # Panics
    ///
    /// If `streams` does not have `batch * positions` tokens, or `layer` changes shape or device.
    pub fn forward(
        &self,
        streams: Streams,
        [batch, positions]: [usize; 2],
        norm: &RmsNorm,
        trace: &Trace,
        layer: impl FnOnce(Tensor<3>) -> Tensor<3>,
    ) -> Streams {
        let [tokens, _, d] = streams.dims();
        let mixed = ops::collapse_norm(
            streams,
            self.function.val(),
            self.base.val(),
            self.scale.val(),
            Sinkhorn {
                iterations: self.sinkhorn_iterations,
                epsilon: self.epsilon,
                norm_epsilon: self.norm_epsilon,
            },
            operands(norm),
        )
        .expect("streams that fit the parameters");
        trace.record_with("post", || mixed.coefficients.post());
        trace.record_with("comb", || mixed.coefficients.comb());
        trace.record_with("collapsed", || mixed.input.reshape([batch, positions, d]));

        let output = layer(mixed.normed.reshape([batch, positions, d]));
        Streams::Pending {
            output: output.reshape([tokens, d]),
            streams: mixed.streams,
            coefficients: mixed.coefficients,
        }
    }
}

fn operands(norm: &RmsNorm) -> Norm {
    Norm {
        weight: norm.weight.val(),
        epsilon: norm.epsilon,
    }
}

/// Collapses the streams into one vector per position.
#[derive(Module, Debug)]
pub struct HyperHead {
    /// Projection of all streams to their gates: f32 `[n, n·d]`.
    pub function: Param<Tensor<2>>,
    /// Offset of each gate: f32 `[n]`.
    pub base: Param<Tensor<1>>,
    /// Scale of all gates: f32 `[1]`.
    pub scale: Param<Tensor<1>>,
    /// Epsilon of the gates.
    pub epsilon: f64,
    /// Epsilon of the RMS norm over all streams.
    pub norm_epsilon: f64,
}

impl HyperHead {
    /// Collapses the streams.
    ///
    /// # Shapes
    ///
    /// - `streams`: `[batch, positions, n, d]`
    /// - output: `[batch, positions, d]`
    ///
    /// # Panics
    ///
    /// If the streams do not fit the parameters.
    pub fn forward(&self, streams: Tensor<4>) -> Tensor<3> {
        let [batch, positions, n, d] = streams.dims();
        ops::head(
            streams.reshape([batch * positions, n, d]),
            self.function.val(),
            self.base.val(),
            self.scale.val(),
            self.epsilon,
            self.norm_epsilon,
        )
        .expect("streams that fit the parameters")
        .reshape([batch, positions, d])
    }

    /// Collapses the streams, pending output included, and normalises the result.
    ///
    /// # Shapes
    ///
    /// - `streams`: `[batch * positions, n, d]`
    /// - output: `[batch * positions, d]`
    ///
    /// # Panics
    ///
    /// If the streams do not fit the parameters.
    pub fn forward_norm(&self, streams: Streams, norm: &RmsNorm) -> Tensor<2> {
        ops::head_norm(
            streams,
            self.function.val(),
            self.base.val(),
            self.scale.val(),
            self.epsilon,
            self.norm_epsilon,
            operands(norm),
        )
        .expect("streams that fit the parameters")
    }
}
