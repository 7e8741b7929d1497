//! A layer of experts with its inputs, worked out in f64, for the tests and the benchmarks of the
//! MoE layer.

use std::collections::HashMap;
use std::ops::Range;

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::moe::expert_ffn;
use burn_ds4_ops::quant::{Activations, Weights};

use super::common::{assert_within, floats, integers, narrow, values, wide};
use super::distributions::Random;
use super::packing::{Format, Packed, rounded};
use super::round_trips::FP8;
use super::sums::{Sum, smallest, unit};

/// How many of what.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub tokens: usize,
    pub k: usize,
    pub experts: usize,
    pub d: usize,
    pub inner: usize,
}

/// Tokens, experts for each, experts, d and inner.
pub const fn size([tokens, k, experts, d, inner]: [usize; 5]) -> Size {
    Size {
        tokens,
        k,
        experts,
        d,
        inner,
    }
}

/// The arguments of `expert_ffn`, on the host.
#[derive(Clone)]
pub struct Layer {
    pub size: Size,
    pub x: Vec<f32>,
    pub ids: Vec<i64>,
    pub weights: Vec<f32>,
    pub gate_up: Packed,
    pub down: Packed,
    pub limit: Option<f64>,
    pub rounding: Rounding,
}

/// What is rounded on the way.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// The dtype of x, and what the hidden layer is rounded to.
    pub dtype: FloatDType,
    /// Whether `dtype` holds the weights as they are.
    pub weights_fit: bool,
    /// Whether it holds the products of gate and up as they are, so that a device rounds the hidden
    /// layer as the oracle does.
    pub products_fit: bool,
    /// What the products do to x and to the hidden layer.
    pub activations: Activations,
}

/// The weights of all experts on a device.
pub struct Stacks {
    pub gate_up: Weights,
    pub down: Weights,
}

impl Layer {
    /// Full mantissas and any scale.
    pub fn random(size: Size, format: Format, dtype: FloatDType, seed: u64) -> Self {
        let random = &mut Random::new(seed);
        let x: Vec<f32> = (0..size.tokens * size.d)
            .map(|_| random.unit() * 2.0 - 1.0)
            .collect();
        let weights = (0..size.tokens * size.k).map(|_| random.unit()).collect();
        let ids = ids(size, random);
        let stack = |format, rows, columns, seed| {
            Packed::random(format, [size.experts, rows, columns], seed)
        };
        let gate_up = stack(format, 2 * size.inner, size.d, seed + 1);
        let down = stack(format.of_down(), size.d, size.inner, seed + 2);
        let weights_fit = gate_up.is_exact_in(dtype) && down.is_exact_in(dtype);
        Self {
            size,
            x: rounded(&x, dtype),
            ids,
            weights,
            gate_up,
            down,
            limit: None,
            rounding: Rounding {
                dtype,
                weights_fit,
                products_fit: false,
                activations: Activations::Exact,
            },
        }
    }

    /// Values whose sums and products are exact, but for the hidden layer, which is rounded once. A
    /// gate is zero or so far from it that its SiLU is itself or nothing. One weight that is left
    /// out, or taken twice, shows.
    pub fn exact(size: Size, format: Format, dtype: FloatDType, seed: u64) -> Self {
        let random = &mut Random::new(seed);
        let mut x = vec![0.0; size.tokens * size.d];
        for x in x.chunks_mut(size.d.max(1)) {
            if dtype == FloatDType::F32 {
                x.fill_with(|| [-1.0, 0.0, 0.0, 1.0][random.index(4)]);
            } else {
                // No more than that many, so that the sums have few bits.
                for _ in 0..4 {
                    x[random.index(size.d)] = [-1.0, 1.0][random.index(2)];
                }
            }
        }
        let weights = (0..size.tokens * size.k).map(|_| 2f32.powi(random.index(3) as i32 - 15));
        let weights = weights.collect();
        let ids = ids(size, random);
        let stack = |format, rows, columns, exponent, seed| {
            Packed::exact(format, [size.experts, rows, columns], exponent, seed)
        };
        Self {
            size,
            x,
            ids,
            weights,
            gate_up: stack(format, 2 * size.inner, size.d, 6, seed + 1),
            down: stack(format.of_down(), size.d, size.inner, 0, seed + 2),
            limit: None,
            rounding: Rounding {
                dtype,
                weights_fit: true,
                products_fit: true,
                activations: Activations::Exact,
            },
        }
    }

