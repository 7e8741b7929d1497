use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

use super::reference;
#[cfg(feature = "cube")]
use crate::attention::launch;

/// Extends Burn's backends by what is done to rows. The default bodies are the reference.
///
/// No tensor that is passed to them is empty.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait RowOps: Backend {
    /// See [`rotate`](super::rotate).
    #[fusion(meta = |x, _cos, _sin| fusion::like(x))]
    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::rotate::<Self>(x, cos, sin)
    }

    /// See [`rotate_at`](super::rotate_at).
    #[fusion(meta = |x, _angles, _start, _inverse| fusion::like(x))]
    fn rotate_at(
        x: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        start: IntTensor<Self>,
        inverse: bool,
    ) -> FloatTensor<Self> {
        reference::rotate_at::<Self>(x, angles, start, inverse)
    }

    /// See [`pool`](super::pool).
    #[fusion(meta = |values, _scores| fusion::pooled(values))]
    fn pool(values: FloatTensor<Self>, scores: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::pool::<Self>(values, scores)
    }
}

#[cfg(feature = "flex")]
impl RowOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl RowOps for burn_cubecl::CubeBackend {
    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        if launch::can_rotate(&x, &cos) {
            launch::rotate(x, cos, sin)
        } else {
            reference::rotate::<Self>(x, cos, sin)
        }
    }

    fn rotate_at(
        x: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        start: IntTensor<Self>,
        inverse: bool,
    ) -> FloatTensor<Self> {
        if launch::can_rotate_at(&x, &angles, &start) {
            launch::rotate_at(x, angles, start, inverse)
        } else {
            reference::rotate_at::<Self>(x, angles, start, inverse)
        }
    }

    fn pool(values: FloatTensor<Self>, scores: FloatTensor<Self>) -> FloatTensor<Self> {
        launch::pool(values, scores)
    }
}

/// The shapes and dtypes of outputs, which fusion needs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;

    pub(super) fn like(x: &TensorSpec) -> TensorSpec {
        TensorSpec::new(x.shape.clone(), x.dtype)
    }

    pub(super) fn pooled(values: &TensorSpec) -> TensorSpec {
        let shape = [values.shape[0], values.shape[1], values.shape[3]];
        TensorSpec::new(shape.into(), values.dtype)
    }
}
