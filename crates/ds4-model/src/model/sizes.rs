//! What a model with packed random weights takes.

use burn::module::Param;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};

use super::source::ModelSource;
use crate::placement::{Place, Placement, WeightBytes};
use crate::weights::{EngramTable, Initial, WeightSource, WeightStack};

/// Counts what [packed random weights](Random) would take, and makes none.
pub(super) struct PackedSizes<'d> {
    pub(super) bytes: WeightBytes,
    /// Dtype of the activations.
    pub(super) dtype: FloatDType,
    /// Dtype of dense matrices.
    pub(super) stored: FloatDType,
    /// Rows and columns that share a scale of FP8.
    pub(super) weight_block: usize,
    pub(super) device: &'d Device,
}

impl ModelSource for PackedSizes<'_> {
    type Weights = Self;

    fn weights(&mut self) -> &mut Self {
        self
    }

    fn placement(&self, layers: usize) -> Placement {
        Placement::single(self.device, layers)
    }

    fn enter(&mut self, place: Place) {
        self.bytes.enter(place);
    }
}

impl WeightSource for PackedSizes<'_> {
    fn arranged<const D: usize>(
        &mut self,
        _: &str,
        _: [usize; D],
        shape: [usize; D],
        _: Initial,
        _: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> Option<Param<Tensor<D>>> {
        self.bytes.tensor(&shape, DType::F32);
        None
    }

    fn embedding(&mut self, _: &str, shape: [usize; 2]) -> Option<Param<Tensor<2>>> {
        self.bytes.tensor(&shape, self.dtype.into());
        None
    }

    fn stored(
        &mut self,
        names: &[String],
        [rows, columns]: [usize; 2],
    ) -> Option<Param<Tensor<2>>> {
        let shape = [names.len(), rows, columns];
        self.bytes.tensor(&shape, self.stored.into());
        None
    }

    fn stack(
        &mut self,
        prefix: &str,
        experts: Option<usize>,
        parts: &[&str],
        [out, inp]: [usize; 2],
    ) -> Option<WeightStack> {
        let block = self.weight_block;
        self.bytes.under(prefix, |bytes| match experts {
            None => bytes.fp8([1, parts.len(), out, inp], block),
            Some(experts) => bytes.fp4([experts, parts.len(), out, inp]),
        });
        None
    }

    fn groups(&mut self, prefix: &str, [groups, rank, width]: [usize; 3]) -> Option<WeightStack> {
        let block = self.weight_block;
        let count = |bytes: &mut WeightBytes| bytes.fp8([groups, 1, rank, width], block);
        self.bytes.under(prefix, count);
        None
    }

    fn lookup(&mut self, _: &str, _: [usize; 2]) -> Option<EngramTable> {
        // The host has it.
        None
    }

    fn table(&mut self, _: &str, shape: [usize; 2], _: usize) -> Option<Param<Tensor<2, Int>>> {
        self.bytes.tensor(&shape, DType::I32);
        None
    }
}
