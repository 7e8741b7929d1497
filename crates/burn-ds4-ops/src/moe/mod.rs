//! Feed-forward experts: clamped SwiGLU, routed or always on.

mod args;
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
    F32, INTEGERS, expect_device, expect_dtype, expect_float, expect_not_negative, expect_shape,
    expect_tensor, invalid,
};

use args::PackedExperts;
use backend::MoeOps;

/// `silu(min(gate, limit)) · clamp(up, -limit, limit)`; no clamp where `limit` is `None`.
///
/// # Shapes and dtypes
///
/// - `gate`, `up`: the same shape and dtype, f32 / f16 / bf16, as is the output
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `Expert.forward`: the gate is clamped from above only, before
/// the SiLU.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, and for a `limit` that is negative
/// or NaN.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::moe::swiglu;
///
/// let device = Device::flex();
/// let gate = Tensor::<1>::from_data([0.0, 100.0], &device);
/// let up = Tensor::<1>::from_data([3.0, 7.0], &device);
/// // silu(0) · 3, and 5 · 5 after the clamp.
/// let output = swiglu(gate, up, Some(5.0))?.into_data();
/// assert_eq!(output.iter::<f32>().next(), Some(0.0));
/// assert!((output.iter::<f32>().nth(1).unwrap() - 24.8327).abs() < 1e-3);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "silu_and_mul")]
pub fn swiglu<const D: usize>(
    gate: Tensor<D>,
    up: Tensor<D>,
    limit: Option<f64>,
) -> Result<Tensor<D>, OpError> {
    expect_float("gate", &gate)?;
    expect_dtype("up", "that of `gate`", &up, &[gate.dtype()])?;
    expect_shape("up", up.dims(), gate.dims())?;
    expect_device("up", &up.device(), "gate", &gate.device())?;
    let limit = limit.unwrap_or(f64::INFINITY);
    expect_not_negative("limit", limit)?;
    if gate.dims().contains(&0) {
        // CubeCL devices panic on some operations without elements.
        return Ok(gate);
    }
    Ok(Tensor::from_dispatch(Dispatch::swiglu(
        gate.into_dispatch(),
        up.into_dispatch(),
        limit,
    )))
}

/// Experts: for every token, `Σ_slot down(weight · swiglu(gate_up · x))` over its `k` chosen
/// experts.
///
/// Nothing is read back from a device.
///
/// # Shapes and dtypes
///
/// - `x`: `[tokens, d]`, f32 / f16 / bf16
/// - `ids`: `[tokens, k]`, i32 / i64 / u32; `weights`: `[tokens, k]`, f32
/// - `gate_up`: matrices `[2·inner, d]`, the gate's rows first; `down`: matrices `[d, inner]`, one
///   of each for every expert
/// - `limit`: clamp of the SwiGLU inputs, see [`swiglu`]
/// - output: `[tokens, d]`, f32
///
/// Sums are f32, those over slots in the order of the slots. The hidden values, `weight ·
/// swiglu(..)`, are rounded to the dtype of `x`. Weights are exact in the kernels; without a
/// kernel, weights of another dtype may be rounded to that of `x`.
///
/// # Kernels
///
/// CUDA C++ kernels multiply packed and bf16 weights on tensor cores. Other weights, and all
/// weights on other devices, are multiplied row by row. Up to 16 tokens (of up to 8 slots) it is
/// two launches, and a token's result has the same bits whatever else is in the batch.
///
/// # Padding
///
/// A slot whose id is negative contributes exactly 0, whatever its weight. So does an id that is no
/// expert's on a device whose memory is not the host's: finding it would take reading the ids back,
/// which [`check_expert_ids`] does for ids of uncertain origin.
///
/// # Special values
///
/// A NaN or an infinity in `x` affects its own row only. The sums of an FP8 block before its scale
/// is applied, and the products of an infinite weight and one term of an f16 or f32 `x`, may be
/// infinite or NaN where the f32 result would not be. Where the hardware decodes FP8, up to 16
/// tokens, numbers of a row of `x` below `2^-38` of the largest of their block of 128 columns may
/// count as zero. The matrices of an expert that no slot names do not affect the result.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `MoE.forward`: the routing weight is applied before the down
/// projection.
///
/// # Errors
///
/// [`OpError`] for a dtype, shape or device that does not fit, for a `limit` that is negative or
/// NaN, and, where the device's memory is the host's, for an id that is no expert's.
///
/// # Example
///
/// A token of one channel and the two experts of its choice, which have one hidden value each.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData, Tolerance};
/// use burn_ds4_ops::{moe::expert_ffn, quant::Weights};
///
/// let device = Device::flex();
/// let gate_up = Tensor::<3>::from_data([[[20.0], [1.0]], [[20.0], [0.5]]], &device);
/// let down = Tensor::<3>::from_data([[[1.0]], [[2.0]]], &device);
/// let output = expert_ffn(
///     Tensor::from_data([[1.0]], &device),
///     Tensor::from_ints([[1, 0]], &device),
///     Tensor::from_data([[0.25, 0.75]], &device),
///     &Weights::dense(gate_up)?,
///     &Weights::dense(down)?,
///     None,
/// )?;
/// // silu(20) is 20: 2 · (0.25 · 20 · 0.5) + 1 · (0.75 · 20 · 1).
/// let expected = TensorData::from([[20.0_f32]]);
/// output.into_data().assert_approx_eq::<f32>(&expected, Tolerance::default());
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "fused_moe")]
pub fn expert_ffn(
    x: Tensor<2>,
    ids: Tensor<2, Int>,
    weights: Tensor<2>,
    gate_up: &Weights,
    down: &Weights,
    limit: Option<f64>,
) -> Result<Tensor<2>, OpError> {
    let ([tokens, d], [_, k]) = (x.dims(), ids.dims());
    let experts = Experts {
        gate_up,
        down,
        limit,
    };
    let experts = experts.packed(&x, ["gate_up", "rows of gate_up", "down", "limit"])?;
    let [count, rows, _] = gate_up.dims();
    check_routing(&x, &ids, &weights, count)?;
    let device = x.device();
    if [tokens, d, k, count, rows].contains(&0) {
        return Ok(Tensor::zeros([tokens, d], (&device, DType::F32)));
    }
    Ok(Tensor::from_dispatch(Dispatch::expert_ffn(
        gate_up.activations().input(x)?.into_dispatch(),
        ids.into_dispatch(),
        weights.into_dispatch(),
        experts,
    )))
}

