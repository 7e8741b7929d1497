//! The gated delta rule in `f64`, and the cases that its tests are made of.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::gated_delta::{
    GatedDelta, GatedDeltaInputs, GatedDeltaOptions, StateSlots, gated_delta_rule,
};

pub use super::common::read;
use super::common::{Tolerance, floats, half_unit, integers, noise, wide};

/// Of what a case has.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub batch: usize,
    pub tokens: usize,
    pub heads: usize,
    pub value_heads: usize,
    pub width: usize,
    pub channels: usize,
    pub slots: usize,
}

impl Sizes {
    /// Two heads of 16 by 8 with twice as many of values, and a pool of four times the batch.
    pub const fn small(batch: usize, tokens: usize) -> Self {
        Self {
            batch,
            tokens,
            heads: 2,
            value_heads: 4,
            width: 16,
            channels: 8,
            slots: 4 * batch,
        }
    }

    /// One head of one sequence.
    pub const fn single(tokens: usize, width: usize, channels: usize) -> Self {
        Self {
            batch: 1,
            tokens,
            heads: 1,
            value_heads: 1,
            width,
            channels,
            slots: 1,
        }
    }

    /// Elements of a slot.
    pub fn state(&self) -> usize {
        self.value_heads * self.channels * self.width
    }

    /// Elements of the outputs of a sequence.
    pub fn outputs(&self) -> usize {
        self.tokens * self.value_heads * self.channels
    }
}

/// The arguments of a call, but for slots and options.
#[derive(Clone)]
pub struct Case {
    pub sizes: Sizes,
    pub inputs: GatedDeltaInputs,
    pub pool: Tensor<4>,
    pub device: Device,
}

impl Case {
    pub fn new(sizes: Sizes, dtype: FloatDType, pool_dtype: FloatDType, device: &Device) -> Self {
        let Sizes {
            batch,
            tokens,
            heads,
            value_heads,
            width,
            channels,
            slots,
        } = sizes;
        let keys = [batch, tokens, heads, width];
        let gates = [batch, tokens, value_heads];
        let inputs = GatedDeltaInputs {
            q: drawn(keys, 1, dtype, device),
            k: drawn(keys, 2, dtype, device),
            v: drawn([batch, tokens, value_heads, channels], 3, dtype, device),
            a: drawn(gates, 4, dtype, device) * 4,
            b: drawn(gates, 5, dtype, device) * 4,
            a_log: drawn([value_heads], 6, FloatDType::F32, device),
            dt_bias: drawn([value_heads], 7, dtype, device),
        };
        let pool = drawn([slots, value_heads, channels, width], 8, pool_dtype, device);
        Self {
            sizes,
            inputs,
            pool,
            device: device.clone(),
        }
    }

    pub fn f32(sizes: Sizes, device: &Device) -> Self {
        Self::new(sizes, FloatDType::F32, FloatDType::F32, device)
    }

    /// One call, with the pool held elsewhere as well.
    pub fn run(
        &self,
        read: &[i64],
        write: Option<&[i64]>,
        options: &GatedDeltaOptions,
    ) -> GatedDelta {
        let slots = |slots: &[i64]| integers(slots, [slots.len()], &self.device);
        let slots = StateSlots {
            read: slots(read),
            write: write.map(slots),
        };
        gated_delta_rule(self.inputs.clone(), self.pool.clone(), slots, options)
            .expect("arguments that fit")
    }

    /// The sequence at `index` by itself, with the same pool.
    pub fn alone(&self, index: usize) -> Self {
        let four = |tensor: &Tensor<4>| tensor.clone().slice_dim(0, index..index + 1);
        let three = |tensor: &Tensor<3>| tensor.clone().slice_dim(0, index..index + 1);
        let inputs = &self.inputs;
        Self {
            sizes: Sizes {
                batch: 1,
                ..self.sizes
            },
            inputs: GatedDeltaInputs {
                q: four(&inputs.q),
                k: four(&inputs.k),
                v: four(&inputs.v),
                a: three(&inputs.a),
                b: three(&inputs.b),
                ..inputs.clone()
            },
            ..self.clone()
        }
    }

