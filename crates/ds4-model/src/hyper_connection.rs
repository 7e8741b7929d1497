//! Hyper-connections around a sub-layer, and the head that collapses the streams at the end of a model.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
pub use burn_ds4_ops::hyper_connection::Streams;
use burn_ds4_ops::hyper_connection::{self as ops, Norm, Sinkhorn};

use crate::linear::random;
use crate::norm::RmsNorm;
use crate::trace::Trace;

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
        let outputs = (2 + self.streams) * self.streams;
        HyperConnection {
            function: random([outputs, self.streams * self.d_model], device),
            base: Param::from_tensor(Tensor::zeros([outputs], device)),
            scale: Param::from_tensor(Tensor::ones([outputs], device)),
            sinkhorn_iterations: self.sinkhorn_iterations,
            epsilon: self.epsilon,
            norm_epsilon: self.norm_epsilon,
        }
    }

    /// Initializes the head at the end of a model.
    pub fn init_head(&self, device: &Device) -> HyperHead {
        HyperHead {
            function: random([self.streams, self.streams * self.d_model], device),
            base: Param::from_tensor(Tensor::zeros([self.streams], device)),
            scale: Param::from_tensor(Tensor::ones([1], device)),
            epsilon: self.epsilon,
            norm_epsilon: self.norm_epsilon,
        }
    }
}

/// Collapses the streams before a sub-layer and spreads its output after it. All coefficients are computed in f32.
#[derive(Module, Debug)]
pub struct HyperConnection {
    /// Projection of all streams to the coefficients: f32 `[(2 + n)·n, n·d]`.
    pub function: Param<Tensor<2>>,
    /// Offset of each coefficient: f32 `[(2 + n)·n]`.
    pub base: Param<Tensor<1>>,
    /// Scale of each coefficient: f32 `[(2 + n)·n]` (the three released scales, repeated n, n and n·n times).
    pub scale: Param<Tensor<1>>,
    /// Sinkhorn iterations of the mixing matrix.
    pub sinkhorn_iterations: usize,
    /// Epsilon of gates and mixing matrix.
    pub epsilon: f64,
    /// Epsilon of the RMS norm over all streams.
    pub norm_epsilon: f64,
}

impl HyperConnection {
    /// Runs `layer` on the norm of the collapsed streams. Its output is left to be mixed back by whoever needs the streams next:
    /// another connection or the head does so together with what it does itself.
    ///
    /// # Shapes
    ///
    /// - `streams` and result: `[batch * positions, n, d]`
    /// - input and output of `layer`: `[batch, positions, d]`
    ///
    /// # Panics
    ///
    /// If the streams are not of `batch * positions` tokens, or `layer` changes shape or device.
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

    /// Collapses the streams, with whatever is pending, and normalises what comes of it.
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
