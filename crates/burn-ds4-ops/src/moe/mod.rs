//! Feed-forward experts: clamped SwiGLU, routed or always on.

mod backend;
#[cfg(feature = "cube")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use crate::OpError;
use crate::device::is_host;
use crate::quant::Weights;
use crate::validation::{
    expect_device, expect_dtype, expect_float, expect_not_negative, expect_shape,
};

use backend::MoeOps;

/// `silu(min(gate, limit)) · clamp(up, -limit, limit)`; no clamp where `limit` is `None`.
///
/// # Shapes
///
/// - `gate`, `up`: the same shape, as is the output
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `Expert.forward`: the gate is clamped from above only, before the SiLU.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>, limit: Option<f64>) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::swiglu(
        gate.into_dispatch(),
        up.into_dispatch(),
        limit.unwrap_or(f64::INFINITY),
    ))
}

/// Experts: for every token, `Σ_slot down(weight · swiglu(gate_up · x))` over its `k` chosen experts.
///
/// Nothing is read back from a device.
///
/// # Shapes and dtypes
///
/// - `x`: `[tokens, d]`, f32 / f16 / bf16
/// - `ids`: `[tokens, k]`, i32 / i64 / u32; `weights`: `[tokens, k]`, f32
/// - `gate_up`: matrices `[2·inner, d]`, the gate's rows first; `down`: matrices `[d, inner]`, one of each for every expert
/// - `limit`: clamp of the SwiGLU inputs, see [`swiglu`]
/// - output: `[tokens, d]`, f32
///
/// Sums are f32, those over slots in the order of the slots. The hidden values, `weight · swiglu(..)`, are rounded to the dtype of
/// `x`. Weights are exact in the kernels; where there is none, they are rounded to the dtype of `x` if that is another.
///
/// # Kernels
///
/// Packed and bf16 weights are multiplied on tensor cores by CUDA C++ kernels, any others, and on any other device, row by row. Up to
/// 16 tokens (of up to 8 slots) it is two launches, and a token's result has the same bits whatever else is in the batch.
///
/// # Padding
///
/// A slot whose id is negative contributes exactly 0, whatever its weight. So does an id that is no expert's on a device whose
/// memory is not the host's: telling would take reading it back, which [`check_expert_ids`] does for ids of uncertain origin.
///
/// # Special values
///
/// A NaN or an infinity in `x` reaches its own row only. Sums of products without the scale of an FP8 block, or of an infinite
/// weight and one of the parts of an f16 or f32 `x`, may be infinite or NaN where their values as f32 would not be. What is in the matrices of an expert that no slot names has no part.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `MoE.forward`: the routing weight is applied before the down projection.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, for a `limit` that is negative or NaN, and, where the device's
/// memory is the host's, for an id that is no expert's.
pub fn expert_ffn(
    x: Tensor<2>,
    ids: Tensor<2, Int>,
    weights: Tensor<2>,
    gate_up: &Weights,
    down: &Weights,
    limit: Option<f64>,
) -> Result<Tensor<2>, OpError> {
    let ([tokens, d], [_, k]) = (x.dims(), ids.dims());
    let [experts, rows, _] = gate_up.dims();
    expect_float("x", &x)?;
    expect_ids(&ids)?;
    expect_dtype("weights", "F32", &weights, &[DType::F32])?;
    expect_shape("ids", ids.dims(), [tokens, k])?;
    expect_shape("weights", weights.dims(), [tokens, k])?;
    expect_shape("gate_up", gate_up.dims(), [experts, rows, d])?;
    if !rows.is_multiple_of(2) {
        return Err(OpError::InvalidValue {
            argument: "rows of gate_up",
            expected: "an even number".into(),
            actual: rows,
        });
    }
    expect_shape("down", down.dims(), [experts, d, rows / 2])?;
    let device = x.device();
    expect_device("ids", &ids.device(), "x", &device)?;
    expect_device("weights", &weights.device(), "x", &device)?;
    expect_device("gate_up", &gate_up.device(), "x", &device)?;
    expect_device("down", &down.device(), "x", &device)?;
    let limit = limit.unwrap_or(f64::INFINITY);
    expect_not_negative("limit", limit)?;
    if is_host(&device) {
        check_expert_ids(ids.clone(), experts)?;
    }
    if [tokens, d, k, experts, rows].contains(&0) {
        return Ok(Tensor::zeros([tokens, d], (&device, DType::F32)));
    }
    Ok(Tensor::from_dispatch(Dispatch::expert_ffn(
        x.into_dispatch(),
        ids.into_dispatch(),
        weights.into_dispatch(),
        gate_up.clone().into(),
        down.clone().into(),
        limit,
    )))
}

/// Reads expert ids back and refuses the first that is not below `experts`; negative ones are padding.
///
/// [`expert_ffn`] does so where it costs nothing. Routers give no such ids.
///
/// # Errors
///
/// [`OpError::InvalidValue`] that names the id, [`OpError::DtypeMismatch`] for a dtype that [`expert_ffn`] does not take.
///
/// # Panics
///
/// If the device fails to give the ids.
pub fn check_expert_ids(ids: Tensor<2, Int>, experts: usize) -> Result<(), OpError> {
    expect_ids(&ids)?;
    let unknown = |id: &i64| usize::try_from(*id).is_ok_and(|id| id >= experts);
    match ids.into_data().iter::<i64>().find(unknown) {
        None => Ok(()),
        Some(id) => Err(OpError::InvalidValue {
            argument: "ids",
            expected: format!("less than {experts}, the number of experts"),
            actual: id as usize,
        }),
    }
}

fn expect_ids(ids: &Tensor<2, Int>) -> Result<(), OpError> {
    let accepted = [DType::I32, DType::I64, DType::U32];
    expect_dtype("ids", "I32, I64 or U32", ids, &accepted)
}
