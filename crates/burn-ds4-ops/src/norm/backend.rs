#[cfg(feature = "cube")]
use super::launch;
use super::reference;
use crate::operators::operators;
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
