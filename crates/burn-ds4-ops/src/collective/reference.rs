//! Exchanges through the memory of the host, in plain tensor operations.

use burn::tensor::{Device, Tensor};

use super::{Combine, Exchanged};
use crate::transfer::transfer;

/// Combines the tensors of all ranks on the first device that has to, and copies the result to the
/// others.
pub(super) fn exchange<const D: usize, K: Exchanged>(
    devices: &[Device],
    tensors: Vec<Tensor<D, K>>,
    combine: Combine,
) -> Vec<Tensor<D, K>> {
    let combined = match combine {
        Combine::Root(root) => tensors[root].clone(),
        Combine::Sum => K::sum(moved(tensors, &devices[0])),
        Combine::Gather => Tensor::cat(moved(tensors, &devices[0]).collect(), 0),
    };
    let copies = devices.iter();
    copies.map(|to| transfer(combined.clone(), to)).collect()
}

fn moved<const D: usize, K: Exchanged>(
    tensors: Vec<Tensor<D, K>>,
    to: &Device,
) -> impl Iterator<Item = Tensor<D, K>> {
    tensors.into_iter().map(|tensor| transfer(tensor, to))
}
