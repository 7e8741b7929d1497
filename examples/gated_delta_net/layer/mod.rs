//! The linear-attention layer of Qwen3-Next and Qwen3.5, made of this repository's operators.

mod convolution;
mod state;

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::activation::silu;
use burn::tensor::{Device, Distribution, FloatDType, Int, Tensor};
use burn_ds4_ops::gated_delta::{GatedDeltaInputs, StateUpdate};
use burn_ds4_ops::matmul::{SmallMOptions, small_m_matmul, small_m_matmul_group};
use burn_ds4_ops::norm::rms_norm;

use convolution::{causal, window};
use state::{BatchSlots, SkippedRows};
pub use state::{Draft, GatedDeltaNetState};

/// Configuration of [`GatedDeltaNet`].
#[derive(Config, Debug)]
pub struct GatedDeltaNetConfig {
    /// Width of a token.
    pub d_model: usize,
    /// Heads of queries and keys.
    pub heads: usize,
    /// Heads of values, a multiple of `heads`.
    pub value_heads: usize,
    /// Width of a query and a key.
    #[config(default = 128)]
    pub width: usize,
    /// Width of a value.
    #[config(default = 128)]
    pub channels: usize,
    /// Tokens that the convolution spans, at least 2.
    #[config(default = 4)]
    pub kernel: usize,
    /// Added to the mean square by the norm of the outputs.
    #[config(default = 1e-6)]
    pub epsilon: f64,
}

impl GatedDeltaNetConfig {
    /// Initializes a layer with random weights, whose slowest heads remember about a thousand
    /// tokens and whose fastest ones hardly one.
    ///
    /// # Panics
    ///
    /// If `kernel` is less than 2.
    pub fn init(&self, device: &Device) -> GatedDeltaNet {
        assert!(
            self.kernel >= 2,
            "kernel must be at least 2, got {}",
            self.kernel
        );
        let values = self.value_heads * self.channels;
        let uniform = |low: f64, high: f64| {
            let distribution = Distribution::Uniform(low, high);
            Tensor::<1>::random([self.value_heads], distribution, device)
        };
        let step = uniform(1e-3f64.ln(), 0.1f64.ln()).exp();
        GatedDeltaNet {
            qkv: random([self.convolved(), self.d_model], device),
            gate: random([values, self.d_model], device),
            a: random([self.value_heads, self.d_model], device),
            b: random([self.value_heads, self.d_model], device),
            convolution: random([self.convolved(), self.kernel], device),
            a_log: Param::from_tensor(uniform(1.0, 16.0).log()),
            // Softplus of this is `step`.
            dt_bias: Param::from_tensor(step.exp().sub_scalar(1.0).log()),
            norm: Param::from_tensor(Tensor::ones([self.channels], device)),
            output: random([self.d_model, values], device),
            heads: self.heads,
            width: self.width,
            epsilon: self.epsilon,
        }
    }

    /// Channels of the convolution: those of queries, keys and values, in this order.
    pub fn convolved(&self) -> usize {
        2 * self.heads * self.width + self.value_heads * self.channels
    }
}

fn random(shape: [usize; 2], device: &Device) -> Param<Tensor<2>> {
    let deviation = (shape[1] as f64).powf(-0.5);
    let distribution = Distribution::Normal(0.0, deviation);
    Param::from_tensor(Tensor::random(shape, distribution, device))
}

/// Linear attention by the gated delta rule, for decoding. The state of each sequence is in its
/// slot of a [`GatedDeltaNetState`].
///
/// ```text
/// q, k, v = silu(convolution(x · qkvᵀ))      each channel over the last `kernel` tokens
/// o       = gated_delta_rule(q, k, v, x · aᵀ, x · bᵀ)
/// y       = (rms_norm(o) * norm * silu(x · gateᵀ)) · outputᵀ
/// ```
///
/// The weights are as Qwen3.5 has them; Qwen3-Next interleaves the rows of `qkv` and `gate`, and
/// those of `a` and `b`, by head in one matrix each. They may be f32, f16 or bf16, whatever the
/// dtype of `x`. What is computed between the operators is in f32, and rounded to the dtype of `x`
/// where an operator takes it.
#[derive(Module, Debug)]
pub struct GatedDeltaNet {
    /// Queries, keys and values: `[convolved, d_model]`; `in_proj_qkv` in Qwen3.5.
    pub qkv: Param<Tensor<2>>,
    /// The gate of the outputs: `[value_heads * channels, d_model]`; `in_proj_z`.
    pub gate: Param<Tensor<2>>,
    /// What decides the decay: `[value_heads, d_model]`.
    pub a: Param<Tensor<2>>,
    /// What decides the strength of the update: `[value_heads, d_model]`.
    pub b: Param<Tensor<2>>,
    /// Of each channel, the newest token last: `[convolved, kernel]`.
    pub convolution: Param<Tensor<2>>,
    /// The logarithm of the rate of decay: f32 `[value_heads]`.
    pub a_log: Param<Tensor<1>>,
    /// Added to `a`: `[value_heads]`.
    pub dt_bias: Param<Tensor<1>>,
    /// Weight of the norm of each value head: `[channels]`.
    pub norm: Param<Tensor<1>>,
    /// `[d_model, value_heads * channels]`.
    pub output: Param<Tensor<2>>,
    /// Heads of queries and keys.
    pub heads: usize,
    /// Width of a query and a key.
    pub width: usize,
    /// Added to the mean square by the norm.
    pub epsilon: f64,
}

