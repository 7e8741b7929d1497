//! The short convolution: each channel over its own last tokens.

use burn::tensor::activation::silu;
use burn::tensor::{FloatDType, Int, IntDType, Tensor};

/// New rows `[batch, tokens, channels]` after the ones before them,
/// `[batch, channels, kernel - 1]`: f32 `[batch, kernel - 1 + tokens, channels]`.
pub fn window(history: Tensor<3>, rows: Tensor<3>) -> Tensor<3> {
    let history = history.cast(FloatDType::F32).swap_dims(1, 2);
    Tensor::cat(vec![history, rows.cast(FloatDType::F32)], 1)
}

/// The convolution of a window by `[channels, kernel]`, and SiLU: f32 `[batch, tokens, channels]`.
///
/// The terms of a sum are added one after the other, so that a token's result does not depend on
/// how many there are.
pub fn causal(window: Tensor<3>, weight: Tensor<2>) -> Tensor<3> {
    let [_, rows, channels] = window.dims();
    let [_, kernel] = weight.dims();
    let tokens = rows + 1 - kernel;
    let weight = weight.cast(FloatDType::F32);
    let term = |tap: usize| {
        let weight = weight.clone().slice_dim(1, tap..tap + 1);
        window.clone().slice_dim(1, tap..tap + tokens) * weight.reshape([1, 1, channels])
    };
    silu((1..kernel).fold(term(0), |sum, tap| sum + term(tap)))
}

/// The history for the next call, `[batch, channels, kernel - 1]`: the window's rows up to the last
/// token or, with `accepted`, up to the last accepted token.
pub fn next_history(
    window: Tensor<3>,
    tokens: usize,
    accepted: Option<Tensor<1, Int>>,
) -> Tensor<3> {
    let [batch, rows, channels] = window.dims();
    let history = rows - tokens;
    let window = match accepted {
        None => window.slice_dim(1, tokens..rows),
        Some(accepted) => {
            let shape = [batch, history, channels];
            let first = accepted.clamp(0, tokens as i64).cast(IntDType::I32);
            let offsets = Tensor::<1, Int>::arange(0..history as i64, &window.device());
            let offsets = offsets.cast(IntDType::I32).reshape([1, history, 1]);
            let indices = first.reshape([batch, 1, 1]).expand(shape) + offsets.expand(shape);
            window.gather(1, indices)
        }
    };
    window.swap_dims(1, 2)
}