    /// The same layer, whose products round what they take to FP8 so.
    pub fn rounding(mut self, activations: Activations) -> Self {
        self.rounding.activations = activations;
        self
    }

    /// Some of the tokens with the same experts.
    pub fn tokens(&self, tokens: Range<usize>) -> Self {
        let Size { k, d, .. } = self.size;
        let mut some = self.clone();
        some.size.tokens = tokens.len();
        some.x = self.x[tokens.start * d..tokens.end * d].to_vec();
        some.ids = self.ids[tokens.start * k..tokens.end * k].to_vec();
        some.weights = self.weights[tokens.start * k..tokens.end * k].to_vec();
        some
    }

    pub fn stacks(&self, device: &Device) -> Stacks {
        Stacks {
            gate_up: self
                .gate_up
                .on(device)
                .with_activations(self.rounding.activations),
            down: self
                .down
                .on(device)
                .with_activations(self.rounding.activations),
        }
    }

    pub fn x(&self, device: &Device) -> Tensor<2> {
        let dtype = DType::from(self.rounding.dtype);
        let data = TensorData::new(self.x.clone(), [self.size.tokens, self.size.d]);
        Tensor::from_data(data.convert_dtype(dtype), (device, dtype))
    }

    pub fn ids(&self, device: &Device) -> Tensor<2, Int> {
        integers(&self.ids, [self.size.tokens, self.size.k], device)
    }

    pub fn run(&self, device: &Device) -> Vec<f32> {
        self.run_with(&self.stacks(device), device)
    }

    pub fn run_with(&self, stacks: &Stacks, device: &Device) -> Vec<f32> {
        self.run_on(stacks, self.x(device), self.ids(device))
    }

    /// With `x` and `ids` as a tensor that the caller makes.
    pub fn run_on(&self, stacks: &Stacks, x: Tensor<2>, ids: Tensor<2, Int>) -> Vec<f32> {
        let Size { tokens, k, d, .. } = self.size;
        let weights = floats(&self.weights, [tokens, k], &x.device());
        let output = expert_ffn(x, ids, weights, &stacks.gate_up, &stacks.down, self.limit);
        let output = output.expect("arguments that fit");
        assert_eq!((output.dims(), output.dtype()), ([tokens, d], DType::F32));
        values(output)
    }

    /// Compares what a device gives with the oracle.
    #[track_caller]
    pub fn check(&self, name: &str, device: &Device) {
        self.check_output(&self.run(device), name);
    }

    #[track_caller]
    pub fn check_output(&self, actual: &[f32], name: &str) {
        let (expected, allowed): (Vec<f64>, Vec<f64>) = self.expected().into_iter().unzip();
        let what = format!("{name} {:?} limit {:?}", self.size, self.limit);
        assert_within(actual, &narrow(&expected), |index| allowed[index], &what);
    }

    /// Every output with the error that is allowed.
    pub fn expected(&self) -> Vec<(f64, f64)> {
        let Size { k, d, .. } = self.size;
        let mut matrices = HashMap::new();
        let x = match self.rounding.activations.block() {
            None => wide(&self.x),
            Some(block) => wide(&FP8.rows(&self.x, self.size.d, block)),
        };
        let mut outputs = vec![(0.0, 0.0); x.len()];
        for (pair, &id) in self.ids.iter().enumerate() {
            let Some(expert) = usize::try_from(id).ok() else {
                continue;
            };
            let (gate_up, down) = matrices
                .entry(expert)
                .or_insert_with(|| (self.gate_up.matrix(expert), self.down.matrix(expert)));
            let token = pair / k * d..(pair / k + 1) * d;
            let weight = f64::from(self.weights[pair]);
            let slot = self
                .rounding
                .slot(&x[token.clone()], (gate_up, down), weight, self.limit);
            for (output, slot) in outputs[token].iter_mut().zip(slot) {
                *output = (output.0 + slot.0, output.1 + slot.1);
            }
        }
        outputs
    }
}