/// Matrices of experts of one kind.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a> {
    /// Matrices `[2·inner, d]`, the gate's rows first.
    pub gate_up: &'a Weights,
    /// Matrices `[d, inner]`, as many as in `gate_up`.
    pub down: &'a Weights,
    /// Clamp of the SwiGLU inputs, see [`swiglu`].
    pub limit: Option<f64>,
}

impl Experts<'_> {
    /// Checks the matrices, under these argument names, against the tokens. Returns them as
    /// backends take them.
    fn packed(
        &self,
        x: &Tensor<2>,
        [gate_up, gate_up_rows, down, limit]: [&'static str; 4],
    ) -> Result<PackedExperts<Dispatch>, OpError> {
        expect_float("x", x)?;
        let [_, d] = x.dims();
        let [count, rows, _] = self.gate_up.dims();
        expect_shape(gate_up, self.gate_up.dims(), [count, rows, d])?;
        if !rows.is_multiple_of(2) {
            return Err(invalid(gate_up_rows, "an even number", rows));
        }
        expect_shape(down, self.down.dims(), [count, d, rows / 2])?;
        expect_device(gate_up, &self.gate_up.device(), "x", &x.device())?;
        expect_device(down, &self.down.device(), "x", &x.device())?;
        let value = self.limit.unwrap_or(f64::INFINITY);
        expect_not_negative(limit, value)?;
        Ok(PackedExperts {
            gate_up: self.gate_up.clone().into(),
            down: self.down.clone().into(),
            limit: value,
            rounded: self.down.activations().block(),
        })
    }

    fn is_empty(&self) -> bool {
        self.gate_up.dims().contains(&0)
    }
}

