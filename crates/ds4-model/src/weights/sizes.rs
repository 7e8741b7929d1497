//! How many bytes weights take on devices.

use burn::module::Param;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_ds4_ops::quant::{FP4_BLOCK, FP8_BLOCK};

use super::{Initial, WeightSource};
use crate::linear::WeightStack;
use crate::parallel::is_divided;
use crate::placement::{ModelBytes, Place, Placement};

/// Counts the bytes of weights, part by part.
#[derive(Debug)]
pub(crate) struct WeightBytes {
    pub(crate) model: ModelBytes,
    place: Place,
}

impl Default for WeightBytes {
    fn default() -> Self {
        Self {
            model: ModelBytes::default(),
            place: Place::Embedding,
        }
    }
}

impl WeightBytes {
    /// Counts for this part from now on.
    pub(crate) fn enter(&mut self, place: Place) {
        self.place = place;
        self.model.add(place, 0);
    }

    /// Counts what `count` counts, of which devices can have parts if the prefix of the weights
    /// says so.
    pub(crate) fn under(&mut self, prefix: &str, count: impl FnOnce(&mut Self)) {
        let before = self.model.weights();
        count(self);
        if is_divided(prefix) {
            let bytes = self.model.weights().saturating_sub(before);
            self.model.divide(self.place, bytes);
        }
    }

    /// Counts a tensor.
    pub(crate) fn tensor(&mut self, shape: &[usize], dtype: DType) {
        let sizes = shape.iter();
        let bytes = sizes.fold(dtype.size(), |bytes, size| bytes.saturating_mul(*size));
        self.model.add(self.place, bytes);
    }

    /// Counts FP8 matrices of `parts` linears each.
    pub(crate) fn fp8(&mut self, [matrices, parts, out, inp]: [usize; 4]) {
        let blocks = [out.div_ceil(FP8_BLOCK), inp.div_ceil(FP8_BLOCK)];
        self.tensor(&[matrices, parts, out, inp.div_ceil(4)], DType::U32);
        self.tensor(&[matrices, parts, blocks[0], blocks[1]], DType::F32);
    }

    /// Counts FP4 matrices of `parts` linears each.
    pub(crate) fn fp4(&mut self, [matrices, parts, out, inp]: [usize; 4]) {
        let scales = (parts * out).saturating_mul(inp.div_ceil(FP4_BLOCK));
        self.tensor(&[matrices, parts, out, inp.div_ceil(8)], DType::U32);
        self.tensor(&[matrices, scales.div_ceil(4)], DType::U32);
    }
}

/// Counts what [packed random weights](super::Random) would take, and makes none.
pub(super) struct PackedSizes<'d> {
    pub(super) bytes: WeightBytes,
    /// Dtype of the activations.
    pub(super) dtype: FloatDType,
    /// Dtype of dense matrices.
    pub(super) stored: FloatDType,
    pub(super) device: &'d Device,
}

impl WeightSource for PackedSizes<'_> {
    fn placement(&self, layers: usize) -> Placement {
        Placement::single(self.device, layers)
    }

    fn enter(&mut self, place: Place) {
        self.bytes.enter(place);
    }

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
        self.bytes.under(prefix, |bytes| match experts {
            None => bytes.fp8([1, parts.len(), out, inp]),
            Some(experts) => bytes.fp4([experts, parts.len(), out, inp]),
        });
        None
    }

    fn groups(&mut self, prefix: &str, [groups, rank, width]: [usize; 3]) -> Option<WeightStack> {
        let count = |bytes: &mut WeightBytes| bytes.fp8([groups, 1, rank, width]);
        self.bytes.under(prefix, count);
        None
    }

    fn table(&mut self, _: &str, shape: [usize; 2], _: usize) -> Option<Param<Tensor<2, Int>>> {
        self.bytes.tensor(&shape, DType::I32);
        None
    }
}
