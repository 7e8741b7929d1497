//! In place of exchanges through each other's memory, where no device has them.

use burn::tensor::{Device, Tensor};

use super::{Combine, Exchanged, GroupError, reference};

pub(super) fn enable(devices: &[Device]) -> Result<(), String> {
    Err(format!(
        "{:?} cannot write to the memory of another",
        devices[0]
    ))
}

pub(super) fn prepare(_: &[Device]) -> Result<(), GroupError> {
    Ok(())
}

pub(super) fn exchange<const D: usize, K: Exchanged>(
    devices: &[Device],
    _: usize,
    tensors: Vec<Tensor<D, K>>,
    combine: Combine,
) -> Result<Vec<Tensor<D, K>>, GroupError> {
    Ok(reference::exchange(devices, tensors, combine))
}

pub(super) fn check(_: &[Device]) -> Result<(), GroupError> {
    Ok(())
}

pub(crate) fn forget() {}
