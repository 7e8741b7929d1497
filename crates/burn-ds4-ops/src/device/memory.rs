//! The memory of devices.

use burn::tensor::{Device, Tensor};

use super::is_host;
use crate::kinds::Movable;

/// Bytes that a device can give to tensors of the calling thread: those that are free, and those
/// that CubeCL has reserved and does not use. They need not be in one piece. `None` where the
/// device does not tell: CUDA devices do.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_ds4_ops::device::free_memory;
///
/// assert_eq!(free_memory(&Device::flex()), None);
/// # }
/// ```
pub fn free_memory(device: &Device) -> Option<u64> {
    if is_host(device) {
        return None;
    }
    #[cfg(feature = "cube")]
    if let Some(all) = crate::caps::memory_limit() {
        let used = device.memory_pool_usage()?.bytes_in_use;
        return Some(all.saturating_sub(used));
    }
    // Asked first: whoever asks for the pool waits for what was given to the device before.
    let free = free_of_driver(device)?;
    let usage = device.memory_pool_usage()?;
    let unused = usage.bytes_reserved.saturating_sub(usage.bytes_in_use);
    Some(free.saturating_add(unused))
}

#[cfg(feature = "cuda-llvm")]
fn free_of_driver(device: &Device) -> Option<u64> {
    use burn::backend::DispatchDevice;
    use cudarc::driver::result;

    #[allow(irrefutable_let_patterns)]
    let DispatchDevice::Cube(cubecl::Device::Cuda(own)) = device.as_dispatch() else {
        return None;
    };
    let own = result::device::get(own.index as i32).ok()?;
    let before = result::ctx::get_current().ok()?;
    // SAFETY: the device is one of the driver's. Its context, which CubeCL has made, is retained
    // for as long as it is used here, and the thread's own one is put back.
    unsafe {
        let context = result::primary_ctx::retain(own).ok()?;
        let free = result::ctx::set_current(context).and_then(|()| result::mem_get_info());
        let _ = result::ctx::set_current(before.unwrap_or(std::ptr::null_mut()));
        let _ = result::primary_ctx::release(own);
        free.ok().map(|(free, _)| free as u64)
    }
}

#[cfg(not(feature = "cuda-llvm"))]
fn free_of_driver(_device: &Device) -> Option<u64> {
    None
}

/// Whether a device may have so many bytes to allocate. Where its memory is the host's, the host is
/// asked, which grants what it has not got only if it is configured to; of others,
/// [`free_memory`] tells.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_ds4_ops::device::may_allocate;
///
/// assert!(may_allocate(&Device::flex(), 1 << 10));
/// assert!(!may_allocate(&Device::flex(), usize::MAX / 2));
/// # }
/// ```
pub fn may_allocate(device: &Device, bytes: usize) -> bool {
    if !is_host(device) {
        return free_memory(device).is_none_or(|free| bytes as u64 <= free);
    }
    let mut memory: Vec<u8> = Vec::new();
    let granted = memory.try_reserve_exact(bytes).is_ok();
    // An allocation that nothing uses might be optimised away, and granted.
    std::hint::black_box(memory.as_mut_ptr());
    granted
}

/// Checks that the devices of some tensors have given them memory, and have not failed to write
/// them so far. Waits until they have been given what writes them, not until they have done so.
///
/// With Burn's fusion, whose tensors cannot be asked, nothing is checked.
///
/// # Errors
///
/// What the device says.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_ds4_ops::device::check_tensors;
///
/// let tensors = [Tensor::<1>::zeros([4], &Device::flex())];
/// assert_eq!(check_tensors(&tensors), Ok(()));
/// # }
/// ```
pub fn check_tensors<const D: usize, K: Movable>(tensors: &[Tensor<D, K>]) -> Result<(), String> {
    #[cfg(all(feature = "cube", not(feature = "fusion")))]
    {
        let own = tensors.iter().cloned().filter_map(K::into_cube);
        let mut own: Vec<_> = own.collect();
        // Each device knows its own.
        while let Some(last) = own.last() {
            let (client, device) = (last.client.clone(), last.device.clone());
            let (of_device, others) = own.into_iter().partition(|tensor| tensor.device == device);
            let of_device: Vec<_> = of_device;
            let checked = client.check(of_device.iter().map(|tensor| &tensor.handle));
            checked.map_err(|error| error.to_string())?;
            own = others;
        }
    }
    let _ = tensors;
    Ok(())
}

/// The same tensor in memory of its own, so that whoever writes one of the two leaves the other in
/// its place.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_ds4_ops::device::copied;
///
/// let tensor = Tensor::<1>::from_floats([-0.0, 1.0], &Device::flex());
/// let copy = copied(&tensor);
/// copy.into_data().assert_eq(&tensor.into_data(), true);
/// # }
/// ```
pub fn copied<const D: usize, K: Movable>(tensor: &Tensor<D, K>) -> Tensor<D, K> {
    let (shape, like) = (tensor.dims(), (&tensor.device(), tensor.dtype()));
    let copy = Tensor::empty(shape, like);
    copy.slice_assign(shape.map(|size| 0..size), tensor.clone())
}

/// Two devices of a software driver: the default adapter, and the same by its kind.
#[cfg(all(test, feature = "wgpu", not(feature = "fusion")))]
mod tests {
    use burn::tensor::{DeviceKind, DeviceType};

    use super::*;
    use crate::device::DeviceSpec;

    #[test]
    fn tensors_of_several_devices_are_checked_each_by_its_own() {
        let cpu = Device::wgpu(DeviceKind::Cpu);
        let Ok(first) = DeviceSpec::Wgpu.init() else {
            return;
        };
        if !Device::enumerate(DeviceType::Wgpu).contains(&cpu) {
            return;
        }
        let small = [&first, &cpu, &first].map(|device| Tensor::<1>::zeros([3], device));
        assert_eq!(check_tensors(&small), Ok(()));
        // No device has so much memory.
        for device in [&first, &cpu] {
            let never = Tensor::<1>::zeros([1_usize << 42], device);
            let mut all = small.to_vec();
            all.insert(1, never);
            assert!(check_tensors(&all).is_err());
        }
    }
}