/// A whole mixture of experts: the result of [`expert_ffn`] for `routed`, plus the output of an
/// expert that all tokens share, with weight 1.
///
/// Several shared experts count as one with the sum of their inner widths.
///
/// # Shapes and dtypes
///
/// - `x`, `ids`, `weights`: as for [`expert_ffn`]
/// - `routed`: the experts that `ids` refer to; `shared`: one expert, of any inner width and format
/// - output: `[tokens, d]` in the dtype of `x`
///
/// Sums are f32, those of the slots in their order and then the shared expert's, and are rounded
/// once. Everything else is as for [`expert_ffn`], padding and special values included: a token
/// with nothing but padding has the output of the shared expert.
///
/// # Kernels
///
/// Up to 16 tokens (of up to 8 slots) by packed and bf16 weights it is two launches on tensor
/// cores: the first divides the matrices of all experts among its cubes by their bytes, the second
/// sums everything. A token's result has the same bits whatever else is in the batch. Where both
/// kinds of experts have other weights, and on any other device, it is four launches. With more
/// tokens, and where tensor cores multiply by one kind only, it is [`expert_ffn`] twice and a sum.
///
/// # Source
///
/// DeepSeek-V4 `inference/model.py`, `MoE.forward`.
///
/// # Errors
///
/// As for [`expert_ffn`]; arguments of the shared expert are named so. [`OpError::InvalidValue`] if
/// it is not one matrix of each kind.
///
/// # Example
///
/// The token and the experts of the example of [`expert_ffn`], and a shared expert.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData, Tolerance};
/// use burn_ds4_ops::{moe::{Experts, moe_ffn}, quant::Weights};
///
/// let device = Device::flex();
/// let stack = |values: TensorData| Weights::dense(Tensor::<3>::from_data(values, &device));
/// let gate_up = stack(TensorData::from([[[20.0_f32], [1.0]], [[20.0], [0.5]]]))?;
/// let down = stack(TensorData::from([[[1.0_f32]], [[2.0]]]))?;
/// let shared_gate_up = stack(TensorData::from([[[20.0_f32], [0.1]]]))?;
/// let shared_down = stack(TensorData::from([[[5.0_f32]]]))?;
/// let routed = Experts { gate_up: &gate_up, down: &down, limit: None };
/// let shared = Experts { gate_up: &shared_gate_up, down: &shared_down, limit: None };
/// let ids = Tensor::from_ints([[1, 0]], &device);
/// let weights = Tensor::from_data([[0.25, 0.75]], &device);
/// let output = moe_ffn(Tensor::from_data([[1.0]], &device), ids, weights, routed, shared)?;
/// // silu(20) is 20: 2 · (0.25 · 20 · 0.5) + 1 · (0.75 · 20 · 1) + 5 · (20 · 0.1).
/// let expected = TensorData::from([[30.0_f32]]);
/// output.into_data().assert_approx_eq::<f32>(&expected, Tolerance::default());
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn moe_ffn(
    x: Tensor<2>,
    ids: Tensor<2, Int>,
    weights: Tensor<2>,
    routed: Experts<'_>,
    shared: Experts<'_>,
) -> Result<Tensor<2>, OpError> {
    let packed = routed.packed(&x, ["gate_up", "rows of gate_up", "down", "limit"])?;
    let packed_shared = shared.packed(
        &x,
        [
            "gate_up of the shared expert",
            "rows of gate_up of the shared expert",
            "down of the shared expert",
            "limit of the shared expert",
        ],
    )?;
    let [count, _, _] = shared.gate_up.dims();
    if count != 1 {
        return Err(invalid("number of shared experts", "1", count));
    }
    let [experts, _, _] = routed.gate_up.dims();
    check_routing(&x, &ids, &weights, experts)?;
    let (device, dtype) = (x.device(), x.dtype());
    let ([tokens, d], [_, k]) = (x.dims(), ids.dims());
    if tokens == 0 || d == 0 {
        return Ok(Tensor::zeros([tokens, d], (&device, dtype)));
    }
    let apart = routed.gate_up.activations() != shared.gate_up.activations();
    if apart || k == 0 || routed.is_empty() || shared.is_empty() {
        // Kernels need something of both kinds, for one `x`.
        let Experts { gate_up, down, .. } = routed;
        let own = expert_ffn(x.clone(), ids, weights, gate_up, down, routed.limit)?;
        let to_first = Tensor::zeros([tokens, 1], (&device, DType::I32));
        let once = Tensor::ones([tokens, 1], (&device, DType::F32));
        let Experts { gate_up, down, .. } = shared;
        let all = expert_ffn(x, to_first, once, gate_up, down, shared.limit)?;
        return Ok((own + all).cast(dtype));
    }
    Ok(Tensor::from_dispatch(Dispatch::moe_ffn(
        routed.gate_up.activations().input(x)?.into_dispatch(),
        ids.into_dispatch(),
        weights.into_dispatch(),
        packed,
        packed_shared,
    )))
}

/// Checks the routing: the ids and weights of the experts of each token.
fn check_routing(
    x: &Tensor<2>,
    ids: &Tensor<2, Int>,
    weights: &Tensor<2>,
    experts: usize,
) -> Result<(), OpError> {
    let ([tokens, _], [_, k], device) = (x.dims(), ids.dims(), x.device());
    expect_tensor(("ids", ids), INTEGERS, [tokens, k], ("x", &device))?;
    expect_tensor(("weights", weights), F32, [tokens, k], ("x", &device))?;
    if is_host(&device) {
        check_expert_ids(ids.clone(), experts)?;
    }
    Ok(())
}

/// Reads expert ids back and rejects the first that is not below `experts`; negative ones are
/// padding.
///
/// [`expert_ffn`] does so where it costs nothing. Routers give no such ids.
///
/// # Errors
///
/// [`OpError::InvalidValue`] that names the id, [`OpError::DtypeMismatch`] for a dtype that
/// [`expert_ffn`] does not take.
///
/// # Panics
///
/// If the device fails to return the ids.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_ds4_ops::moe::check_expert_ids;
///
/// let device = Device::flex();
/// let ids = Tensor::<2, Int>::from_data([[3, -1], [7, 0]], &device);
/// assert!(check_expert_ids(ids.clone(), 8).is_ok());
/// let error = check_expert_ids(ids, 4).unwrap_err();
/// assert_eq!(error.to_string(), "`ids` is 7, expected less than 4, the number of experts");
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn check_expert_ids(ids: Tensor<2, Int>, experts: usize) -> Result<(), OpError> {
    let (expected, accepted) = INTEGERS;
    expect_dtype("ids", expected, &ids, accepted)?;
    let unknown = |id: &i64| usize::try_from(*id).is_ok_and(|id| id >= experts);
    match ids.into_data().iter::<i64>().find(unknown) {
        None => Ok(()),
        Some(id) => Err(invalid(
            "ids",
            format!("less than {experts}, the number of experts"),
            id as usize,
        )),
    }
}
