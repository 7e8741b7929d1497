use super::reference;
#[cfg(feature = "cube")]
use crate::attention::launch;
use crate::operators::prelude::*;

operators! {
    /// Extends Burn's backends by what is done to rows.
    ///
    /// No tensor that is passed to them is empty.
    pub trait RowOps: Backend;

    /// See [`rotate`](super::rotate).
    #[fusion(meta = |x, _cos, _sin| like(x))]
    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::rotate::<Self>(x, cos, sin)
    }
    if launch::can_rotate(&x, &cos) => launch::rotate(x, launch::Angles::given(cos, sin), false);

    /// See [`rotate_at`](super::rotate_at).
    #[fusion(meta = |x, _angles, _start, _inverse| like(x))]
    fn rotate_at(
        x: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        start: IntTensor<Self>,
        inverse: bool,
    ) -> FloatTensor<Self> {
        reference::rotate_at::<Self>(x, angles, start, inverse)
    }
    if launch::can_rotate_at(&x, &angles, &start) =>
        launch::rotate(x, launch::Angles::at(angles, start), inverse);

    /// See [`pool`](super::pool).
    #[fusion(meta = |values, _scores| {
        spec([values.shape[0], values.shape[1], values.shape[3]], values.dtype)
    })]
    fn pool(values: FloatTensor<Self>, scores: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::pool::<Self>(values, scores)
    }

    cube {
        fn pool(values: FloatTensor<Self>, scores: FloatTensor<Self>) -> FloatTensor<Self> {
            launch::pool(values, scores)
        }
    }
}
