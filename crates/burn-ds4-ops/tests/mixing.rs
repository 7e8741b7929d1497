//! What hyper-connections compute, in `f64` and in the order of the released kernel. No tests.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::hyper_connection::{
    Coefficients, Collapsed, Norm, Sinkhorn, Streams, collapse, collapse_norm, collapse_norm_late,
    head, head_norm,
};

use super::common::{compiles_slowly, floats, noise, some, some_of_half, values, wide};

/// The constants of the released models.
pub const SINKHORN: Sinkhorn = Sinkhorn {
    iterations: 20,
    epsilon: 1e-6,
    norm_epsilon: 1e-6,
};

/// Epsilon of the norm of what streams are collapsed to: one that shows.
pub const NORM_EPSILON: f64 = 1e-3;

/// Tokens, streams and width: around the sizes of a vector, a unit, a split, a plane and of what a
/// lane keeps, on any device; more streams and more tokens than the kernels take, and as many as
/// tensor cores take; sizes of the released models.
///
/// Every third, from the first on, goes through all ways that the kernels are built: streams that a
/// lane reads again and that it keeps, in one plane and in several, by vectors and by elements;
/// short splits, partial ones, and more of them than are added up at once; more tokens and more
/// streams than there are kernels for. Of every ninth, a lane reads the first again, by vectors,
/// and keeps the second, by elements.
const SHAPES: [(usize, usize, usize); 18] = [
    (2, 4, 7168),
    (1, 1, 1),
    (2, 4, 8),
    (3, 2, 5),
    (2, 4, 64),
    (3, 1, 512),
    (2, 5, 1000),
    (2, 8, 96),
    (16, 4, 8),
    (2, 3, 127),
    (2, 4, 66),
    (1, 4, 4096),
    (17, 4, 64),
    (1, 4, 4097),
    (2, 4, 4096),
    (2, 9, 16),
    (1, 8, 9001),
    (290, 4, 200),
];

/// Streams and widths of [`SHAPES`] whose kernels every device compiles: a lane reads the streams
/// again, and keeps them.
const COMPILED: [(usize, usize); 2] = [(4, 7168), (3, 127)];

/// The shapes of the tests with an oracle. Each makes kernels of its own: a device that compiles
/// slowly has every third in f32, every ninth in other dtypes.
pub fn shapes(
    name: &str,
    dtype: FloatDType,
) -> impl Iterator<Item = &'static (usize, usize, usize)> + use<> {
    some(name, &SHAPES, if dtype == FloatDType::F32 { 3 } else { 9 })
}

/// Streams and widths at which tokens are compared with themselves: `elsewhere`, or what is
/// compiled anyway, of which dtypes other than f32 have the first.
pub fn widths<'a>(
    name: &str,
    dtype: FloatDType,
    elsewhere: &'a [(usize, usize)],
) -> impl Iterator<Item = &'a (usize, usize)> + use<'a> {
    let all: &'a [(usize, usize)] = if compiles_slowly(name) {
        &COMPILED
    } else {
        elsewhere
    };
    some_of_half(name, dtype, all, 2)
}

/// Streams and widths at which a token is no number: the same, and more streams than the kernels
/// take.
pub fn spoilt_widths(name: &str) -> [(usize, usize); 3] {
    let [again, kept] = if compiles_slowly(name) {
        COMPILED
    } else {
        [(3, 4096), (4, 24)]
    };
    [kept, again, (9, 16)]
}

/// Streams and parameters of one case, all of them arbitrary.
pub struct Case {
    pub tokens: usize,
    pub n: usize,
    pub d: usize,
    pub streams: Vec<f32>,
    pub function: Vec<f32>,
    pub base: Vec<f32>,
    pub scale: Vec<f32>,
}

/// The parameters of a case on a device.
pub struct Parameters {
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    weight: Tensor<1>,
}

impl Parameters {
    pub fn collapse(&self, streams: Tensor<3>, sinkhorn: Sinkhorn) -> (Tensor<2>, Coefficients) {
        let (function, base, scale) =
            (self.function.clone(), self.base.clone(), self.scale.clone());
        collapse(streams, function, base, scale, sinkhorn).expect("arguments that fit")
    }

    pub fn collapse_norm(&self, streams: Streams, sinkhorn: Sinkhorn) -> Collapsed {
        let (function, base, scale) =
            (self.function.clone(), self.base.clone(), self.scale.clone());
        collapse_norm(streams, function, base, scale, sinkhorn, self.norm())
            .expect("arguments that fit")
    }

