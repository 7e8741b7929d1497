use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;

use crate::gemm::{FP8_BLOCK, Matrices};
use crate::launching::output;
use crate::roundtrip::SmallFloat;
use crate::roundtrip::launch::round_terms;

/// Matrices of experts of one kind.
pub(crate) struct Experts {
    /// Gate and up, and down.
    pub matrices: [Matrices; 2],
    /// The limit of gates.
    pub limit: f64,
    /// Whether hidden values are rounded to FP8.
    pub rounded: bool,
}

impl Experts {
    pub fn matrices(&self) -> [&Matrices; 2] {
        self.matrices.each_ref()
    }

    pub fn contiguous(self) -> Self {
        Self {
            matrices: self.matrices.map(Matrices::contiguous),
            ..self
        }
    }

    /// Their hidden values in `columns` columns with padding, each the sum of `terms` of `dtype`.
    pub fn hidden(&self, columns: usize, dtype: DType, terms: u32) -> Hidden<'_> {
        Hidden {
            experts: self,
            columns,
            dtype,
            terms,
        }
    }
}

/// The hidden values of pairs, between the two products of experts: `[pairs · terms, columns]`.
#[derive(Clone, Copy)]
pub(crate) struct Hidden<'a> {
    experts: &'a Experts,
    /// Those of each [`FP8_BLOCK`] may have any order.
    columns: usize,
    dtype: DType,
    /// Rows that a pair is the sum of.
    terms: u32,
}

impl Hidden<'_> {
    /// Memory for the first product to write.
    pub fn output(&self, x: &CubeTensor, pairs: usize) -> CubeTensor {
        let shape = [pairs * self.terms as usize, self.columns];
        if !self.experts.rounded || self.columns == self.experts.matrices[1].columns {
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
        match self.experts.rounded {
            true => round_terms(hidden, FP8_BLOCK, SmallFloat::Fp8, self.terms),
            false => hidden,
        }
    }
}
