use burn::backend::tensor::FloatTensor;
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

use super::reference;
use crate::optional::OptionalFloat;

/// Extension of Burn's backends by the operator of this family. The default body is the reference.
///
/// No tensor that reaches it is empty.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait NormOps: Backend {
    /// See [`rms_norm`](super::rms_norm); `x` is `[rows, columns]`.
    #[fusion(meta = |x, _weight, _epsilon| x.clone())]
    fn rms_norm(
        x: FloatTensor<Self>,
        #[extension_type] weight: OptionalFloat<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        reference::rms_norm::<Self>(x, weight.into_option(), epsilon)
    }
}

#[cfg(feature = "flex")]
impl NormOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl NormOps for burn_cubecl::CubeBackend {
    fn rms_norm(
        x: FloatTensor<Self>,
        weight: OptionalFloat<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let weight = weight.into_option();
        if super::launch::can_normalize(&x, weight.as_ref()) {
            super::launch::rms_norm(x, weight, epsilon)
        } else {
            reference::rms_norm::<Self>(x, weight, epsilon)
        }
    }
}
