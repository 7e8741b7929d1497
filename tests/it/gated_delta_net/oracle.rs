//! The layer in `f64`, token by token, and layers with reproducible weights.

use burn::module::Param;
use burn::tensor::{Device, FloatDType, Tensor};

use super::layer::{GatedDeltaNet, GatedDeltaNetConfig};
use crate::common::{floats, noise, read, wide};

/// A layer whose weights, norm and biases all differ, in this dtype.
pub fn drawn(config: &GatedDeltaNetConfig, dtype: FloatDType, device: &Device) -> GatedDeltaNet {
    let layer = config.init(device);
    let matrix = |weight: Param<Tensor<2>>, seed: u32| {
        let [rows, columns] = weight.dims();
        let scale = (3.0 / columns as f32).sqrt();
        let values = noise(rows * columns, seed);
        Param::from_tensor(floats(&values, [rows, columns], device) * scale)
    };
    let vector = |weight: Param<Tensor<1>>, seed: u32, middle: f32| {
        let [length] = weight.dims();
        let values = noise(length, seed);
        Param::from_tensor(floats(&values, [length], device) + middle)
    };
    let layer = GatedDeltaNet {
        qkv: matrix(layer.qkv, 1),
        gate: matrix(layer.gate, 2),
        a: matrix(layer.a, 3),
        b: matrix(layer.b, 4),
        convolution: matrix(layer.convolution, 5),
        // Decays of about exp(-0.1): neither forgotten at once nor kept for ever.
        a_log: vector(layer.a_log, 6, -1.0),
        dt_bias: vector(layer.dt_bias, 7, -1.5),
        norm: vector(layer.norm, 8, 1.5),
        output: matrix(layer.output, 9),
        ..layer
    };
    layer.cast(dtype)
}

/// The weights of a layer, as they are held.
pub struct Oracle {
    config: GatedDeltaNetConfig,
    qkv: Vec<f64>,
    gate: Vec<f64>,
    a: Vec<f64>,
    b: Vec<f64>,
    convolution: Vec<f64>,
    a_log: Vec<f64>,
    dt_bias: Vec<f64>,
    norm: Vec<f64>,
    output: Vec<f64>,
}

/// What a sequence remembers.
#[derive(Clone)]
pub struct Memory {
    /// `[convolved, kernel - 1]`, the newest last.
    pub convolution: Vec<f64>,
    /// `[value heads, channels, width]`.
    pub recurrent: Vec<f64>,
}

impl Oracle {
    pub fn new(config: &GatedDeltaNetConfig, layer: &GatedDeltaNet) -> Self {
        let matrix = |weight: &Param<Tensor<2>>| wide(&read(&weight.val()));
        let vector = |weight: &Param<Tensor<1>>| wide(&read(&weight.val()));
        Self {
            config: config.clone(),
            qkv: matrix(&layer.qkv),
            gate: matrix(&layer.gate),
            a: matrix(&layer.a),
            b: matrix(&layer.b),
            convolution: matrix(&layer.convolution),
            a_log: vector(&layer.a_log),
            dt_bias: vector(&layer.dt_bias),
            norm: vector(&layer.norm),
            output: matrix(&layer.output),
        }
    }

    /// Of a sequence that has not begun.
    pub fn memory(&self) -> Memory {
        let config = &self.config;
        let state = config.value_heads * config.channels * config.width;
        Memory {
            convolution: vec![0.0; config.convolved() * (config.kernel - 1)],
            recurrent: vec![0.0; state],
        }
    }

    /// The output of one token.
    pub fn step(&self, x: &[f64], memory: &mut Memory) -> Vec<f64> {
        let config = &self.config;
        let (width, channels) = (config.width, config.channels);
        let mixed = self.convolve(&product(&self.qkv, x), &mut memory.convolution);
        let (q, rest) = mixed.split_at(config.heads * width);
        let (k, v) = rest.split_at(config.heads * width);
        let gate = product(&self.gate, x);
        let (a, b) = (product(&self.a, x), product(&self.b, x));
        let mut gated = Vec::new();
        for value_head in 0..config.value_heads {
            let head = value_head * config.heads / config.value_heads;
            let q = unit(&q[head * width..][..width]);
            let k = unit(&k[head * width..][..width]);
            let rate = self.a_log[value_head].exp();
            let softplus = (a[value_head] + self.dt_bias[value_head]).exp().ln_1p();
            let decay = (-rate * softplus).exp();
            let beta = 1.0 / (1.0 + (-b[value_head]).exp());
            let mut outputs = vec![0.0; channels];
            for (channel, output) in outputs.iter_mut().enumerate() {
                let index = value_head * channels + channel;
                let cells = &mut memory.recurrent[index * width..][..width];
                let mut recalled = 0.0;
                for (cell, k) in cells.iter_mut().zip(&k) {
                    *cell *= decay;
                    recalled += *cell * k;
                }
                for ((cell, k), q) in cells.iter_mut().zip(&k).zip(&q) {
                    *cell += beta * (v[index] - recalled) * k;
                    *output += *cell * q / (width as f64).sqrt();
                }
            }
            let squares: f64 = outputs.iter().map(|x| x * x).sum();
            let size = (squares / channels as f64 + config.epsilon).sqrt();
            for (channel, output) in outputs.iter().enumerate() {
                let gate = silu(gate[value_head * channels + channel]);
                gated.push(output / size * self.norm[channel] * gate);
            }
        }
        product(&self.output, &gated)
    }

    fn convolve(&self, row: &[f64], history: &mut [f64]) -> Vec<f64> {
        let kernel = self.config.kernel;
        let mut mixed = Vec::new();
        for (channel, newest) in row.iter().enumerate() {
            let history = &mut history[channel * (kernel - 1)..][..kernel - 1];
            let weight = &self.convolution[channel * kernel..][..kernel];
            let mut sum = weight[kernel - 1] * newest;
            for (weight, value) in weight.iter().zip(history.iter()) {
                sum += weight * value;
            }
            history.rotate_left(1);
            history[kernel - 2] = *newest;
            mixed.push(silu(sum));
        }
        mixed
    }
}

fn product(weight: &[f64], x: &[f64]) -> Vec<f64> {
    let rows = weight.chunks(x.len());
    rows.map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum())
        .collect()
}

fn unit(x: &[f64]) -> Vec<f64> {
    let squares: f64 = x.iter().map(|x| x * x).sum();
    x.iter().map(|x| x / (squares + 1e-6).sqrt()).collect()
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}
