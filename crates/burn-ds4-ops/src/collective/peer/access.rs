//! Access to the memory of other CUDA devices, which CubeCL does not offer.

use std::any::Any;

use burn::backend::DispatchDevice;
use burn::tensor::Device;
use cubecl::Device as CubeDevice;
use cubecl::client::Client;
use cubecl::config::memory::CudaAllocator;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::cuda::CudaRuntime;
use cubecl::server::{Handle, ServerError};
use cudarc::driver::{result, sys};

use crate::caps::Caps;

type CudaServer = <CudaRuntime as cubecl::__private::Runtime>::Server;

/// Lets each of some devices access the memory of all others.
pub(in crate::collective) fn enable(devices: &[Device]) -> Result<(), String> {
    let mut indices: Vec<usize> = Vec::new();
    for device in devices {
        let DispatchDevice::Cube(own @ CubeDevice::Cuda(cuda)) = device.as_dispatch() else {
            return Err(format!("{device:?} is no CUDA device"));
        };
        if indices.contains(&cuda.index) {
            return Err(format!("{device:?} comes twice"));
        }
        indices.push(cuda.index);
        // CubeCL makes the context.
        if !Caps::of(&own.client()).target.ptx {
            return Err("the kernels of this build contain no PTX".to_owned());
        }
    }
    if CubeClRuntimeConfig::get().memory.cuda.allocator == CudaAllocator::Async {
        return Err("CubeCL allocates memory that peers cannot access".to_owned());
    }
    let before = result::ctx::get_current().ok().flatten();
    let enabled = enable_indices(&indices);
    if let Some(before) = before {
        // SAFETY: it was the thread's context.
        let _ = unsafe { result::ctx::set_current(before) };
    }
    enabled
}

fn enable_indices(indices: &[usize]) -> Result<(), String> {
    let failed = |error: result::DriverError| error.to_string();
    let mut contexts = Vec::new();
    for index in indices {
        let device = result::device::get(*index as i32).map_err(failed)?;
        // SAFETY: the device is one of the driver's. The context is retained for good, as peer
        // access is used until the process ends.
        let context = unsafe { result::primary_ctx::retain(device) };
        contexts.push((index, device, context.map_err(failed)?));
    }
    for (index, device, context) in &contexts {
        for (other, peer, peer_context) in &contexts {
            if index == other {
                continue;
            }
            let mut can = 0;
            // SAFETY: both are devices of the driver, and the result is a place of its own.
            let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, *device, *peer) };
            asked.result().map_err(failed)?;
            if can == 0 {
                return Err(format!(
                    "cuda:{index} cannot access the memory of cuda:{other}"
                ));
            }
            // SAFETY: the contexts are retained.
            let status = unsafe {
                result::ctx::set_current(*context).map_err(failed)?;
                sys::cuCtxEnablePeerAccess(*peer_context, 0)
            };
            if status != sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
                status.result().map_err(failed)?;
            }
        }
    }
    Ok(())
}

/// Where a buffer is in the memory of its device, and what keeps it there.
pub(super) fn in_place(
    client: &Client,
    buffer: &Handle,
) -> Result<(u64, Box<dyn Any>), ServerError> {
    let resource = client.get_resource::<CudaServer>(buffer.clone())?;
    Ok((resource.resource().ptr, Box::new(resource)))
}
