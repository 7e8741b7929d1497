use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use crate::gemm::launch::{Product, Schedule, can_multiply, has_tiles};
use crate::gemm::{FP8_BLOCK, Matrices, terms};
use crate::launching::output;
use crate::moe::args::PackedExperts;
use crate::roundtrip::SmallFloat;
use crate::roundtrip::launch::{Blocks, round_terms};

/// Matrices of experts of one kind.
pub(super) struct ExpertMatrices {
    /// Gate and up, and down.
    pub matrices: [Matrices; 2],
    /// The limit of gates.
    pub limit: f64,
    /// Columns of the blocks in which hidden values are rounded to FP8, if they are.
    rounded: Option<usize>,
}

impl From<PackedExperts<CubeBackend>> for ExpertMatrices {
    fn from(experts: PackedExperts<CubeBackend>) -> Self {
        Self {
            matrices: [experts.gate_up, experts.down].map(Matrices::from),
            limit: experts.limit,
            rounded: experts.rounded,
        }
    }
}

impl ExpertMatrices {
    pub fn matrices(&self) -> [&Matrices; 2] {
        self.matrices.each_ref()
    }

    pub fn contiguous(self) -> Self {
        Self {
            matrices: self.matrices.map(Matrices::contiguous),
            ..self
        }
    }

    /// Whether there are kernels for them.
    pub fn can_multiply(&self, x: &CubeTensor) -> bool {
        can_multiply(x, self.matrices())
    }

    /// Whether kernels for tensor cores multiply by all of them.
    pub fn have_tiles(&self, x: &CubeTensor) -> bool {
        has_tiles(x, self.matrices())
    }

    /// The first product, with the rows, the pairs and the scores of `product`.
    pub fn gated<'a>(&'a self, product: Product<'a>) -> Product<'a> {
        Product {
            matrices: &self.matrices[0],
            gated: Some(self.matrices[1].format),
            limit: self.limit,
            ..product
        }
    }

    /// Both products, the sums of the second and `addend` where every cube groups the pairs. The
    /// first one has the rows, the pairs and the scores of `product`.
    pub fn multiply(
        &self,
        product: Product<'_>,
        [gated_schedule, schedule]: [Schedule; 2],
        addend: Option<&CubeTensor>,
        result: &CubeTensor,
    ) {
        let gated = self.gated(product);
        let hidden = self.hidden(&product, schedule);
        gated.launch(gated_schedule, &hidden);
        let second = Product {
            x: &self.finish(hidden, product.pairs, schedule),
            scores: None,
            addend,
            matrices: &self.matrices[1],
            gated: None,
            permuted: true,
            per_row: 1,
            ..gated
        };
        second.launch(schedule, result);
    }

    /// Memory for the hidden values of pairs, between the two products, as a `schedule` of the
    /// second one takes them: `[pairs · terms, columns with padding]`.
    pub fn hidden(&self, product: &Product<'_>, schedule: Schedule) -> CubeTensor {
        let (x, [_, down]) = (product.x, self.matrices());
        let (dtype, terms) = match schedule {
            Schedule::Portable => (product.dtype, 1),
            _ => (DType::BF16, terms(product.dtype) as usize),
        };
        let shape = [product.pairs * terms, schedule.hidden_columns(down)];
        if self.rounded.is_none() || shape[1] == down.columns {
            return output(x, shape, dtype);
        }
        // Padding must not count among the largest of a block, and products do not write it.
        let all = [shape[0] * shape[1]].into();
        let zeros = CubeBackend::float_zeros(all, &x.device, dtype.into());
        CubeBackend::float_reshape(zeros, shape.into())
    }

    /// What the first product has written for so many pairs, as a `schedule` of the second one
    /// takes it: the columns of each [`FP8_BLOCK`] are in an order of its own.
    pub fn finish(&self, hidden: CubeTensor, pairs: usize, schedule: Schedule) -> CubeTensor {
        let terms = (hidden.meta.shape()[0] / pairs) as u32;
        let Some(columns) = self.rounded else {
            return hidden;
        };
        let blocks = match columns {
            FP8_BLOCK => Blocks::new(columns),
            _ => Blocks {
                columns,
                turns: schedule.hidden_turns(&self.matrices[1]),
            },
        };
        round_terms(hidden, blocks, SmallFloat::Fp8, terms)
    }
}
