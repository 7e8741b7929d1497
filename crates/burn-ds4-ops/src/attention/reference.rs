use burn::tensor::{FloatDType, Tensor, activation};

use super::{AttentionOutput, CompressedKeys};
use crate::matmul::matmul;

pub(super) fn rotate(x: Tensor<4>, cos: Tensor<3>, sin: Tensor<3>) -> Tensor<4> {
    let [batch, positions, heads, width] = x.dims();
    let [_, _, rotated] = cos.dims();
    let dtype = x.dtype();
    let tail = x
        .clone()
        .slice([0..batch, 0..positions, 0..heads, width - rotated..width])
        .cast(FloatDType::F32);
    let swapped = tail
        .clone()
        .reshape([batch, positions, heads, rotated / 2, 2])
        .flip([4])
        .reshape([batch, positions, heads, rotated]);
    let turned =
        (tail * cos.unsqueeze_dim::<4>(2) + swapped * sin.unsqueeze_dim::<4>(2)).cast(dtype);
    if rotated == width {
        return turned;
    }
    let kept = x.slice([0..batch, 0..positions, 0..heads, 0..width - rotated]);
    Tensor::cat(vec![kept, turned], 3)
}

pub(super) fn pool(values: Tensor<4>, scores: Tensor<4>) -> Tensor<3> {
    (activation::softmax(scores, 2) * values)
        .sum_dim(2)
        .squeeze_dim(2)
}

pub(super) fn index_scores(queries: Tensor<4>, keys: Tensor<3>, weights: Tensor<3>) -> Tensor<3> {
    let [batch, count, heads, width] = queries.dims();
    let [_, rows, _] = keys.dims();
    let queries = queries.reshape([batch, count * heads, width]);
    let dots = matmul(queries, keys.swap_dims(1, 2));
    let dots = activation::relu(dots).reshape([batch * count, heads, rows]);
    let weights = weights.reshape([batch * count, 1, heads]);
    matmul(weights, dots).reshape([batch, count, rows])
}

pub(super) fn sink_attention(
    queries: Tensor<4>,
    window: Tensor<3>,
    window_bias: Tensor<3>,
    compressed: Option<CompressedKeys>,
    sinks: Tensor<1>,
    scale: f64,
) -> AttentionOutput {
    let [batch, count, heads, width] = queries.dims();
    let [_, window_columns, _] = window.dims();
    let dtype = queries.dtype();
    // CubeCL devices panic on some operations without elements.
    let compressed = compressed.filter(|keys| {
        let (CompressedKeys::Shared { bias, .. } | CompressedKeys::PerQuery { bias, .. }) = keys;
        bias.dims()[2] > 0
    });

    let per_sequence = [batch, count * heads, width];
    let per_query = [batch * count, heads, width];
    let logits = |queries: Tensor<3>, keys: Tensor<3>, bias: Tensor<3>| {
        let columns = keys.dims()[1];
        let dots = matmul(queries, keys.swap_dims(1, 2)).cast(FloatDType::F32);
        dots.reshape([batch, count, heads, columns]) * scale + bias.unsqueeze_dim::<4>(2)
    };

    let mut all = logits(
        queries.clone().reshape(per_sequence),
        window.clone(),
        window_bias,
    );
    if let Some(keys) = &compressed {
        let part = match keys.clone() {
            CompressedKeys::Shared { rows, bias } => {
                logits(queries.reshape(per_sequence), rows, bias)
            }
            CompressedKeys::PerQuery { rows, bias } => {
                logits(queries.reshape(per_query), rows, bias)
            }
        };
        all = Tensor::cat(vec![all, part], 3);
    }

    let sinks = sinks.cast(FloatDType::F32).reshape([1, 1, heads, 1]);
    let maximum = all.clone().max_dim(3).max_pair(sinks.clone());
    let exponentials = (all - maximum.clone()).exp();
    let sum = exponentials.clone().sum_dim(3) + (sinks - maximum).exp();
    let probabilities = exponentials / sum;

    let columns = probabilities.dims()[3];
    let values = |from: usize, to: usize, shape: [usize; 3], values: Tensor<3>| {
        let part = if (from, to) == (0, columns) {
            probabilities.clone()
        } else {
            probabilities
                .clone()
                .slice([0..batch, 0..count, 0..heads, from..to])
        };
        let [first, second, _] = shape;
        let part = part.cast(dtype).reshape([first, second, to - from]);
        matmul(part, values).reshape([batch, count, heads, width])
    };
    let mut output = values(0, window_columns, per_sequence, window);
    if let Some(keys) = compressed {
        let part = match keys {
            CompressedKeys::Shared { rows, .. } => {
                values(window_columns, columns, per_sequence, rows)
            }
            CompressedKeys::PerQuery { rows, .. } => {
                values(window_columns, columns, per_query, rows)
            }
        };
        output = output + part;
    }
    AttentionOutput {
        output,
        probabilities,
    }
}
