use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;

use crate::gemm::{FP8_BLOCK, Matrices};
use crate::launching::output;
use crate::roundtrip::SmallFloat;
use crate::roundtrip::launch::round_terms;

/// The hidden values of pairs, between the two products of experts: `[pairs · terms, columns]`.
#[derive(Clone, Copy)]
pub(crate) struct Hidden<'a> {
    pub down: &'a Matrices,
    /// Columns with padding. Those of each [`FP8_BLOCK`] may have any order.
    pub columns: usize,
    pub dtype: DType,
    /// Rows that a pair is the sum of.
    pub terms: u32,
    /// Whether they are rounded to FP8.
    pub rounded: bool,
}

impl Hidden<'_> {
    /// Memory for the first product to write.
    pub fn output(&self, x: &CubeTensor, pairs: usize) -> CubeTensor {
        let shape = [pairs * self.terms as usize, self.columns];
        if !self.rounded || self.columns == self.down.columns {
            return output(x, shape, self.dtype);
        }
        // Padding must not count among the largest of a block, and products do not write it.
        let (client, count) = (x.client.clone(), Shape::new([shape[0] * shape[1]]));
        let zeros = zeros_client(client, x.device.clone(), count, self.dtype);
        CubeTensor::new_contiguous(
            zeros.client,
            zeros.device,
            Shape::new(shape),
            zeros.handle,
            self.dtype,
        )
    }

    /// What the first product has written, as the second takes it.
    pub fn finish(&self, hidden: CubeTensor) -> CubeTensor {
        match self.rounded {
            true => round_terms(hidden, FP8_BLOCK, SmallFloat::Fp8, self.terms),
            false => hidden,
        }
    }
}