    /// The same with these tokens alone.
    pub fn tokens(&self, range: std::ops::Range<usize>) -> Self {
        let of = |tensor: &Tensor<4>| tensor.clone().slice_dim(1, range.clone());
        let gate = |tensor: &Tensor<3>| tensor.clone().slice_dim(1, range.clone());
        let inputs = &self.inputs;
        Self {
            sizes: Sizes {
                tokens: range.len(),
                ..self.sizes
            },
            inputs: GatedDeltaInputs {
                q: of(&inputs.q),
                k: of(&inputs.k),
                v: of(&inputs.v),
                a: gate(&inputs.a),
                b: gate(&inputs.b),
                ..inputs.clone()
            },
            ..self.clone()
        }
    }
}

fn drawn<const D: usize>(
    shape: [usize; D],
    seed: u32,
    dtype: FloatDType,
    device: &Device,
) -> Tensor<D> {
    floats(&noise(shape.iter().product(), seed), shape, device).cast(dtype)
}

/// What the numbers of a call are.
#[derive(Clone, Copy)]
pub struct Rule {
    pub scale: f64,
    pub l2_norm: bool,
    pub threshold: f64,
}

impl Rule {
    pub fn of(sizes: Sizes) -> Self {
        Self {
            scale: 1.0 / (sizes.width as f64).sqrt(),
            l2_norm: true,
            threshold: 20.0,
        }
    }
}

/// Of one sequence.
pub struct Sequence {
    /// `[tokens, value heads, channels]`.
    pub outputs: Vec<f64>,
    /// The state as read, and after each token: `[value heads, channels, width]`.
    pub states: Vec<Vec<f64>>,
}

/// The sequence at `index`, from the state in `slot`.
pub fn oracle(case: &Case, index: usize, slot: usize, rule: Rule) -> Sequence {
    let Sizes {
        tokens,
        heads,
        value_heads,
        width,
        channels,
        ..
    } = case.sizes;
    let inputs = &case.inputs;
    let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|tensor| wide(&read(tensor)));
    let [a, b] = [&inputs.a, &inputs.b].map(|tensor| wide(&read(tensor)));
    let [a_log, dt_bias] = [&inputs.a_log, &inputs.dt_bias].map(|tensor| wide(&read(tensor)));
    let size = case.sizes.state();
    let mut state = wide(&read(&case.pool)[slot * size..][..size]);
    let mut sequence = Sequence {
        outputs: Vec::new(),
        states: vec![state.clone()],
    };
    for row in index * tokens..(index + 1) * tokens {
        for value_head in 0..value_heads {
            let head = value_head / (value_heads / heads);
            let norm = |vector: &[f64]| {
                let squares: f64 = vector.iter().map(|x| x * x).sum();
                if rule.l2_norm {
                    (squares + 1e-6).sqrt()
                } else {
                    1.0
                }
            };
            let q = &q[(row * heads + head) * width..][..width];
            let k = &k[(row * heads + head) * width..][..width];
            let (q_norm, k_norm) = (norm(q), norm(k));
            let gate = row * value_heads + value_head;
            let x = a[gate] + dt_bias[value_head];
            let softplus = if x <= rule.threshold {
                x.exp().ln_1p()
            } else {
                x
            };
            let decay = (-a_log[value_head].exp() * softplus).exp();
            let beta = 1.0 / (1.0 + (-b[gate]).exp());
            for channel in 0..channels {
                let cells = &mut state[(value_head * channels + channel) * width..][..width];
                cells.iter_mut().for_each(|cell| *cell *= decay);
                let recalled: f64 = cells.iter().zip(k).map(|(s, k)| s * k / k_norm).sum();
                let correction = (v[gate * channels + channel] - recalled) * beta;
                for (cell, k) in cells.iter_mut().zip(k) {
                    *cell += correction * k / k_norm;
                }
                let output: f64 = cells.iter().zip(q).map(|(s, q)| s * q / q_norm).sum();
                sequence.outputs.push(output * rule.scale);
            }
        }
        sequence.states.push(state.clone());
    }
    sequence
}

/// One rounding to the dtype, and what f32 sums of a few hundred terms and 16 steps are off by.
pub fn tolerance(dtype: FloatDType, absolute: f64) -> Tolerance {
    Tolerance {
        absolute,
        relative: half_unit(dtype) + 1e-5,
    }
}

/// Of outputs with the norm and the default scale.
pub const OUTPUTS: f64 = 4e-6;
/// Of states.
pub const STATES: f64 = 2e-5;
