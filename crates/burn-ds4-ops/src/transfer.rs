//! Moves tensors from one device to another, in the order of what both have to do.
//!
//! CUDA devices with NCCL copy on a stream of its own beside the kernels. CubeCL lets the kernels
//! of the receiver wait for the copy, and the copy for the kernels of the sender. Two things are
//! left to whoever moves a tensor. The sender may give the memory of the tensor to later work,
//! which must not write to it before it is sent. And the receiver may take memory for the copy that
//! earlier work, which is not done yet, still uses. [`transfer`] takes care of both,
//! [`transfer_in_turn`] of the first.
//!
//! All other devices copy through the memory of the host, which waits for it.

use burn::tensor::kind::Basic;
use burn::tensor::{Device, Tensor};

/// Moves a tensor to another device. The host waits until the receiver has done what it was given
/// before.
///
/// A tensor that is there already is returned as it is.
pub fn transfer<const D: usize, K: Basic>(tensor: Tensor<D, K>, to: &Device) -> Tensor<D, K> {
    if Route::between(&tensor.device(), to) == Route::Direct {
        // What has failed is told by whoever reads it.
        let _ = to.sync();
    }
    transfer_in_turn(tensor, to)
}

/// Moves a tensor like [`transfer`], but the host does not wait where the devices copy by
/// themselves.
///
/// Only for a receiver that has done all of its work by the time that the tensor has been computed,
/// such as one that has to wait for the sender after each of its own steps. Otherwise the copy may
/// overwrite what earlier work of the receiver still uses.
pub fn transfer_in_turn<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    to: &Device,
) -> Tensor<D, K> {
    let from = tensor.device();
    if from == *to {
        return tensor;
    }
    let moved = tensor.to_device(to);
    wait_for_copies(&from);
    moved
}

/// How copies go from one device to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// The devices are one: nothing is copied.
    Same,
    /// From device to device.
    Direct,
    /// Through the memory of the host, as always between such devices.
    Host,
    /// Through the memory of the host, since CubeCL has not found NCCL, whose library it looks for
    /// as `libnccl.so` alone.
    HostWithoutNccl,
}

impl Route {
    /// The way of copies from one device to the other.
    pub fn between(from: &Device, to: &Device) -> Self {
        if from == to {
            return Self::Same;
        }
        #[cfg(feature = "cube")]
        if let (Some(from), Some(to)) = (client(from), client(to))
            && from.name() == to.name()
        {
            return match (from.has_device_transport(), from.name() == "cuda") {
                (true, _) => Self::Direct,
                (false, true) => Self::HostWithoutNccl,
                (false, false) => Self::Host,
            };
        }
        Self::Host
    }
}

/// Lets the device's later work begin after what it is sending. The host does not wait.
fn wait_for_copies(device: &Device) {
    #[cfg(feature = "cube")]
    if let Some(client) = client(device) {
        client.sync_collective();
    }
    if cfg!(feature = "fusion") {
        // Fusion has a queue of its own, so nobody knows what was enqueued before.
        let _ = device.sync();
    }
}

/// The client of a device, unless it is Flex.
#[cfg(feature = "cube")]
pub(crate) fn client(device: &Device) -> Option<cubecl::client::Client> {
    use burn::backend::DispatchDevice;
    #[allow(unreachable_patterns)]
    match device.as_dispatch() {
        DispatchDevice::Cube(device) => Some(device.client()),
        _ => None,
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::Int;

    use super::*;
    use crate::device::DeviceSpec;

    #[test]
    fn floats_and_integers_arrive_on_every_device_and_come_back() {
        for spec in [DeviceSpec::Flex, DeviceSpec::Wgpu, DeviceSpec::Cuda(0)] {
            let Ok(device) = spec.init() else {
                continue;
            };
            let flex = Device::flex();
            let floats = Tensor::<2>::from_floats([[1.5, -2.0], [0.25, 7.0]], &flex);
            let there = transfer(floats.clone(), &device);
            assert_eq!(there.device(), device, "{spec}");
            let back = transfer_in_turn(there, &flex);
            assert_eq!(back.into_data(), floats.into_data(), "{spec}");
            let ints = Tensor::<1, Int>::from_ints([3, -1], &flex);
            let back = transfer(transfer(ints, &device), &flex);
            let back: Vec<i64> = back.into_data().iter().collect();
            assert_eq!(back, [3, -1], "{spec}");
            let route = match spec {
                DeviceSpec::Flex => Route::Same,
                _ => Route::Host,
            };
            assert_eq!(Route::between(&flex, &device), route, "{spec}");
        }
    }
}
