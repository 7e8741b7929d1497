//! Reads a few numbers from a device without making it wait.

use std::fmt;

use burn::backend::ExecutionError;
use burn::tensor::{Int, Tensor, TensorData};

/// Numbers on their way from a device.
///
/// They are those that the tensors held when the read [began](Self::begin), whatever is written to
/// them since: the copy runs in the order of the device's work. So the host can enqueue more work
/// first and [wait](Self::wait) afterwards, while the device does it.
///
/// Where a device has no such copy (Flex, `cpu`, and any with the feature `fusion`), the numbers
/// are read at once. Dropping a read waits for it: until then, the device writes to the host's
/// memory.
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
pub struct Readback(Option<PendingRead>);

/// What a [`Readback`] has read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReadNumbers {
    /// Those of the integer tensors, one after the other.
    pub ints: Vec<i32>,
    /// Those of the float tensors, one after the other.
    pub floats: Vec<f32>,
}

enum PendingRead {
    Done(Result<ReadNumbers, ExecutionError>),
    #[cfg(all(feature = "cube", not(feature = "fusion")))]
    Copied(stream_copies::Copies),
}

impl Readback {
    /// Begins to read integers. If the tensors are on several devices, they are read at once.
    pub fn begin<const N: usize>(ints: [Tensor<1, Int>; N]) -> Self {
        Self::begin_both(&ints, &[])
    }

    /// Begins to read integers and floats together. If the tensors are on several devices, they are
    /// read at once.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_ds4_ops::readback::Readback;
    ///
    /// let device = Device::flex();
    /// let ids = [Tensor::from_ints([7, 8], &device), Tensor::from_ints([9], &device)];
    /// let read = Readback::begin_both(&ids, &[Tensor::from_data([0.5], &device)]);
    /// let numbers = read.wait_both()?;
    /// assert_eq!(numbers.ints, [7, 8, 9]);
    /// assert_eq!(numbers.floats, [0.5]);
    /// # }
    /// # Ok::<(), burn::backend::ExecutionError>(())
    /// ```
    pub fn begin_both(ints: &[Tensor<1, Int>], floats: &[Tensor<1>]) -> Self {
        Self(Some(PendingRead::begin(ints, floats)))
    }

    /// Waits for the integers of all tensors, in their order. Each must fit in an `i32`.
    ///
    /// # Errors
    ///
    /// If the copy has failed, or work that the numbers depend on.
    pub fn wait(self) -> Result<Vec<i32>, ExecutionError> {
        Ok(self.wait_both()?.ints)
    }

    /// Waits for the numbers of all tensors. Each integer must fit in an `i32`; floats are
    /// converted to `f32`.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_both(mut self) -> Result<ReadNumbers, ExecutionError> {
        let pending = self.0.take();
        pending.map_or_else(|| Ok(ReadNumbers::default()), PendingRead::wait)
    }
}

impl Drop for Readback {
    fn drop(&mut self) {
        // The result is not needed.
        let _ = self.0.take().map(PendingRead::wait);
    }
}

impl fmt::Debug for Readback {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Readback").finish_non_exhaustive()
    }
}

impl PendingRead {
    fn begin(ints: &[Tensor<1, Int>], floats: &[Tensor<1>]) -> Self {
        #[cfg(all(feature = "cube", not(feature = "fusion")))]
        if let Some(copies) = stream_copies::begin(ints, floats) {
            return Self::Copied(copies);
        }
        Self::Done(read(ints, floats))
    }

    fn wait(self) -> Result<ReadNumbers, ExecutionError> {
        match self {
            Self::Done(numbers) => numbers,
            #[cfg(all(feature = "cube", not(feature = "fusion")))]
            Self::Copied(copies) => copies.wait(),
        }
    }
}

impl ReadNumbers {
    /// Adds the numbers of a tensor to those of its kind.
    fn extend(&mut self, data: &TensorData) {
        if data.dtype().is_float() {
            self.floats.extend(data.iter::<f32>());
        } else {
            self.ints.extend(data.iter::<i32>());
        }
    }
}

fn read(ints: &[Tensor<1, Int>], floats: &[Tensor<1>]) -> Result<ReadNumbers, ExecutionError> {
    let mut numbers = ReadNumbers::default();
    for tensor in ints {
        numbers.extend(&tensor.clone().try_into_data()?);
    }
    for tensor in floats {
        numbers.extend(&tensor.clone().try_into_data()?);
    }
    Ok(numbers)
}

/// Copies that CubeCL enqueues when they are requested. Burn's own reads copy only when their bytes
/// are first accessed.
#[cfg(all(feature = "cube", not(feature = "fusion")))]
mod stream_copies {
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

    use super::ReadNumbers;

    type Arrival = Pin<Box<dyn Future<Output = Result<Vec<Bytes>, ServerError>> + Send>>;

    pub(super) struct Copies {
        arrival: Arrival,
        layouts: Vec<(Shape, DType)>,
    }

    /// Begins the copies, or returns `None` where the device has none.
    pub(super) fn begin(ints: &[Tensor<1, Int>], floats: &[Tensor<1>]) -> Option<Copies> {
        let ints = ints
            .iter()
            .map(|tensor| tensor.clone().try_into_primitive::<CubeBackend>().ok());
        let floats = floats
            .iter()
            .map(|tensor| tensor.clone().try_into_primitive::<CubeBackend>().ok());
        let (mut client, mut device) = (None, None);
        let (mut layouts, mut descriptors) = (Vec::new(), Vec::new());
        for tensor in ints.chain(floats) {
            let tensor: CubeTensor = tensor?;
            // A read from this device returns the tensor's own memory, which later work writes to.
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
            client = Some(static_client(&tensor));
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
        pub(super) fn wait(self) -> Result<ReadNumbers, ExecutionError> {
            let read = block_on(self.arrival).map_err(|error| {
                let reason = error.to_string();
                match error.is_device_poisoned() {
                    true => ExecutionError::device_poisoned(reason),
                    false => ExecutionError::with_context(reason),
                }
            })?;
            let mut numbers = ReadNumbers::default();
            for (bytes, (shape, dtype)) in read.into_iter().zip(self.layouts) {
                numbers.extend(&TensorData::from_bytes(bytes, shape, dtype));
            }
            Ok(numbers)
        }
    }

    /// The device's client, which lives as long as the program, as a pending read borrows it.
    fn static_client(tensor: &CubeTensor) -> &'static Client {
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
            let at_once = matches!(read.0, Some(PendingRead::Done(_)));
            let expected = spec == DeviceSpec::Flex || cfg!(feature = "fusion");
            assert_eq!(at_once, expected, "{spec}");
            assert_eq!(read.wait().unwrap(), [3], "{spec}");
        }
    }
}
