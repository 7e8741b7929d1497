//! Tensors that the host gives a device piece by piece.

use std::iter::once;
use std::mem::MaybeUninit;

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, Int, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::bytes::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use cubecl::client::Client;

/// Bytes of a piece, at most. CubeCL has up to three in page-locked memory: one is filled, one is
/// copied, and one was.
pub(super) const PIECE_BYTES: usize = 64 << 20;
/// Bytes of one where the driver has no such memory: few enough that the allocator gives the same
/// memory again, which costs no page faults.
const HEAP_BYTES: usize = 8 << 20;

/// See [`upload`](super::upload). `None` where the device takes no pieces.
pub(super) fn upload<E>(
    device: &Device,
    words: usize,
    piece: usize,
    mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
) -> Option<Result<Tensor<1, Int>, E>> {
    #[allow(irrefutable_let_patterns)]
    let DispatchDevice::Cube(device) = device.as_dispatch() else {
        return None;
    };
    let (client, bytes) = (device.client(), words * size_of::<u32>());
    let shape = Shape::new([words]);
    let tensor = empty_device_contiguous_dtype(client.clone(), device.clone(), shape, DType::U32);
    let mut first = 0;
    while first < bytes {
        let mut data = staged(&client, piece.min(bytes - first));
        if let Err(error) = fill(first, &mut data) {
            return Some(Err(error));
        }
        let handle = tensor.handle.clone().offset_start(first as u64);
        first += data.len();
        client.write(&handle.offset_end((bytes - first) as u64), data);
    }
    Some(Ok(Tensor::from_primitive::<CubeBackend>(tensor)))
}

/// See [`floats_of`](super::floats_of). `None` where the device takes no pieces.
pub(super) fn floats_of(words: &Tensor<1, Int>, count: usize, dtype: DType) -> Option<Tensor<1>> {
    let words = words.clone().try_into_primitive::<CubeBackend>().ok()?;
    let words = into_contiguous(words);
    let (client, device) = (words.client, words.device);
    let shape = Shape::new([count]);
    let floats = CubeTensor::new_contiguous(client, device, shape, words.handle, dtype);
    Some(Tensor::from_primitive::<CubeBackend>(floats))
}

/// Bytes to be written, so many in page-locked memory where the driver has it, or fewer. This waits
/// for the device to have taken what it was given before, but for what it is copying.
fn staged(client: &Client, length: usize) -> Bytes {
    // SAFETY: nobody sees these bytes: they are replaced by others, or dropped.
    let mut bytes = unsafe { Bytes::from_controller(Box::new(Wanted(length)), length) };
    client.staging(once(&mut bytes), true);
    match bytes.property() {
        AllocationProperty::File => Bytes::from_bytes_vec(vec![0; length.min(HEAP_BYTES)]),
        _ => bytes,
    }
}

/// So many bytes that are not anywhere yet. CubeCL stages what is in a file: it copies that to
/// page-locked memory, which takes its place. Here, there is nothing to copy.
struct Wanted(usize);

impl AllocationController for Wanted {
    fn alloc_align(&self) -> usize {
        1
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::File
    }

    unsafe fn memory_mut(
        &mut self,
        _: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        Err(AccessError::WouldCopy)
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        Err(AccessError::WouldCopy)
    }

    fn capacity(&self) -> usize {
        self.0
    }

    unsafe fn copy_into(&self, _: &mut [u8]) {}
}

#[cfg(test)]
mod tests {
    use crate::device::DeviceSpec;

    use super::*;

    #[test]
    fn pieces_of_any_length_are_put_together_and_an_error_ends_them() {
        for spec in [DeviceSpec::Wgpu, DeviceSpec::Cuda(0)] {
            let Ok(device) = spec.init() else {
                continue;
            };
            // The last piece is whole, a part, and the only one.
            for (words, piece, expected) in [(6, 8, 3), (7, 12, 3), (1, 64, 1), (0, 4, 0)] {
                let mut pieces = 0;
                let uploaded = upload(&device, words, piece, |first, bytes| {
                    pieces += 1;
                    for (at, byte) in (first..).zip(bytes) {
                        *byte = (7 * at) as u8;
                    }
                    Ok::<(), ()>(())
                });
                let words = uploaded.unwrap().unwrap().into_data();
                let bytes: Vec<u8> = (0..words.bytes().len()).map(|at| (7 * at) as u8).collect();
                assert_eq!(words.bytes()[..], bytes, "{spec}");
                assert_eq!(pieces, expected, "{spec}");
            }
            let failed = upload(&device, 6, 8, |first, _| match first {
                0 => Ok(()),
                _ => Err(first),
            });
            assert_eq!(failed.unwrap().map(|_| ()), Err(8), "{spec}");
        }
    }
}