impl GatedDeltaNet {
    /// The same with weights of this dtype, but for the rate of decay, which stays in f32.
    pub fn cast(self, dtype: FloatDType) -> Self {
        let cast = |weight: Param<Tensor<2>>| weight.map(|weight| weight.cast(dtype));
        Self {
            qkv: cast(self.qkv),
            gate: cast(self.gate),
            a: cast(self.a),
            b: cast(self.b),
            convolution: cast(self.convolution),
            dt_bias: self.dt_bias.map(|bias| bias.cast(dtype)),
            norm: self.norm.map(|norm| norm.cast(dtype)),
            output: cast(self.output),
            ..self
        }
    }

    /// Processes the next tokens of some sequences, 1 to 16 of each. The state of a sequence is in
    /// its slot before and after.
    ///
    /// A negative slot is padding: its outputs are 0, and no state changes. Up to 16 rows (tokens
    /// times sequences), each row has the bits that it has alone, if the states are not rounded
    /// ([`GatedDeltaNetState::zeros`]).
    ///
    /// # Shapes
    ///
    /// - `x`: `[batch, tokens, d_model]`, f32 / f16 / bf16
    /// - `slots`: `[batch]`, i32 / i64 / u32, none of them twice
    /// - output: like `x`
    ///
    /// # Panics
    ///
    /// If there is no sequence, if anything does not fit, and where
    /// [`gated_delta_rule`](burn_ds4_ops::gated_delta::gated_delta_rule) refuses a slot.
    pub fn forward(
        &self,
        x: Tensor<3>,
        state: GatedDeltaNetState,
        slots: Tensor<1, Int>,
    ) -> (Tensor<3>, GatedDeltaNetState) {
        let (draft, gate) = self.prepare(x, &state, slots);
        let skipped = draft.slots.skipped_rows();
        let (outputs, state) = state.advance(draft, StateUpdate::Last);
        (self.finish(outputs, gate, skipped), state)
    }

    /// [`forward`](Self::forward) of tokens that may be wrong: the states stay as they are until
    /// [`GatedDeltaNetState::accept`] says how many are accepted.
    pub fn verify(
        &self,
        x: Tensor<3>,
        state: &GatedDeltaNetState,
        slots: Tensor<1, Int>,
    ) -> (Tensor<3>, Draft) {
        let (draft, gate) = self.prepare(x, state, slots);
        let (outputs, _) = state.clone().advance(draft.clone(), StateUpdate::Discard);
        let skipped = draft.slots.skipped_rows();
        (self.finish(outputs, gate, skipped), draft)
    }

    /// Everything up to the recurrence, and the gate of its outputs.
    fn prepare(
        &self,
        x: Tensor<3>,
        state: &GatedDeltaNetState,
        slots: Tensor<1, Int>,
    ) -> (Draft, Tensor<3>) {
        let dtype = x.dtype();
        let [batch, tokens, _] = x.dims();
        assert!(batch > 0 && tokens > 0, "no tokens: {:?}", x.dims());
        let weights = [&self.qkv, &self.gate, &self.a, &self.b].map(|weight| weight.val());
        let projections = small_m_matmul_group(x, &weights, SmallMOptions::default());
        let projections = projections.expect("an input that fits the weights");
        let [rows, gate, a, b] = projections.try_into().expect("one projection a weight");

        let slots = BatchSlots::new(slots, state.slots());
        let window = window(state.history(&slots), rows);
        let convolved = causal(window.clone(), self.convolution.val()).cast(dtype);
        let keys = self.heads * self.width;
        let [_, _, all] = convolved.dims();
        let [value_heads] = self.a_log.dims();
        let channels = (all - 2 * keys) / value_heads;
        let queries = [batch, tokens, self.heads, self.width];
        let inputs = GatedDeltaInputs {
            q: convolved.clone().slice_dim(2, 0..keys).reshape(queries),
            k: convolved
                .clone()
                .slice_dim(2, keys..2 * keys)
                .reshape(queries),
            v: convolved.slice_dim(2, 2 * keys..all).reshape([
                batch,
                tokens,
                value_heads,
                channels,
            ]),
            a,
            b,
            a_log: self.a_log.val(),
            dt_bias: self.dt_bias.val(),
        };
        let draft = Draft {
            window,
            inputs,
            slots,
        };
        (draft, gate)
    }

    /// From the outputs of the recurrence to those of the layer.
    fn finish(&self, outputs: Tensor<4>, gate: Tensor<3>, skipped: SkippedRows) -> Tensor<3> {
        let dtype = gate.dtype();
        let gate = gate.reshape(outputs.dims()).cast(FloatDType::F32);
        let outputs = outputs.cast(FloatDType::F32);
        let outputs = rms_norm(outputs, Some(self.norm.val()), self.epsilon)
            .expect("channels as many as the norm has");
        let gated: Tensor<3> = (outputs * silu(gate)).flatten(2, 3);
        let rows = small_m_matmul(
            gated.cast(dtype),
            self.output.val(),
            SmallMOptions::default(),
        )
        .expect("heads that fit the weight");
        let skipped = skipped.expand(rows.dims());
        rows.mask_fill(skipped, 0.0)
    }
}
