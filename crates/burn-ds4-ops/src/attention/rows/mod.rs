//! What is done to rows by themselves: rotary embedding and pooling.

mod backend;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Device, Int, Tensor};

use super::validation::{expect_known, expect_rotated};
use crate::OpError;
use crate::validation::{Accepted, F32, INTEGERS, expect_float, expect_tensor};
pub(super) use backend::RowOps;
pub(super) use reference::rotation;

/// Positions of new tokens. Those of a sequence are consecutive.
#[derive(Clone, Debug)]
pub struct Positions {
    /// The angles of all positions, as [`rotate_at`] takes them: f32 `[positions,
    /// rotated]`.
    pub angles: Tensor<2>,
    /// The position of the first new token of each sequence: `[batch]`, i32, i64 or u32.
    pub start: Tensor<1, Int>,
}

impl Positions {
    pub(super) fn check(
        &self,
        batch: usize,
        count: usize,
        width: usize,
        like: (&'static str, &Device),
    ) -> Result<(), OpError> {
        self.check_tensors(batch, width, like)?;
        if batch == 0 || count == 0 {
            return Ok(());
        }
        expect_known(&self.start, count, self.angles.dims()[0])
    }

    fn check_tensors(
        &self,
        batch: usize,
        width: usize,
        like: (&'static str, &Device),
    ) -> Result<(), OpError> {
        let [known, rotated] = self.angles.dims();
        expect_tensor(("angles", &self.angles), F32, [known, rotated], like)?;
        expect_rotated(rotated, width)?;
        expect_tensor(("start", &self.start), INTEGERS, [batch], like)
    }
}

/// Rotates the trailing channels of `x` by per-position angles, in interleaved pairs `(2i, 2i +
/// 1)`.
///
/// # Shapes and dtypes
///
/// - `x`: `[batch, positions, heads, width]`, f32 / f16 / bf16
/// - `cos`, `sin`: `[batch, positions, rotated]`, f32, the value of pair `i` at channels `2i` and
///   `2i + 1`, with `sin` negated at `2i`
/// - output: like `x`, its first `width - rotated` channels unchanged
///
/// Rotation by the opposite angle is the same call with `-sin`.
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit, or `rotated` is odd or larger than
/// `width`.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::attention::rotate;
///
/// let device = Device::flex();
/// let x = Tensor::<4>::from_data([[[[1.0, 2.0, 3.0, 4.0]]]], &device);
/// // The last pair by 90 degrees.
/// let cos = Tensor::<3>::from_data([[[0.0, 0.0]]], &device);
/// let sin = Tensor::<3>::from_data([[[-1.0, 1.0]]], &device);
/// let y = rotate(x, cos, sin)?;
/// y.into_data().assert_eq(&TensorData::from([[[[1.0_f32, 2.0, -4.0, 3.0]]]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
#[doc(alias = "rope")]
pub fn rotate(x: Tensor<4>, cos: Tensor<3>, sin: Tensor<3>) -> Result<Tensor<4>, OpError> {
    expect_float("x", &x)?;
    let [batch, positions, _, width] = x.dims();
    let [_, _, rotated] = cos.dims();
    expect_rotated(rotated, width)?;
    for (argument, angles) in [("cos", &cos), ("sin", &sin)] {
        let shape = [batch, positions, rotated];
        expect_tensor((argument, angles), F32, shape, ("x", &x.device()))?;
    }
    if rotated == 0 || x.dims().contains(&0) {
        return Ok(x);
    }
    Ok(Tensor::from_dispatch(Dispatch::rotate(
        x.into_dispatch(),
        cos.into_dispatch(),
        sin.into_dispatch(),
    )))
}

/// [`rotate`] by the angles of consecutive positions, which it looks up in a table on the device of
/// `x`.
///
/// # Shapes and dtypes
///
/// - `x`: `[batch, count, heads, width]`, f32 / f16 / bf16
/// - `angles`: `[positions, rotated]`, f32: for each position the cosines of its `rotated / 2`
///   pairs, then their sines
/// - `start`: the position of the first row of each sequence, `[batch]`, i32, i64 or u32; row `i`
///   is at position `start + i`
/// - `inverse`: whether pairs are rotated by the opposite angle
/// - output: like `x`, its first `width - rotated` channels unchanged
///
/// A negative start counts as 0; such a sequence is vacant. A position beyond the table is an error
/// where the device's memory is the host's; elsewhere, where checking would mean to read it back,
/// it has the angles of the table's last position.
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit, `rotated` is odd or larger than
/// `width`, the table has no positions and, where the device's memory is the host's, for a position
/// beyond it.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor, TensorData};
/// use burn_ds4_ops::attention::rotate_at;
///
/// let device = Device::flex();
/// // One pair. Nothing at position 0, a quarter turn at position 1: cosine, sine.
/// let angles = Tensor::<2>::from_data([[1.0, 0.0], [0.0, 1.0]], &device);
/// let x = Tensor::<4>::from_data([[[[9.0, 2.0, 3.0]]]], &device);
/// let start = Tensor::<1, Int>::from_data([1], &device);
/// let rotated = rotate_at(x, angles, start, false)?;
/// rotated.into_data().assert_eq(&TensorData::from([[[[9.0_f32, -3.0, 2.0]]]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn rotate_at(
    x: Tensor<4>,
    angles: Tensor<2>,
    start: Tensor<1, Int>,
    inverse: bool,
) -> Result<Tensor<4>, OpError> {
    expect_float("x", &x)?;
    let [batch, count, _, width] = x.dims();
    let [known, rotated] = angles.dims();
    let positions = Positions { angles, start };
    positions.check_tensors(batch, width, ("x", &x.device()))?;
    let Positions { angles, start } = positions;
    if rotated == 0 || x.dims().contains(&0) {
        return Ok(x);
    }
    expect_known(&start, count, known)?;
    Ok(Tensor::from_dispatch(Dispatch::rotate_at(
        x.into_dispatch(),
        angles.into_dispatch(),
        start.into_dispatch(),
        inverse,
    )))
}

/// Pools the slots of each block: `Σ_slot softmax_slot(scores) ⊙ values`, separately for every
/// channel.
///
/// # Shapes and dtypes
///
/// - `values`, `scores`: `[batch, blocks, slots, width]`, f32 / f16 / bf16, both the same; the
///   arithmetic is f32
/// - output: `[batch, blocks, width]`, the same dtype; zeros where there are no slots
///
/// # Errors
///
/// [`OpError`] where a dtype, a shape or a device does not fit.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::attention::pool;
///
/// let device = Device::flex();
/// // One block of two slots, whose scores are alike, and two channels.
/// let values = Tensor::<4>::from_data([[[[1.0, 10.0], [3.0, 30.0]]]], &device);
/// let pooled = pool(values.clone(), values.zeros_like())?;
/// pooled.into_data().assert_eq(&TensorData::from([[[2.0_f32, 20.0]]]), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn pool(values: Tensor<4>, scores: Tensor<4>) -> Result<Tensor<3>, OpError> {
    expect_float("values", &values)?;
    let dtype: Accepted = ("that of `values`", &[values.dtype()]);
    let like = ("values", &values.device());
    expect_tensor(("scores", &scores), dtype, values.dims(), like)?;
    let [batch, blocks, slots, width] = values.dims();
    let shape = [batch, blocks, width];
    if slots == 0 || shape.contains(&0) {
        return Ok(Tensor::zeros(shape, (&values.device(), values.dtype())));
    }
    Ok(Tensor::from_dispatch(Dispatch::pool(
        values.into_dispatch(),
        scores.into_dispatch(),
    )))
}
