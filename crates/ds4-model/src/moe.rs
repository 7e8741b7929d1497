//! The mixture-of-experts layer: a router, routed experts and shared experts.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_ds4_ops::moe::{Experts, expert_ffn, moe_ffn};

use crate::linear::WeightStack;
use crate::router::{Router, RouterConfig, Routing};
use crate::trace::Trace;
use crate::weights::{self, WeightSource};

/// Gate above up, as a checkpoint names them.
const GATE_UP: [&str; 2] = [".w1", ".w3"];
const DOWN: [&str; 1] = [".w2"];

/// Configuration of [`MoeLayer`].
#[derive(Config, Debug)]
pub struct MoeLayerConfig {
    /// Width of a token.
    pub d_model: usize,
    /// Inner width of a routed expert.
    pub d_expert: usize,
    /// Number of routed experts.
    pub experts: usize,
    /// Routed experts per token.
    pub experts_per_token: usize,
    /// Number of shared experts.
    #[config(default = 1)]
    pub shared_experts: usize,
    /// Sum of a token's routing weights.
    #[config(default = 1.0)]
    pub scale: f64,
    /// Clamp of the SwiGLU inputs.
    #[config(default = "Some(10.0)")]
    pub swiglu_limit: Option<f64>,
    /// Vocabulary of a hash router; `None` for a score router.
    pub hash_vocabulary: Option<usize>,
}

impl MoeLayerConfig {
    /// Initializes the layer with random weights.
    ///
    /// # Panics
    ///
    /// If `experts_per_token` is 0 or larger than `experts`.
    pub fn init(&self, device: &Device) -> MoeLayer {
        weights::dense(device, |source| self.build(source, ""))
    }

    /// The layer of the tensors `{prefix}..`.
    pub(crate) fn build(&self, source: &mut impl WeightSource, prefix: &str) -> Option<MoeLayer> {
        let (d, inner) = (self.d_model, self.d_expert);
        let router = RouterConfig::new(d, self.experts, self.experts_per_token)
            .with_scale(self.scale)
            .build(source, &format!("{prefix}gate."), self.hash_vocabulary);
        let (name, experts) = (format!("{prefix}experts"), Some(self.experts));
        let gate_up = source.stack(&name, experts, &GATE_UP, [inner, d]);
        let down = source.stack(&name, experts, &DOWN, [d, inner]);
        let shared = SharedExpertConfig::new(d, inner * self.shared_experts)
            .with_swiglu_limit(self.swiglu_limit)
            .build(source, &format!("{prefix}shared_experts"));
        Some(MoeLayer {
            router: router?,
            gate_up: gate_up?,
            down: down?,
            shared: shared?,
            swiglu_limit: self.swiglu_limit.unwrap_or(f64::INFINITY),
        })
    }
}

/// `Σ_k weight_k · expert_k(x) + shared(x)`.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor, s};
/// use ds4_model::moe::MoeLayerConfig;
///
/// let device = Device::flex();
/// // Tokens of 32 channels, and 8 experts of width 16, of which each token has two.
/// let layer = MoeLayerConfig::new(32, 16, 8, 2).init(&device);
/// let x = Tensor::<3>::random([1, 3, 32], Distribution::Default, &device);
/// let ids = Tensor::zeros([1, 3], &device);
/// let y = layer.forward(x.clone(), ids.clone());
/// // Few tokens have the bits that each has alone.
/// let alone = layer.forward(x.slice(s![.., 1..2]), ids.slice(s![.., 1..2]));
/// alone.into_data().assert_eq(&y.slice(s![.., 1..2]).into_data(), true);
/// # }
/// ```
#[derive(Module, Debug)]
pub struct MoeLayer {
    /// The router.
    pub router: Router,
    /// Gate and up matrices of the routed experts: `[experts, 2·d_expert, d_model]`, the gate's
    /// rows first.
    pub gate_up: WeightStack,
    /// Down matrices of the routed experts: `[experts, d_model, d_expert]`.
    pub down: WeightStack,
    /// The shared experts.
    pub shared: SharedExpert,
    /// Clamp of the SwiGLU inputs; infinite for none.
    pub swiglu_limit: f64,
}

