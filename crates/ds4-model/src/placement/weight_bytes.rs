//! How many bytes weights take on devices.

use burn::tensor::DType;
use burn_ds4_ops::quant::FP4_BLOCK;

use super::bytes::{ModelBytes, Place};
use super::share::is_divided;

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

    /// Counts FP8 matrices of `parts` linears each, with scales of blocks of so many rows and
    /// columns.
    pub(crate) fn fp8(&mut self, [matrices, parts, out, inp]: [usize; 4], block: usize) {
        let blocks = [out.div_ceil(block), inp.div_ceil(block)];
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
