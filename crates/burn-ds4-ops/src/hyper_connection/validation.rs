//! Checks of the arguments of this family's operators.

use burn::tensor::Tensor;

use super::args::Sinkhorn;
use super::coefficients::Coefficients;
use crate::OpError;
use crate::validation::{
    F32, FLOATS, expect_device, expect_float, expect_not_negative, expect_positive, expect_tensor,
};

pub(super) fn expect_output(
    output: &Tensor<2>,
    streams: &Tensor<3>,
    coefficients: &Coefficients,
) -> Result<(), OpError> {
    let [tokens, n, d] = streams.dims();
    let device = streams.device();
    expect_float("streams", streams)?;
    let like = ("streams", &device);
    expect_tensor(("output", output), FLOATS, [tokens, d], like)?;
    coefficients.expect_fit(tokens, n)?;
    let of_coefficients = coefficients.packed().device();
    expect_device("coefficients", &of_coefficients, "streams", &device)
}

pub(super) fn expect_sinkhorn(sinkhorn: Sinkhorn) -> Result<(), OpError> {
    expect_not_negative("epsilon", sinkhorn.epsilon)?;
    expect_not_negative("norm_epsilon", sinkhorn.norm_epsilon)?;
    expect_positive([("iterations", sinkhorn.iterations)])
}

pub(super) fn expect_parameters(
    streams: &Tensor<3>,
    function: &Tensor<2>,
    (base, bases): (&Tensor<1>, usize),
    (scale, scales): (&Tensor<1>, usize),
) -> Result<(), OpError> {
    let [_, n, d] = streams.dims();
    expect_float("streams", streams)?;
    expect_positive([("channels of streams", n * d)])?;
    let like = ("streams", &streams.device());
    expect_tensor(("function", function), FLOATS, [bases, n * d], like)?;
    expect_tensor(("base", base), F32, [bases], like)?;
    expect_tensor(("scale", scale), F32, [scales], like)
}
