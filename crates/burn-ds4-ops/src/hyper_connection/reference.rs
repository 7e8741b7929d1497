//! Hyper-connections in plain tensor operations. They are generic over the backend, because they
//! are the default bodies of the operators' backend trait.

use super::args::{Mix, Sinkhorn};
use crate::dims::Dims;
use crate::matmul::{MatmulOps, multiply_one};
use crate::norm::NormOps;
use crate::optional::OptionalFloat;
use crate::reference::prelude::*;

/// The streams, the input, its norm and the coefficients.
pub(super) type Collapsed<B> = (
    FloatTensor<B>,
    FloatTensor<B>,
    FloatTensor<B>,
    FloatTensor<B>,
);

pub(super) fn collapse<B: MatmulOps + NormOps>(mix: Mix<B>, sinkhorn: Sinkhorn) -> Collapsed<B> {
    let [tokens, n, _] = mix.streams.dims();
    let epsilon = sinkhorn.epsilon;
    let mixes = mixes::<B>(&mix, sinkhorn.norm_epsilon);
    let part = |range| slice::<B>(mixes.clone(), 1, range);
    let pre = B::float_add_scalar(B::sigmoid(part(0..n)), epsilon.into());
    let post = B::float_mul_scalar(B::sigmoid(part(n..2 * n)), 2.0.into());
    let comb = reshape::<B>(part(2 * n..(2 + n) * n), [tokens, n, n]);

    let comb = B::float_add_scalar(B::softmax(comb, 2), epsilon.into());
    let mut comb = normalize::<B>(comb, 1, epsilon);
    for _ in 1..sinkhorn.iterations {
        comb = normalize::<B>(comb, 2, epsilon);
        comb = normalize::<B>(comb, 1, epsilon);
    }
    let comb = reshape::<B>(comb, [tokens, n * n]);
    let input = weighted_sum::<B>(mix.streams.clone(), pre.clone());
    let normed = normed::<B>(input.clone(), mix.weight, mix.epsilon);
    let coefficients = B::float_cat(vec![pre, post, comb], 1);
    (mix.streams, input, normed, coefficients)
}

pub(super) fn head<B: MatmulOps + NormOps>(
    mix: Mix<B>,
    epsilon: f64,
    norm_epsilon: f64,
) -> FloatTensor<B> {
    let mixes = mixes::<B>(&mix, norm_epsilon);
    let gates = B::float_add_scalar(B::sigmoid(mixes), epsilon.into());
    let collapsed = weighted_sum::<B>(mix.streams, gates);
    normed::<B>(collapsed, mix.weight, mix.epsilon)
}

/// The norm of rows, or the rows if there is no weight.
fn normed<B: NormOps>(
    rows: FloatTensor<B>,
    weight: OptionalFloat<B>,
    epsilon: f64,
) -> FloatTensor<B> {
    match weight {
        OptionalFloat::None => rows,
        weight => B::rms_norm(rows, weight, epsilon),
    }
}

pub(super) fn expand<B: MatmulOps>(
    output: FloatTensor<B>,
    streams: FloatTensor<B>,
    coefficients: FloatTensor<B>,
) -> FloatTensor<B> {
    let [tokens, n, d] = streams.dims();
    let dtype = streams.dtype();
    let part = |range| slice::<B>(coefficients.clone(), 1, range);
    let post = reshape::<B>(part(n..2 * n), [tokens, n, 1]);
    let comb = reshape::<B>(part(2 * n..(2 + n) * n), [tokens, n, n]);
    let streams = as_f32::<B>(streams);
    let mixed = B::precise_matmul(B::float_swap_dims(comb, 1, 2), streams);
    let output = as_f32::<B>(output);
    let own = B::float_mul(post, reshape::<B>(output, [tokens, 1, d]));
    B::float_cast(B::float_add(mixed, own), dtype.into())
}

/// `function · v / rms(v) · scale + base`, where `v` is all streams of a token side by side.
fn mixes<B: MatmulOps>(mix: &Mix<B>, norm_epsilon: f64) -> FloatTensor<B> {
    let [tokens, n, d] = mix.streams.dims();
    let flat = reshape::<B>(mix.streams.clone(), [tokens, n * d]);
    let function = mix.function.clone();
    let projected = multiply_one::<B>(flat.clone(), function, FloatDType::F32);
    let flat = as_f32::<B>(flat);
    let mean = B::float_mean_dim(B::float_mul(flat.clone(), flat), 1);
    let rms = B::float_sqrt(B::float_add_scalar(mean, norm_epsilon.into()));
    let row = |values: FloatTensor<B>| {
        let length = values.shape()[0];
        reshape::<B>(values, [1, length])
    };
    let scaled = B::float_mul(B::float_div(projected, rms), row(mix.scale.clone()));
    B::float_add(scaled, row(mix.base.clone()))
}

fn normalize<B: MatmulOps>(matrix: FloatTensor<B>, dim: usize, epsilon: f64) -> FloatTensor<B> {
    let sum = B::float_sum_dim(matrix.clone(), dim);
    B::float_div(matrix, B::float_add_scalar(sum, epsilon.into()))
}

/// `Σ_i weights[i] · streams[i]`, summed in f32.
fn weighted_sum<B: MatmulOps>(streams: FloatTensor<B>, weights: FloatTensor<B>) -> FloatTensor<B> {
    let [tokens, n, d] = streams.dims();
    let dtype = streams.dtype();
    let weights = reshape::<B>(weights, [tokens, 1, n]);
    let sum = B::precise_matmul(weights, as_f32::<B>(streams));
    B::float_cast(reshape::<B>(sum, [tokens, d]), dtype.into())
}
