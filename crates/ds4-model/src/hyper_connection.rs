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
    /// Whether streams are collapsed by the weights that the connection before has computed.
    #[config(default = false)]
    pub late: bool,
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
            late: self.late,
        })
    }

    /// The head of the tensors `{prefix}hc_head_..`, if there are any.
    pub(crate) fn build_head(
        &self,
        source: &mut impl WeightSource,
        prefix: &str,
    ) -> Option<HyperHead> {
        if self.late {
            return Some(HyperHead { gates: None });
        }
        let n = self.streams;
        let projection = [n, n * self.d_model];
        let function = source.float(&format!("{prefix}hc_head_fn"), projection, Initial::Random);
        let base = source.float(&format!("{prefix}hc_head_base"), [n], Initial::Zeros);
        let scale = source.float(&format!("{prefix}hc_head_scale"), [1], Initial::Ones);
        let gates = HeadGates {
            function: function?,
            base: base?,
            scale: scale?,
            epsilon: self.epsilon,
            norm_epsilon: self.norm_epsilon,
        };
        Some(HyperHead { gates: Some(gates) })
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
    /// Whether streams are collapsed by the weights that the connection before has computed, and
    /// those of this one are for the next. They go with the streams.
    pub late: bool,
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
        let collapse = match self.late {
            true => {
                trace.record_with("pre", || streams.pre());
                ops::collapse_norm_late
            }
            false => ops::collapse_norm,
        };
        let mixed = collapse(
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
    /// What the weights of the streams are computed by. Without, they are those that the last
    /// [connection](HyperConnection::late) has computed.
    pub gates: Option<HeadGates>,
}

/// Computes the weights of the streams in a [`HyperHead`].
#[derive(Module, Debug)]
pub struct HeadGates {
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
    /// - `streams`: `[batch, positions, n, d]`; one stream, as [`end`](Self::end) returns it, where
    ///   there are no [gates](Self::gates)
    /// - output: `[batch, positions, d]`
    ///
    /// # Panics
    ///
    /// If the streams do not fit the parameters.
    pub fn forward(&self, streams: Tensor<4>) -> Tensor<3> {
        let [batch, positions, n, d] = streams.dims();
        let streams = streams.reshape([batch * positions, n, d]);
        let collapsed = match &self.gates {
            Some(gates) => ops::head(
                streams,
                gates.function.val(),
                gates.base.val(),
                gates.scale.val(),
                gates.epsilon,
                gates.norm_epsilon,
            ),
            None => ops::end_late(streams.into()),
        };
        let collapsed = collapsed.expect("streams that fit the parameters");
        collapsed.reshape([batch, positions, d])
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
        let fitting = "streams that fit the parameters";
        let Some(gates) = &self.gates else {
            return norm.forward(ops::end_late(streams).expect(fitting));
        };
        ops::head_norm(
            streams,
            gates.function.val(),
            gates.base.val(),
            gates.scale.val(),
            gates.epsilon,
            gates.norm_epsilon,
            operands(norm),
        )
        .expect(fitting)
    }

    /// The streams that [`forward`](Self::forward) takes, nothing pending: `[batch, positions, n,
    /// d]`. Where there are no [gates](Self::gates), they are collapsed into one, since their
    /// weights are not kept.
    ///
    /// # Panics
    ///
    /// As [`forward_norm`](Self::forward_norm), and for another number of tokens.
    pub fn end(&self, streams: Streams, [batch, positions]: [usize; 2]) -> Tensor<4> {
        let [_, n, d] = streams.dims();
        let (streams, n) = match &self.gates {
            Some(_) => (streams.ready(), n),
            None => (ops::end_late(streams).map(|one| one.unsqueeze_dim(1)), 1),
        };
        let streams = streams.expect("streams that fit the parameters");
        streams.reshape([batch, positions, n, d])
    }
}
