//! The norm in plain tensor operations. Generic over the backend, as it is the default body of the
//! operator's backend trait.

use crate::reference::prelude::*;

pub(super) fn rms_norm<B: Backend>(
    x: FloatTensor<B>,
    weight: Option<FloatTensor<B>>,
    epsilon: f64,
) -> FloatTensor<B> {
    let (shape, dtype) = (x.shape(), x.dtype());
    let x = as_f32::<B>(x);
    let mean = B::float_mean_dim(B::float_mul(x.clone(), x.clone()), 1);
    let rms = B::float_sqrt(B::float_add_scalar(mean, epsilon.into()));
    let mut normalized = B::float_div(x, B::float_expand(rms, shape.clone()));
    if let Some(weight) = weight {
        let weight = as_f32::<B>(weight);
        let weight = reshape::<B>(weight, [1, shape[1]]);
        normalized = B::float_mul(normalized, B::float_expand(weight, shape));
    }
    B::float_cast(normalized, dtype.into())
}
