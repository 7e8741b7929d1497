use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;

use crate::gemm::launch::{Product, Schedule, can_multiply, has_tiles};
use crate::gemm::{FP8_BLOCK, Matrices, terms};
use crate::launching::output;
use crate::moe::args::PackedExperts;
use crate::roundtrip::SmallFloat;
use crate::roundtrip::launch::round_terms;

/// Matrices of experts of one kind.
pub(super) struct Experts {
    /// Gate and up, and down.
    pub matrices: [Matrices; 2],
    /// The limit of gates.
    pub limit: f64,
    /// Whether hidden values are rounded to FP8.
    rounded: bool,
}

impl From<PackedExperts<CubeBackend>> for Experts {
    fn from(experts: PackedExperts<CubeBackend>) -> Self {
        Self {
            matrices: [experts.gate_up, experts.down].map(Matrices::from),
            limit: experts.limit,
            rounded: experts.rounded,
        }
    }
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

    /// Whether there are kernels for them, and whether those for tensor cores.
    pub fn can_multiply(&self, x: &CubeTensor) -> bool {
        can_multiply(x, self.matrices())
    }

    pub fn have_tiles(&self, x: &CubeTensor) -> bool {
        has_tiles(x, self.matrices())
    }

    /// The first product.
    pub fn gated<'a>(&'a self, pairs: Product<'a>) -> Product<'a> {
        Product {
            gated: Some(self.matrices[1].format),
            limit: self.limit,
            ..pairs
        }
    }

    /// Both products, the sums of the second and `addend` where every cube groups the pairs. The
    /// first one has the rows, the pairs and the scores of `pairs`.
    pub fn multiply(
        &self,
        pairs: Product<'_>,
        [gated_schedule, schedule]: [Schedule; 2],
        addend: Option<&CubeTensor>,
        result: &CubeTensor,
    ) {
        let [_, down] = self.matrices();
        let gated = self.gated(pairs);
        let layout = self.hidden(pairs.dtype, schedule);
        let hidden = layout.output(pairs.x, pairs.pairs);
        gated.launch(gated_schedule, &hidden);
        let second = Product {
            x: &layout.finish(hidden),
            scores: None,
            addend,
            matrices: down,
            gated: None,
            permuted: true,
            per_row: 1,
            ..gated
        };
        second.launch(schedule, result);
    }

    /// Hidden values of rows in `dtype`, as a schedule of the second product takes them.
    pub fn hidden(&self, dtype: DType, schedule: Schedule) -> Hidden<'_> {
        let (dtype, terms) = match schedule {
            Schedule::Portable => (dtype, 1),
            _ => (DType::BF16, terms(dtype)),
        };
        Hidden {
            experts: self,
            columns: schedule.hidden_columns(&self.matrices[1]),
            dtype,
            terms,
        }
    }
}

/// The hidden values of pairs, between the two products of experts: `[pairs · terms, columns]`.
#[derive(Clone, Copy)]
pub(super) struct Hidden<'a> {
    experts: &'a Experts,
    /// With padding. Those of each [`FP8_BLOCK`] may have any order.
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
