//! Kinds of tensors, and what CubeCL has of tensors and devices.

#[cfg(all(feature = "cube", not(feature = "fusion")))]
use burn::tensor::Tensor;
use burn::tensor::kind::Basic;
use burn::tensor::{Float, Int};
#[cfg(all(feature = "cube", not(feature = "fusion")))]
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

/// Kinds of tensors that can be moved: [`Float`] and [`Int`].
pub trait Movable: Basic + private::OfCube {}

mod private {
    use super::*;

    /// Kinds of tensors of devices that CubeCL has.
    pub trait OfCube: Basic + Sized {
        /// `None` for a tensor of another device.
        #[cfg(all(feature = "cube", not(feature = "fusion")))]
        fn into_cube<const D: usize>(tensor: Tensor<D, Self>) -> Option<CubeTensor>;

        #[cfg(all(feature = "cube", not(feature = "fusion")))]
        fn from_cube<const D: usize>(tensor: CubeTensor) -> Tensor<D, Self>;
    }

    macro_rules! of_cube {
        ($kind:ty) => {
            impl Movable for $kind {}

            impl OfCube for $kind {
                #[cfg(all(feature = "cube", not(feature = "fusion")))]
                fn into_cube<const D: usize>(tensor: Tensor<D, Self>) -> Option<CubeTensor> {
                    tensor.try_into_primitive::<CubeBackend>().ok()
                }

                #[cfg(all(feature = "cube", not(feature = "fusion")))]
                fn from_cube<const D: usize>(tensor: CubeTensor) -> Tensor<D, Self> {
                    Tensor::from_primitive::<CubeBackend>(tensor)
                }
            }
        };
    }

    of_cube!(Float);
    of_cube!(Int);
}

/// The client of a device, unless it is Flex.
#[cfg(feature = "cube")]
pub(crate) fn client(device: &burn::tensor::Device) -> Option<cubecl::client::Client> {
    use burn::backend::DispatchDevice;
    #[allow(unreachable_patterns)]
    match device.as_dispatch() {
        DispatchDevice::Cube(device) => Some(device.client()),
        _ => None,
    }
}
