use burn::tensor::{Tensor, activation};

use super::{Coefficients, Sinkhorn};
use crate::matmul::matmul;

/// `function · v / rms(v)`, `v` being all streams of a token side by side.
fn project(streams: Tensor<3>, function: Tensor<2>, norm_epsilon: f64) -> Tensor<2> {
    let flat: Tensor<2> = streams.flatten(1, 2);
    let rms = (flat.clone().square().mean_dim(1) + norm_epsilon).sqrt();
    matmul(flat, function.transpose()) / rms
}

pub(super) fn coefficients(
    streams: Tensor<3>,
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    sinkhorn: Sinkhorn,
) -> Coefficients {
    let [tokens, n, _] = streams.dims();
    // CubeCL devices panic on some operations without elements, here and below.
    if tokens == 0 {
        let options = (&streams.device(), streams.dtype());
        return Coefficients {
            pre: Tensor::zeros([0, n], options),
            post: Tensor::zeros([0, n], options),
            comb: Tensor::zeros([0, n, n], options),
        };
    }
    let epsilon = sinkhorn.epsilon;
    let mixes =
        project(streams, function, sinkhorn.norm_epsilon) * scale.unsqueeze() + base.unsqueeze();
    let gates = activation::sigmoid(mixes.clone().slice([0..tokens, 0..2 * n]));
    let pre = gates.clone().slice([0..tokens, 0..n]) + epsilon;
    let post = gates.slice([0..tokens, n..2 * n]) * 2.0;
    let comb = mixes
        .slice([0..tokens, 2 * n..(2 + n) * n])
        .reshape([tokens, n, n]);

    let mut comb = normalize(activation::softmax(comb, 2) + epsilon, 1, epsilon);
    for _ in 1..sinkhorn.iterations {
        comb = normalize(comb, 2, epsilon);
        comb = normalize(comb, 1, epsilon);
    }
    Coefficients { pre, post, comb }
}

fn normalize(matrix: Tensor<3>, dim: usize, epsilon: f64) -> Tensor<3> {
    let sum = matrix.clone().sum_dim(dim) + epsilon;
    matrix / sum
}

pub(super) fn collapse(streams: Tensor<3>, pre: Tensor<2>) -> Tensor<2> {
    let [tokens, _, d] = streams.dims();
    if tokens == 0 {
        return Tensor::zeros([0, d], (&streams.device(), streams.dtype()));
    }
    matmul(pre.unsqueeze_dim::<3>(1), streams).squeeze_dim(1)
}

pub(super) fn expand(
    output: Tensor<2>,
    streams: Tensor<3>,
    coefficients: Coefficients,
) -> Tensor<3> {
    if streams.dims()[0] == 0 {
        return streams;
    }
    let mixed = matmul(coefficients.comb.swap_dims(1, 2), streams);
    mixed + coefficients.post.unsqueeze_dim::<3>(2) * output.unsqueeze_dim::<3>(1)
}

pub(super) fn head(
    streams: Tensor<3>,
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    epsilon: f64,
    norm_epsilon: f64,
) -> Tensor<2> {
    let [tokens, _, d] = streams.dims();
    if tokens == 0 {
        return Tensor::zeros([0, d], (&streams.device(), streams.dtype()));
    }
    let mixes =
        project(streams.clone(), function, norm_epsilon) * scale.unsqueeze() + base.unsqueeze();
    collapse(streams, activation::sigmoid(mixes) + epsilon)
}
