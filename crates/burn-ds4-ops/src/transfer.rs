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
//!
//! Where what wrote a tensor has failed, CubeCL would not send it, and the receiver would wait for
//! it for ever. So it is not sent: what is returned in its place is as lost as the tensor, and
//! whoever reads it is told. With Burn's fusion, whose tensors cannot be asked, it is sent.

use burn::tensor::{Device, Tensor};
#[cfg(all(feature = "cube", not(feature = "fusion")))]
use burn_cubecl::tensor::CubeTensor;

#[cfg(feature = "cube")]
use crate::kinds::client;

pub use crate::kinds::Movable;

/// Moves a tensor to another device. The host waits until the receiver has done what it was given
/// before.
///
/// A tensor that is there already is returned as it is.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ds4_ops::device::DeviceSpec;
/// use burn_ds4_ops::transfer::transfer;
///
/// let device = Device::flex();
/// // Another device, if there is one.
/// let other = DeviceSpec::Cuda(0).init().unwrap_or(device.clone());
/// let x = Tensor::<1>::from_data([1.0, 2.0], &device);
/// let moved = transfer(x, &other);
/// assert_eq!(moved.device(), other);
/// moved.into_data().assert_eq(&TensorData::from([1.0_f32, 2.0]), true);
/// # }
/// ```
pub fn transfer<const D: usize, K: Movable>(tensor: Tensor<D, K>, to: &Device) -> Tensor<D, K> {
    if Route::between(&tensor.device(), to) == Route::Direct {
        // What has failed is told by whoever reads it.
        let _ = to.sync();
    }
    // SAFETY: the receiver has done what it was given, or the host takes part in the copy.
    unsafe { transfer_in_turn(tensor, to) }
}

/// Moves a tensor like [`transfer`], but the host does not wait where the devices copy by
/// themselves.
///
/// # Safety
///
/// The receiver must have done all of its work by the time that the tensor has been computed, as
/// one has that waits for the sender after each of its own steps. The copy may be in memory that
/// earlier work of the receiver, which is not done yet, still uses.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor, TensorData};
/// use burn_ds4_ops::device::DeviceSpec;
/// use burn_ds4_ops::transfer::transfer_in_turn;
///
/// let device = Device::flex();
/// // Another device, if there is one.
/// let other = DeviceSpec::Cuda(0).init().unwrap_or(device.clone());
/// let ids = Tensor::<1, Int>::from_ints([7, 8], &device);
/// // SAFETY: the other device has nothing to do yet.
/// let moved = unsafe { transfer_in_turn(ids, &other) };
/// assert_eq!(moved.device(), other);
/// assert_eq!(moved.into_data().iter::<i32>().collect::<Vec<_>>(), [7, 8]);
/// # }
/// ```
pub unsafe fn transfer_in_turn<const D: usize, K: Movable>(
    tensor: Tensor<D, K>,
    to: &Device,
) -> Tensor<D, K> {
    let from = tensor.device();
    if from == *to {
        return tensor;
    }
    #[cfg(all(feature = "cube", not(feature = "fusion")))]
    if let Some(lost) = lost(&tensor, to) {
        return lost;
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
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use burn_ds4_ops::device::DeviceSpec;
    /// use burn_ds4_ops::transfer::Route;
    ///
    /// let device = Device::flex();
    /// assert_eq!(Route::between(&device, &device), Route::Same);
    /// if let Ok(other) = DeviceSpec::Wgpu.init() {
    ///     assert_eq!(Route::between(&device, &other), Route::Host);
    /// }
    /// # }
    /// ```
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

/// A tensor of `to` that nothing writes, if what wrote this one has failed.
#[cfg(all(feature = "cube", not(feature = "fusion")))]
fn lost<const D: usize, K: Movable>(tensor: &Tensor<D, K>, to: &Device) -> Option<Tensor<D, K>> {
    use burn::backend::{DispatchDevice, StreamId};

    #[allow(irrefutable_let_patterns)]
    let DispatchDevice::Cube(to) = to.as_dispatch() else {
        return None;
    };
    let own = K::into_cube(tensor.clone())?;
    let error = own.client.check([&own.handle]).err()?;
    log::warn!("a tensor is not moved to {to:?}, since what wrote it has failed: {error}");
    let client = to.client();
    let bytes = (tensor.shape().num_elements() * own.dtype.size()) as u64;
    let handle = cubecl::server::Handle::new(client.service_id(), StreamId::current(), bytes);
    let lost = CubeTensor::new_contiguous(client, to.clone(), tensor.shape(), handle, own.dtype);
    Some(K::from_cube(lost))
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
            // SAFETY: Flex has done what it was given.
            let back = unsafe { transfer_in_turn(there, &flex) };
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

    /// Two devices of a software driver: the default adapter, and the same by its kind.
    #[cfg(all(feature = "wgpu", not(feature = "fusion")))]
    #[test]
    fn what_was_never_written_is_lost_on_the_other_device_too() {
        use burn::tensor::{DeviceKind, DeviceType};

        let cpu = Device::wgpu(DeviceKind::Cpu);
        let first = DeviceSpec::Wgpu.init();
        let Some(first) = first
            .ok()
            .filter(|_| Device::enumerate(DeviceType::Wgpu).contains(&cpu))
        else {
            return;
        };
        // No device has so much memory.
        let never = Tensor::<1>::zeros([1_usize << 42], &first);
        let ints = Tensor::<1, Int>::zeros([1_usize << 42], &first);
        // SAFETY: the host takes part in copies between these devices.
        let in_turn = unsafe { transfer_in_turn(never.clone(), &cpu) };
        for moved in [
            transfer(never, &cpu),
            in_turn * 2,
            transfer(ints, &cpu).float(),
        ] {
            assert_eq!(moved.device(), cpu);
            let row: Result<Vec<f32>, _> = moved.slice([0..4]).try_into_vec_as();
            assert!(row.is_err(), "{row:?}");
        }
    }
}
