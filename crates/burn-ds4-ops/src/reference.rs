//! What the references of several families share.

use burn::backend::{Backend, get_or_init_device_settings};
use burn::tensor::BoolDType;

/// Of the masks that a device's comparisons give.
pub(crate) fn bool_dtype<B: Backend>(device: &B::Device) -> BoolDType {
    get_or_init_device_settings::<B>(device).bool_dtype
}