/// A layer for one token, for few and for many.
pub fn few_and_many(format: Format, dtype: FloatDType) -> [Layer; 3] {
    [1, 7, 40].map(|tokens| {
        let size = size([tokens, 2, 6, 136, 72]);
        Layer::exact(size, format, dtype, tokens as u64)
    })
}

impl Rounding {
    /// What one expert adds to a token, with the error that is allowed.
    pub fn slot(
        self,
        x: &[f64],
        (gate_up, down): (&[f64], &[f64]),
        weight: f64,
        limit: Option<f64>,
    ) -> Vec<(f64, f64)> {
        let unit = if self.dtype == FloatDType::F32 {
            0.0
        } else {
            unit(self.dtype)
        };
        let of_weights = if self.weights_fit { 0.0 } else { unit };
        let rows: Vec<(f64, f64)> = gate_up
            .chunks(x.len())
            .map(|row| {
                let sum = Sum::products(row, x);
                let rounded = if self.products_fit { 0.0 } else { unit };
                (sum.value, sum.error(of_weights) + rounded * sum.value.abs())
            })
            .collect();
        let (gates, ups) = rows.split_at(rows.len() / 2);
        let hidden = gates.iter().zip(ups).map(|(&gate, &up)| {
            let (value, error) = swiglu(gate, up, limit);
            let (value, error) = (weight * value, weight.abs() * error);
            if self.products_fit {
                let once = rounded(&[value as f32], self.dtype)[0];
                // SiLU of a gate far below zero is nearly nothing, and may be nothing.
                (f64::from(once), error + 1e-20)
            } else {
                (value, error + unit * value.abs() + smallest(self.dtype))
            }
        });
        let mut hidden: Vec<(f64, f64)> = hidden.collect();
        if let Some(block) = self.activations.block() {
            // A value may be on either side of where rounding changes, and so may the largest.
            let off_by = |sign: f64| {
                let off = hidden.iter().map(|&(value, error)| {
                    (value.abs() + sign * error).max(0.0).copysign(value) as f32
                });
                FP8.row(&off.collect::<Vec<_>>(), block)
            };
            let (nearest, less, more) = (off_by(0.0), off_by(-1.0), off_by(1.0));
            for (i, hidden) in hidden.iter_mut().enumerate() {
                let rounded = nearest[i];
                let error = (rounded - less[i]).abs().max((rounded - more[i]).abs());
                *hidden = (f64::from(rounded), f64::from(error));
            }
        }
        down.chunks(hidden.len().max(1))
            .map(|row| {
                let sum = Sum::of(row.iter().zip(&hidden).map(|(w, h)| w * h.0));
                let inherited = Sum::of(row.iter().zip(&hidden).map(|(w, h)| w * h.1));
                let error = sum.error(of_weights) + inherited.spread();
                (sum.value, error + unit * sum.value.abs())
            })
            .collect()
    }
}

/// The activation of values with errors. A device's exponential has some, too.
fn swiglu(gate: (f64, f64), up: (f64, f64), limit: Option<f64>) -> (f64, f64) {
    // `min` and `clamp` of f64 would drop a NaN.
    let limit = limit.unwrap_or(f64::INFINITY);
    let clamped = if gate.0 > limit { limit } else { gate.0 };
    let silu = clamped / (1.0 + (-clamped).exp());
    let value = if up.0.abs() > limit {
        limit.copysign(up.0)
    } else {
        up.0
    };
    // The slope of SiLU is 1.1 at most.
    let of_silu = 1.1 * gate.1 + 4e-6 * silu.abs();
    let error = of_silu * value.abs() + silu.abs() * up.1 + of_silu * up.1;
    (silu * value, error)
}

/// Any expert for any slot, perhaps twice for one token.
fn ids(size: Size, random: &mut Random) -> Vec<i64> {
    (0..size.tokens * size.k)
        .map(|_| random.index(size.experts) as i64)
        .collect()
}
