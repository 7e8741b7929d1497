use std::collections::BTreeMap;

use burn::tensor::{Device, Int, Tensor};

/// Most tensors of each kind that are held. A step of one size needs fewer than ten.
const MAX_TENSORS: usize = 64;

/// Integer tensors that prefill steps compute indices from, made once for all steps of a size: each
/// is an upload.
#[derive(Clone, Debug)]
pub(super) struct Constants {
    batch: usize,
    device: Device,
    ranges: BTreeMap<usize, Tensor<1, Int>>,
    /// Of the rows of several sequences.
    offsets: BTreeMap<usize, Tensor<2, Int>>,
}

impl Constants {
    pub(super) fn new(batch: usize, device: &Device) -> Self {
        Self {
            batch,
            device: device.clone(),
            ranges: BTreeMap::new(),
            offsets: BTreeMap::new(),
        }
    }

    /// `0..count`.
    pub(super) fn range(&mut self, count: usize) -> Tensor<1, Int> {
        let range = self.ranges.entry(count);
        range
            .or_insert_with(|| Tensor::arange(0..count as i64, &self.device))
            .clone()
    }

    /// Row indices `[batch, count]` of every sequence as indices of the flattened `[batch · rows]`:
    /// `[batch · count]`.
    pub(super) fn flatten(&mut self, indices: Tensor<2, Int>, rows: usize) -> Tensor<1, Int> {
        let [batch, count] = indices.dims();
        if self.batch == 1 {
            return indices.reshape([count]);
        }
        let offsets = self.offsets.entry(rows).or_insert_with(|| {
            let sequence = Tensor::<1, Int>::arange(0..self.batch as i64, &self.device);
            sequence.unsqueeze_dim::<2>(1) * rows as i64
        });
        (indices + offsets.clone()).reshape([batch * count])
    }

    /// Drops all tensors if there are too many, and returns whether it did.
    pub(super) fn prune(&mut self) -> bool {
        let numbers = [self.ranges.len(), self.offsets.len()];
        let full = numbers.into_iter().any(|number| number > MAX_TENSORS);
        if full {
            self.ranges.clear();
            self.offsets.clear();
        }
        full
    }
}
