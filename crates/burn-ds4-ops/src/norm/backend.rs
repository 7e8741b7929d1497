use burn::tensor::Shape;

#[cfg(feature = "cube")]
use super::launch;
use super::reference;
use crate::operators::prelude::*;
use crate::optional::OptionalFloat;

operators! {
    /// Extension of Burn's backends by the operators of this family.
    ///
    /// No tensor that reaches them is empty.
    pub trait NormOps: Backend;

    /// See [`rms_norm`](super::rms_norm); `x` is `[rows, columns]`.
    #[fusion(meta = |x, _weight, _epsilon| x.clone())]
    fn rms_norm(
        x: FloatTensor<Self>,
        #[extension_type] weight: OptionalFloat<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        reference::rms_norm::<Self>(x, weight.into_option(), epsilon)
    }
    if launch::can_normalize(&x, weight.as_ref()) =>
        launch::rms_norm(x, weight.into_option(), epsilon);
}

/// Normalises the rows of a tensor of any shape.
pub(crate) fn norm_rows<B: NormOps>(
    x: FloatTensor<B>,
    weight: OptionalFloat<B>,
    epsilon: f64,
) -> FloatTensor<B> {
    let shape = x.shape();
    let width = shape[shape.num_dims() - 1];
    let rows = Shape::new([shape.num_elements() / width, width]);
    B::float_reshape(
        B::rms_norm(B::float_reshape(x, rows), weight, epsilon),
        shape,
    )
}
