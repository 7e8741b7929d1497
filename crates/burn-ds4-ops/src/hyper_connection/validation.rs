//! Checks of the arguments of this family's operators.

use burn::tensor::{DType, Tensor};

use super::args::Sinkhorn;
use super::coefficients::Coefficients;
use crate::OpError;
use crate::validation::{
    expect_device, expect_dtype, expect_float, expect_not_negative, expect_shape, invalid,
};

pub(super) fn expect_output(
    output: &Tensor<2>,
    streams: &Tensor<3>,
    coefficients: &Coefficients,
) -> Result<(), OpError> {
    let [tokens, n, d] = streams.dims();
    expect_float("output", output)?;
    expect_float("streams", streams)?;
    expect_shape("output", output.dims(), [tokens, d])?;
    coefficients.expect_fit(tokens, n)?;
    let device = streams.device();
    expect_device("output", &output.device(), "streams", &device)?;
    let of_coefficients = coefficients.packed().device();
    expect_device("coefficients", &of_coefficients, "streams", &device)
}

pub(super) fn expect_sinkhorn(sinkhorn: Sinkhorn) -> Result<(), OpError> {
    expect_not_negative("epsilon", sinkhorn.epsilon)?;
    expect_not_negative("norm_epsilon", sinkhorn.norm_epsilon)?;
    if sinkhorn.iterations == 0 {
        return Err(invalid("iterations", "at least 1", 0));
    }
    Ok(())
}

pub(super) fn expect_parameters(
    streams: &Tensor<3>,
    function: &Tensor<2>,
    (base, bases): (&Tensor<1>, usize),
    (scale, scales): (&Tensor<1>, usize),
) -> Result<(), OpError> {
    let [_, n, d] = streams.dims();
    expect_float("streams", streams)?;
    expect_float("function", function)?;
    expect_dtype("base", "F32", base, &[DType::F32])?;
    expect_dtype("scale", "F32", scale, &[DType::F32])?;
    if n * d == 0 {
        return Err(invalid("channels of streams", "at least 1", 0));
    }
    expect_shape("function", function.dims(), [bases, n * d])?;
    expect_shape("base", base.dims(), [bases])?;
    expect_shape("scale", scale.dims(), [scales])?;
    let device = streams.device();
    expect_device("function", &function.device(), "streams", &device)?;
    expect_device("base", &base.device(), "streams", &device)?;
    expect_device("scale", &scale.device(), "streams", &device)
}