impl MoeLayer {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - `x`: `[batch, positions, d_model]`
    /// - `token_ids`: `[batch, positions]`, used by a hash router
    /// - output: like `x`
    ///
    /// # Panics
    ///
    /// If the last dimension of `x` is not `d_model`, or the shapes disagree on the number of
    /// tokens.
    pub fn forward(&self, x: Tensor<3>, token_ids: Tensor<2, Int>) -> Tensor<3> {
        self.forward_traced(x, token_ids, None, &Trace::off())
    }

    /// Like [`forward`](Self::forward). Tokens that are `padding`, `[tokens]`, have the shared
    /// expert alone.
    pub(crate) fn forward_traced(
        &self,
        x: Tensor<3>,
        token_ids: Tensor<2, Int>,
        padding: Option<Tensor<1, Bool>>,
        trace: &Trace,
    ) -> Tensor<3> {
        let [batch, positions, d] = x.dims();
        let tokens = batch * positions;
        let x = x.reshape([tokens, d]);
        let Routing { weights, ids } = self.router.forward(
            x.clone(),
            token_ids.reshape([tokens]),
            padding,
            &trace.scope("router"),
        );
        trace.record_with("shared", || self.shared.forward(x.clone()));
        let (gate_up, down) = (self.gate_up.weights(), self.down.weights());
        let routed = Experts {
            gate_up: &gate_up,
            down: &down,
            limit: Some(self.swiglu_limit),
        };
        let (gate_up, down) = (self.shared.gate_up.weights(), self.shared.down.weights());
        let shared = Experts {
            gate_up: &gate_up,
            down: &down,
            limit: Some(self.shared.swiglu_limit),
        };
        let output = moe_ffn(x, ids, weights, routed, shared)
            .expect("a router's ids and weights, and tokens that fit the experts");
        trace.record("output", &output);
        output.reshape([batch, positions, d])
    }
}

/// Configuration of [`SharedExpert`].
#[derive(Config, Debug)]
pub struct SharedExpertConfig {
    /// Width of a token.
    pub d_model: usize,
    /// Inner width.
    pub d_inner: usize,
    /// Clamp of the SwiGLU inputs.
    #[config(default = "Some(10.0)")]
    pub swiglu_limit: Option<f64>,
}

impl SharedExpertConfig {
    /// Initializes the expert with random weights.
    pub fn init(&self, device: &Device) -> SharedExpert {
        weights::dense(device, |source| self.build(source, ""))
    }

    /// The expert of the tensors `{prefix}..`.
    fn build(&self, source: &mut impl WeightSource, prefix: &str) -> Option<SharedExpert> {
        let (d, inner) = (self.d_model, self.d_inner);
        let gate_up = source.stack(prefix, None, &GATE_UP, [inner, d]);
        let down = source.stack(prefix, None, &DOWN, [d, inner]);
        Some(SharedExpert {
            gate_up: gate_up?,
            down: down?,
            swiglu_limit: self.swiglu_limit.unwrap_or(f64::INFINITY),
        })
    }
}

/// An expert that every token passes through: clamped SwiGLU, like the routed ones.
#[derive(Module, Debug)]
pub struct SharedExpert {
    /// Gate and up matrix: `[1, 2·d_inner, d_model]`, the gate's rows first.
    pub gate_up: WeightStack,
    /// Down matrix: `[1, d_model, d_inner]`.
    pub down: WeightStack,
    /// Clamp of the SwiGLU inputs; infinite for none.
    pub swiglu_limit: f64,
}

impl SharedExpert {
    /// Applies the expert.
    ///
    /// # Shapes and dtypes
    ///
    /// - `x`: `[tokens, d_model]`
    /// - output: the same, f32
    ///
    /// # Panics
    ///
    /// If the last dimension of `x` is not `d_model`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let Routing { weights, ids } = Routing::to_first(x.dims()[0], &x.device());
        expert_ffn(
            x,
            ids,
            weights,
            &self.gate_up.weights(),
            &self.down.weights(),
            Some(self.swiglu_limit),
        )
        .expect("tokens that fit the expert")
    }
}