    pub fn collapse_norm_late(&self, streams: Streams, sinkhorn: Sinkhorn) -> Collapsed {
        let (function, base, scale) =
            (self.function.clone(), self.base.clone(), self.scale.clone());
        collapse_norm_late(streams, function, base, scale, sinkhorn, self.norm())
            .expect("arguments that fit")
    }

    /// The operator with the first parameters.
    pub fn head_norm(&self, streams: Streams, epsilon: f64, norm_epsilon: f64) -> Tensor<2> {
        let [_, n, d] = streams.dims();
        head_norm(
            streams,
            self.function.clone().slice([0..n, 0..n * d]),
            self.base.clone().slice(0..n),
            self.scale.clone().slice(0..1),
            epsilon,
            norm_epsilon,
            self.norm(),
        )
        .expect("arguments that fit")
    }

    fn norm(&self) -> Norm {
        Norm {
            weight: self.weight.clone(),
            epsilon: NORM_EPSILON,
        }
    }
}

impl Case {
    /// Coefficients that are neither equal nor saturated, whatever the sizes.
    pub fn new(tokens: usize, n: usize, d: usize, magnitude: f32) -> Self {
        let outputs = (2 + n) * n;
        let scaled = |count, seed, by: f32| noise(count, seed).into_iter().map(move |v| v * by);
        let scales = [0.7, 1.3, 2.1];
        let spread = 4.0 / ((n * d) as f32).sqrt();
        Self {
            tokens,
            n,
            d,
            streams: scaled(tokens * n * d, 1, magnitude).collect(),
            function: scaled(outputs * n * d, 2, spread).collect(),
            base: scaled(outputs, 3, 1.5).collect(),
            scale: (0..outputs).map(|i| scales[(i / n).min(2)]).collect(),
        }
    }

    /// Streams and function in small multiples of powers of two: their products have one sum in
    /// f32, whatever the order.
    pub fn exact(mut self) -> Self {
        let coarse = |values: &mut [f32], step: f32| {
            values
                .iter_mut()
                .for_each(|v| *v = (*v / step).round() * step);
        };
        coarse(&mut self.streams, 0.25);
        coarse(&mut self.function, 2f32.powi(-7));
        self
    }

    /// The values that the streams have in another dtype.
    pub fn rounded(mut self, dtype: FloatDType, device: &Device) -> Self {
        let streams = self.streams(device).cast(dtype);
        self.streams = values(streams.cast(FloatDType::F32));
        self
    }

    pub fn streams(&self, device: &Device) -> Tensor<3> {
        floats(&self.streams, [self.tokens, self.n, self.d], device)
    }

    pub fn coefficients(&self, sinkhorn: Sinkhorn, device: &Device) -> Coefficients {
        self.collapse(self.streams(device), sinkhorn).1
    }

    /// What [`collapse`] takes besides streams.
    pub fn parameters(&self, device: &Device) -> Parameters {
        let outputs = self.base.len();
        Parameters {
            function: floats(&self.function, [outputs, self.n * self.d], device),
            base: floats(&self.base, [outputs], device),
            scale: floats(&self.scale, [outputs], device),
            weight: floats(&self.weight(), [self.d], device),
        }
    }

    /// Of the norm of what streams are collapsed to.
    fn weight(&self) -> Vec<f32> {
        noise(self.d, 61)
    }

    /// The norm of rows that streams have been collapsed to.
    pub fn normed(&self, rows: &[f64]) -> Vec<f64> {
        let weight = self.weight();
        let rows = rows.chunks(self.d).flat_map(|row| {
            let mean = row.iter().map(|v| v * v).sum::<f64>() / self.d as f64;
            let rms = (mean + NORM_EPSILON).sqrt();
            let scaled = row.iter().zip(&weight);
            scaled.map(move |(v, weight)| v / rms * f64::from(*weight))
        });
        rows.collect()
    }

    /// The operator on `streams` and the parameters of this case.
    pub fn collapse(&self, streams: Tensor<3>, sinkhorn: Sinkhorn) -> (Tensor<2>, Coefficients) {
        let device = streams.device();
        self.parameters(&device).collapse(streams, sinkhorn)
    }

    /// The operator on `streams` and the first parameters of this case.
    pub fn head(&self, streams: Tensor<3>, epsilon: f64, norm_epsilon: f64) -> Tensor<2> {
        let device = &streams.device();
        let (n, width) = (self.n, self.n * self.d);
        head(
            streams,
            floats(&self.function[..n * width], [n, width], device),
            floats(&self.base[..n], [n], device),
            floats(&self.scale[..1], [1], device),
            epsilon,
            norm_epsilon,
        )
        .expect("arguments that fit")
    }

