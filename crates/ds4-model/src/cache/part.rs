//! What a cache has on one device, besides rows.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

use super::layout::CacheLayout;
use super::pool::{Page, table_row};
use crate::rope::{RotaryConfig, RotaryTable};

/// What the layers of one device have in common.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) device: Device,
    pub(super) layers: Range<usize>,
    pub(super) rotary: Option<RotaryTable>,
    pub(super) compressed_rotary: Option<RotaryTable>,
    /// The lengths, on the device: `[batch]`. Taken while they are updated, so that the update is
    /// in place.
    pub(super) start: Option<Tensor<1, Int>>,
    /// Positions that a step of one position adds to each sequence, on the device: `[batch]`, 0 for
    /// vacant ones. `None` until a sequence becomes vacant for the first time.
    pub(super) active: Option<Tensor<1, Int>>,
    /// The pages of each sequence, where there are some: `[batch, reach]`. Taken while they are
    /// written.
    pub(super) pages: Option<Tensor<2, Int>>,
}

impl Part {
    pub(super) fn new(
        layout: &CacheLayout,
        batch: usize,
        capacity: usize,
        device: &Device,
        layers: Range<usize>,
    ) -> Self {
        let own = layout.of_layers(layers.clone());
        let table = |is_used: bool, rotary: &RotaryConfig| {
            is_used.then(|| RotaryTable::new(rotary, capacity, device))
        };
        Self {
            device: device.clone(),
            layers,
            rotary: table(own.has_window_only(), &own.rotary),
            compressed_rotary: table(own.has_compressed(), &own.compressed_rotary),
            start: Some(Tensor::zeros([batch], device)),
            active: None,
            pages: None,
        }
    }

    pub(super) fn start(&self) -> Tensor<1, Int> {
        self.start.clone().expect("lengths are put back")
    }

    /// Whether each of `count` new positions of every sequence is of a vacant one:
    /// `[batch · count]`.
    pub(super) fn vacant(&self, count: usize) -> Option<Tensor<1, Bool>> {
        let vacant = self.active.clone()?.equal_elem(0);
        let [batch] = vacant.dims();
        Some(match count {
            1 => vacant,
            _ => vacant
                .unsqueeze_dim::<2>(1)
                .repeat_dim(1, count)
                .reshape([batch * count]),
        })
    }

    /// The pages of sequences in a tensor of its own.
    pub(super) fn new_table(&self, pages: &[Vec<Arc<Page>>], reach: usize) -> Tensor<2, Int> {
        let rows = pages
            .iter()
            .map(|pages| table_row(pages, reach, &self.device));
        Tensor::cat(rows.collect(), 0)
    }

    /// Changes the lengths in place.
    pub(super) fn change(
        &mut self,
        change: impl FnOnce(Tensor<1, Int>, Option<&Tensor<1, Int>>) -> Tensor<1, Int>,
    ) {
        let start = self.start.take().expect("lengths are put back");
        self.start = Some(change(start, self.active.as_ref()));
    }

    /// Adds `count` positions to the sequences that are not vacant.
    pub(super) fn advance(&mut self, count: usize) {
        self.change(|start, active| match active {
            None => start + count as i64,
            Some(active) if count == 1 => start + active.clone(),
            Some(active) => start + active.clone() * count as i64,
        });
    }

    /// A number of each sequence, in a tensor of its own.
    pub(super) fn uploaded(&self, numbers: &[usize]) -> Tensor<1, Int> {
        let numbers: Vec<i32> = numbers.iter().map(|number| *number as i32).collect();
        let data = TensorData::from(numbers.as_slice());
        Tensor::from_data(data, (&self.device, self.start().dtype()))
    }

    /// Takes the tensor, which the caller has to put back, and tells whether it is new.
    pub(super) fn take_active(&mut self) -> (Tensor<1, Int>, bool) {
        match self.active.take() {
            Some(active) => (active, false),
            None => {
                let start = self.start();
                let like = (&self.device, start.dtype());
                (Tensor::ones(start.dims(), like), true)
            }
        }
    }
}
