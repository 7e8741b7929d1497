//! Hyper-connections in plain tensor operations. They are generic over the backend, because they
//! are the default bodies of the operators' backend trait.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{FloatDType, Shape};

use super::Sinkhorn;
use super::backend::{HyperConnectionOps, Mix, PendingOutput};
use crate::matmul::{INVARIANT_ROWS, MatmulOps};
use crate::optional::OptionalFloat;

/// The streams, the input, its norm and the coefficients.
pub(super) type Collapsed<B> = (
    FloatTensor<B>,
    FloatTensor<B>,
    FloatTensor<B>,
    FloatTensor<B>,
);

pub(super) fn collapse_norm<B: HyperConnectionOps>(
    pending: PendingOutput<B>,
    mix: Mix<B>,
    sinkhorn: Sinkhorn,
) -> Collapsed<B> {
    let streams = expanded::<B>(pending, mix.streams);
    let projected = B::hyper_project(streams.clone(), mix.function);
    let (input, coefficients) =
        B::hyper_collapse(streams.clone(), projected, mix.base, mix.scale, sinkhorn);
    let weight = OptionalFloat::Some(mix.weight);
    let normed = B::rms_norm(input.clone(), weight, mix.epsilon);
    (streams, input, normed, coefficients)
}

pub(super) fn head_norm<B: HyperConnectionOps>(
    pending: PendingOutput<B>,
    mix: Mix<B>,
    epsilon: f64,
    norm_epsilon: f64,
) -> FloatTensor<B> {
    let streams = expanded::<B>(pending, mix.streams);
    let projected = B::hyper_project(streams.clone(), mix.function);
    let last = B::hyper_head(
        streams,
        projected,
        mix.base,
        mix.scale,
        epsilon,
        norm_epsilon,
    );
    B::rms_norm(last, OptionalFloat::Some(mix.weight), mix.epsilon)
}

fn expanded<B: HyperConnectionOps>(
    pending: PendingOutput<B>,
    streams: FloatTensor<B>,
) -> FloatTensor<B> {
    match pending {
        PendingOutput::None => streams,
        PendingOutput::Some {
            output,
            coefficients,
        } => B::hyper_expand(output, streams, coefficients),
    }
}

pub(super) fn project<B: HyperConnectionOps>(
    streams: FloatTensor<B>,
    function: FloatTensor<B>,
) -> FloatTensor<B> {
    let [tokens, n, d] = streams.shape().dims();
    let flat = B::float_reshape(streams, Shape::new([tokens, n * d]));
    B::small_m_matmul(flat, function, FloatDType::F32, INVARIANT_ROWS)
}

pub(super) fn collapse<B: MatmulOps>(
    streams: FloatTensor<B>,
    projected: FloatTensor<B>,
    base: FloatTensor<B>,
    scale: FloatTensor<B>,
    sinkhorn: Sinkhorn,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let [tokens, n, _] = streams.shape().dims();
    let epsilon = sinkhorn.epsilon;
    let mixes = mixes::<B>(
        streams.clone(),
        projected,
        base,
        scale,
        sinkhorn.norm_epsilon,
    );
    let part = |range: std::ops::Range<usize>| {
        B::float_slice(mixes.clone(), &[(0..tokens).into(), range.into()])
    };
    let pre = B::float_add_scalar(B::sigmoid(part(0..n)), epsilon.into());
    let post = B::float_mul_scalar(B::sigmoid(part(n..2 * n)), 2.0.into());
    let comb = B::float_reshape(part(2 * n..(2 + n) * n), Shape::new([tokens, n, n]));

    let comb = B::float_add_scalar(B::softmax(comb, 2), epsilon.into());
    let mut comb = normalize::<B>(comb, 1, epsilon);
    for _ in 1..sinkhorn.iterations {
        comb = normalize::<B>(comb, 2, epsilon);
        comb = normalize::<B>(comb, 1, epsilon);
    }
    let comb = B::float_reshape(comb, Shape::new([tokens, n * n]));
    let input = weighted_sum::<B>(streams, pre.clone());
    (input, B::float_cat(vec![pre, post, comb], 1))
}

pub(super) fn head<B: MatmulOps>(
    streams: FloatTensor<B>,
    projected: FloatTensor<B>,
    base: FloatTensor<B>,
    scale: FloatTensor<B>,
    epsilon: f64,
    norm_epsilon: f64,
) -> FloatTensor<B> {
    let mixes = mixes::<B>(streams.clone(), projected, base, scale, norm_epsilon);
    let gates = B::float_add_scalar(B::sigmoid(mixes), epsilon.into());
    weighted_sum::<B>(streams, gates)
}

pub(super) fn expand<B: MatmulOps>(
    output: FloatTensor<B>,
    streams: FloatTensor<B>,
    coefficients: FloatTensor<B>,
) -> FloatTensor<B> {
    let [tokens, n, d] = streams.shape().dims();
    let dtype = streams.dtype();
    let part = |range: std::ops::Range<usize>| {
        B::float_slice(coefficients.clone(), &[(0..tokens).into(), range.into()])
    };
    let post = B::float_reshape(part(n..2 * n), Shape::new([tokens, n, 1]));
    let comb = B::float_reshape(part(2 * n..(2 + n) * n), Shape::new([tokens, n, n]));
    let streams = B::float_cast(streams, FloatDType::F32);
    let mixed = B::precise_matmul(B::float_swap_dims(comb, 1, 2), streams);
    let output = B::float_cast(output, FloatDType::F32);
    let own = B::float_mul(post, B::float_reshape(output, Shape::new([tokens, 1, d])));
    B::float_cast(B::float_add(mixed, own), dtype.into())
}

/// `projected / rms(v) · scale + base`, where `v` is all streams of a token side by side.
fn mixes<B: MatmulOps>(
    streams: FloatTensor<B>,
    projected: FloatTensor<B>,
    base: FloatTensor<B>,
    scale: FloatTensor<B>,
    norm_epsilon: f64,
) -> FloatTensor<B> {
    let [tokens, n, d] = streams.shape().dims();
    let flat = B::float_reshape(
        B::float_cast(streams, FloatDType::F32),
        Shape::new([tokens, n * d]),
    );
    let mean = B::float_mean_dim(B::float_mul(flat.clone(), flat), 1);
    let rms = B::float_sqrt(B::float_add_scalar(mean, norm_epsilon.into()));
    let row = |values: FloatTensor<B>| {
        let length = values.shape()[0];
        B::float_reshape(values, Shape::new([1, length]))
    };
    let scaled = B::float_mul(B::float_div(projected, rms), row(scale));
    B::float_add(scaled, row(base))
}

fn normalize<B: MatmulOps>(matrix: FloatTensor<B>, dim: usize, epsilon: f64) -> FloatTensor<B> {
    let sum = B::float_sum_dim(matrix.clone(), dim);
    B::float_div(matrix, B::float_add_scalar(sum, epsilon.into()))
}

/// `Σ_i weights[i] · streams[i]`, summed in f32.
fn weighted_sum<B: MatmulOps>(streams: FloatTensor<B>, weights: FloatTensor<B>) -> FloatTensor<B> {
    let [tokens, n, d] = streams.shape().dims();
    let dtype = streams.dtype();
    let weights = B::float_reshape(weights, Shape::new([tokens, 1, n]));
    let sum = B::precise_matmul(weights, B::float_cast(streams, FloatDType::F32));
    B::float_cast(B::float_reshape(sum, Shape::new([tokens, d])), dtype.into())
}
