//! Reading a few numbers of a device back while it goes on working.

use std::fmt;

use burn::backend::ExecutionError;
use burn::tensor::{Int, Tensor};

/// Numbers on their way from a device.
///
/// They are those that the tensors held when the read [began](Self::begin), whatever is written to them since: the copy is in line with
/// the device's work. So the host can enqueue more work first, and [wait](Self::wait) afterwards, while the device does it.
///
/// Where a device has no such copy (Flex, `cpu`, and any with the feature `fusion`), the numbers are read at once. Dropping a read
/// waits for it: until then, the device writes to the host's memory.
///
/// # Example
///
/// ```
/// use burn::backend::ExecutionError;
/// use burn::tensor::{Int, Tensor};
/// use burn_ds4_ops::device::DeviceSpec;
/// use burn_ds4_ops::readback::Readback;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = DeviceSpec::Flex.init()?;
/// let ids = Tensor::<1, Int>::from_ints([7, 8], &device);
/// let read = Readback::begin([ids.clone()]);
/// let next = ids + 1; // more work for the device
/// assert_eq!(read.wait()?, [7, 8]);
/// # drop(next);
/// # Ok(())
/// # }
/// ```
#[must_use = "waiting for it is the point of a read"]
pub struct Readback(Option<Reading>);

enum Reading {
    Read(Result<Vec<i32>, ExecutionError>),
    #[cfg(all(feature = "cube", not(feature = "fusion")))]
    Copied(in_line::Copies),
}

impl Readback {
    /// Begins to read tensors. Those of several devices are read at once.
    pub fn begin<const N: usize>(numbers: [Tensor<1, Int>; N]) -> Self {
        Self(Some(Reading::begin(numbers)))
    }

    /// The numbers of all tensors, in their order, each of which is to fit an `i32`.
    ///
    /// # Errors
    ///
    /// If work that the numbers depend on has failed, or the copy.
    pub fn wait(mut self) -> Result<Vec<i32>, ExecutionError> {
        self.0.take().map_or(Ok(Vec::new()), Reading::wait)
    }
}

impl Drop for Readback {
    fn drop(&mut self) {
        // Nobody wants to know what came of it.
        let _ = self.0.take().map(Reading::wait);
    }
}

impl fmt::Debug for Readback {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Readback").finish_non_exhaustive()
    }
}

impl Reading {
    fn begin<const N: usize>(numbers: [Tensor<1, Int>; N]) -> Self {
        #[cfg(all(feature = "cube", not(feature = "fusion")))]
        if let Some(copies) = in_line::begin(&numbers) {
            return Self::Copied(copies);
        }
        Self::Read(read(numbers))
    }

    fn wait(self) -> Result<Vec<i32>, ExecutionError> {
        match self {
            Self::Read(numbers) => numbers,
            #[cfg(all(feature = "cube", not(feature = "fusion")))]
            Self::Copied(copies) => copies.wait(),
        }
    }
}

fn read<const N: usize>(numbers: [Tensor<1, Int>; N]) -> Result<Vec<i32>, ExecutionError> {
    let mut read = Vec::new();
    for tensor in numbers {
        read.extend(tensor.try_into_data()?.iter::<i32>());
    }
    Ok(read)
}

/// Copies that CubeCL enqueues when they are asked for, which Burn's own reads do not: those copy when their bytes are first looked at.
#[cfg(all(feature = "cube", not(feature = "fusion")))]
mod in_line {
    use std::collections::HashMap;
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::{LazyLock, Mutex, PoisonError};

    use burn::backend::ExecutionError;
    use burn::tensor::{DType, Int, Shape, Tensor, TensorData};
    use burn_cubecl::kernel::into_contiguous_aligned;
    use burn_cubecl::tensor::CubeTensor;
    use burn_cubecl::{CubeBackend, CubeDevice};
    use cubecl::bytes::Bytes;
    use cubecl::client::Client;
    use cubecl::future::block_on;
    use cubecl::server::{CopyDescriptor, ServerError};

    type Arrival = Pin<Box<dyn Future<Output = Result<Vec<Bytes>, ServerError>> + Send>>;

    pub(super) struct Copies {
        arrival: Arrival,
        layouts: Vec<(Shape, DType)>,
    }

    /// `None` where there are no such copies.
    pub(super) fn begin<const N: usize>(numbers: &[Tensor<1, Int>; N]) -> Option<Copies> {
        let (mut client, mut device) = (None, None);
        let mut layouts = Vec::with_capacity(N);
        let mut descriptors = Vec::with_capacity(N);
        for tensor in numbers {
            let tensor: CubeTensor = tensor.clone().try_into_primitive::<CubeBackend>().ok()?;
            // What is read from it is its own memory, which later work writes to.
            if matches!(tensor.device, CubeDevice::Cpu(_)) {
                return None;
            }
            let tensor = into_contiguous_aligned(tensor);
            if device
                .replace(tensor.device.clone())
                .is_some_and(|other| other != tensor.device)
            {
                return None;
            }
            client = Some(lasting(&tensor));
            let (shape, strides) = (tensor.meta.shape().clone(), tensor.meta.strides().clone());
            let size = tensor.dtype.size();
            layouts.push((shape.clone(), tensor.dtype));
            let binding = tensor.handle.binding();
            descriptors.push(CopyDescriptor::new(binding, shape, strides, size));
        }
        let arrival = Box::pin(client?.read_tensor_async(descriptors));
        Some(Copies { arrival, layouts })
    }

    impl Copies {
        pub(super) fn wait(self) -> Result<Vec<i32>, ExecutionError> {
            let read = block_on(self.arrival).map_err(|error| {
                let reason = error.to_string();
                match error.is_device_poisoned() {
                    true => ExecutionError::device_poisoned(reason),
                    false => ExecutionError::with_context(reason),
                }
            })?;
            let mut numbers = Vec::new();
            for (bytes, (shape, dtype)) in read.into_iter().zip(self.layouts) {
                numbers.extend(TensorData::from_bytes(bytes, shape, dtype).iter::<i32>());
            }
            Ok(numbers)
        }
    }

    /// The client of the device, for good: a read may borrow it for as long as it is on its way.
    fn lasting(tensor: &CubeTensor) -> &'static Client {
        static CLIENTS: LazyLock<Mutex<HashMap<CubeDevice, &'static Client>>> =
            LazyLock::new(Mutex::default);
        let mut clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
        let client = clients.entry(tensor.device.clone());
        client.or_insert_with(|| Box::leak(Box::new(tensor.device.client())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceSpec;

    #[test]
    fn only_devices_without_copies_in_line_are_read_at_once() {
        for spec in [DeviceSpec::Flex, DeviceSpec::Wgpu, DeviceSpec::Cuda(0)] {
            let Ok(device) = spec.init() else {
                continue;
            };
            let read = Readback::begin([Tensor::from_ints([3], &device)]);
            let at_once = matches!(read.0, Some(Reading::Read(_)));
            let expected = spec == DeviceSpec::Flex || cfg!(feature = "fusion");
            assert_eq!(at_once, expected, "{spec}");
            assert_eq!(read.wait().unwrap(), [3], "{spec}");
        }
    }
}