    pub fn oracle(&self, sinkhorn: Sinkhorn) -> Oracle {
        let (n, width) = (self.n, self.n * self.d);
        let mut oracle = Oracle::default();
        for token in wide(&self.streams).chunks(width) {
            let mixes = self.mixes(token, &self.function, sinkhorn.norm_epsilon);
            let m = |i: usize| mixes[i] * f64::from(self.scale[i]) + f64::from(self.base[i]);
            let pre: Vec<f64> = (0..n).map(|i| sigmoid(m(i)) + sinkhorn.epsilon).collect();
            oracle.input.extend(sum_of_streams(token, &pre));
            oracle.pre.extend(pre);
            oracle.post.extend((n..2 * n).map(|i| 2.0 * sigmoid(m(i))));
            let logits: Vec<f64> = (2 * n..(2 + n) * n).map(m).collect();
            oracle.comb.extend(mix(logits, n, sinkhorn));
        }
        oracle
    }

    /// What the head makes of the streams.
    pub fn headed(&self, epsilon: f64, norm_epsilon: f64) -> Vec<f64> {
        let (n, width) = (self.n, self.n * self.d);
        let function = &self.function[..n * width];
        let streams = wide(&self.streams);
        let tokens = streams.chunks(width).flat_map(|token| {
            let mixes = self.mixes(token, function, norm_epsilon);
            let m = |i: usize| mixes[i] * f64::from(self.scale[0]) + f64::from(self.base[i]);
            let gates: Vec<f64> = (0..n).map(|i| sigmoid(m(i)) + epsilon).collect();
            sum_of_streams(token, &gates)
        });
        tokens.collect()
    }

    /// The streams with `output`, `[tokens, d]`, spread over them.
    pub fn expanded(&self, output: &[f64], Oracle { post, comb, .. }: &Oracle) -> Vec<f64> {
        let (n, d) = (self.n, self.d);
        let streams = wide(&self.streams);
        let element = |index: usize| {
            let (token, k, channel) = (index / (n * d), index / d % n, index % d);
            let mixed = (0..n)
                .map(|j| comb[(token * n + j) * n + k] * streams[(token * n + j) * d + channel]);
            post[token * n + k] * output[token * d + channel] + mixed.sum::<f64>()
        };
        (0..self.tokens * n * d).map(element).collect()
    }

    fn mixes(&self, token: &[f64], function: &[f32], norm_epsilon: f64) -> Vec<f64> {
        let squares: f64 = token.iter().map(|v| v * v).sum();
        let rms = (squares / token.len() as f64 + norm_epsilon).sqrt();
        let rows = function.chunks(token.len());
        let product = |row: &[f32]| {
            let products = row.iter().zip(token).map(|(f, v)| f64::from(*f) * v);
            products.sum::<f64>() / rms
        };
        rows.map(product).collect()
    }
}

fn sum_of_streams(token: &[f64], weights: &[f64]) -> Vec<f64> {
    let d = token.len() / weights.len();
    let sum = |channel| {
        (0..weights.len())
            .map(|i| weights[i] * token[i * d + channel])
            .sum()
    };
    (0..d).map(sum).collect()
}

/// Coefficients and input in `f64`.
#[derive(Default)]
pub struct Oracle {
    pub pre: Vec<f64>,
    pub post: Vec<f64>,
    pub comb: Vec<f64>,
    pub input: Vec<f64>,
}

impl Oracle {
    /// The coefficients of a token side by side.
    pub fn packed(&self) -> Vec<f64> {
        let n = self.comb.len() / self.pre.len();
        let gates = self.pre.chunks(n).zip(self.post.chunks(n));
        gates
            .zip(self.comb.chunks(n * n))
            .flat_map(|((pre, post), comb)| [pre, post, comb].concat())
            .collect()
    }
}

/// The logistic function.
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Specification order: row softmax plus epsilon, columns, then rows and columns in turn; every sum
/// gets the epsilon.
fn mix(mut matrix: Vec<f64>, n: usize, sinkhorn: Sinkhorn) -> Vec<f64> {
    let epsilon = sinkhorn.epsilon;
    for row in matrix.chunks_mut(n) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
        row.iter_mut()
            .for_each(|v| *v = (*v - max).exp() / sum + epsilon);
    }
    let columns = |matrix: &mut Vec<f64>| {
        for column in 0..n {
            let sum: f64 = (0..n).map(|row| matrix[row * n + column]).sum();
            (0..n).for_each(|row| matrix[row * n + column] /= sum + epsilon);
        }
    };
    columns(&mut matrix);
    for _ in 1..sinkhorn.iterations {
        for row in matrix.chunks_mut(n) {
            let sum: f64 = row.iter().sum();
            row.iter_mut().for_each(|v| *v /= sum + epsilon);
        }
        columns(&mut matrix);
    }
    matrix
}
