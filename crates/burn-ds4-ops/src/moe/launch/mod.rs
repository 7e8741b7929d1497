//! The host side: which kernels, and for how many tokens at a time.

mod experts;
mod mixture;

use std::ops::Range;

use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::args::PackedExperts;
use crate::dims::Dims;
use crate::gemm::launch::{
    Grouping, Product, SMALL_M_PAIRS, SMALL_M_ROWS, Schedule, can_sum_pairs, sort, sum_slots,
};
use crate::launching::{aligned, narrow, output};
use experts::ExpertMatrices;
use mixture::MixtureBlueprint;

/// Pairs that are multiplied at a time: the sums of every pair and column of the output are in
/// memory.
const MAX_PAIRS: usize = 1 << 16;
/// Bytes of those sums, at most.
const MAX_SUMS: usize = 1 << 30;

/// The sums of the experts in f32, or with a shared expert in the dtype of `x`. `None` where there
/// is no kernel.
pub(super) fn sums(
    x: &CubeTensor,
    ids: &CubeTensor,
    scores: &CubeTensor,
    experts: &PackedExperts<CubeBackend>,
    shared: Option<&PackedExperts<CubeBackend>>,
) -> Option<CubeTensor> {
    let mixture = Mixture {
        x: x.clone(),
        ids: ids.clone(),
        scores: scores.clone(),
        experts: experts.clone().into(),
        shared: shared.cloned().map(Into::into),
    };
    let plan = Plan::new(&mixture)?;
    Some(mixture.launch(&plan))
}

/// Experts and the tokens that they are for: the routed ones, and a shared one if there is any.
struct Mixture {
    x: CubeTensor,
    /// Both are `[tokens, slots]`.
    ids: CubeTensor,
    scores: CubeTensor,
    experts: ExpertMatrices,
    shared: Option<ExpertMatrices>,
}

/// How tokens are computed.
enum Plan {
    /// A small number of them, on tensor cores.
    Tiles(Box<MixtureBlueprint>),
    /// The same on any device.
    Plain,
    /// Many of them, or few in the same way.
    LargeM,
}

impl Plan {
    /// `None` where there is no kernel for any of the experts, or a shared one had better have a
    /// way of its own: few tokens in the way of many.
    fn new(mixture: &Mixture) -> Option<Self> {
        let [tokens, slots] = mixture.sizes();
        let all = || std::iter::once(&mixture.experts).chain(&mixture.shared);
        if slots > SMALL_M_PAIRS || !all().all(|experts| experts.can_multiply(&mixture.x)) {
            return None;
        }
        let large_m = mixture.shared.is_none() || tokens > SMALL_M_ROWS;
        Self::small_m(mixture).or(large_m.then_some(Self::LargeM))
    }

    /// `None` for many tokens, or where shared memory is too small. For small M, nothing else
    /// depends on the number of tokens, because a token's result would then depend on it.
    fn small_m(mixture: &Mixture) -> Option<Self> {
        let Mixture {
            x, experts, shared, ..
        } = mixture;
        let [tokens, slots] = mixture.sizes();
        let pairs = SMALL_M_ROWS * slots;
        let tiles = experts.have_tiles(x);
        let differs = shared
            .as_ref()
            .is_some_and(|shared| shared.have_tiles(x) != tiles);
        if tokens > SMALL_M_ROWS || pairs > SMALL_M_PAIRS || differs {
            None
        } else if tiles {
            MixtureBlueprint::new(mixture).map(|blueprint| Self::Tiles(Box::new(blueprint)))
        } else {
            can_sum_pairs(x, pairs).then_some(Self::Plain)
        }
    }
}

impl Mixture {
    fn sizes(&self) -> [usize; 2] {
        self.ids.dims()
    }

    /// The product of the pairs of all tokens, which every cube groups.
    fn product(&self) -> Product<'_> {
        let [tokens, slots] = self.sizes();
        Product {
            grouping: Grouping::Ids(&self.ids),
            pairs: tokens * slots,
            per_row: slots,
            scores: Some(&self.scores),
            ..Product::of_rows(&self.x, &self.experts.matrices[0])
        }
    }

    fn launch(self, plan: &Plan) -> CubeTensor {
        let this = Self {
            x: aligned(self.x),
            ids: into_contiguous(self.ids),
            scores: into_contiguous(self.scores),
            experts: self.experts.contiguous(),
            shared: self.shared.map(ExpertMatrices::contiguous),
        };
        let dtype = match this.shared {
            Some(_) => this.x.dtype,
            None => DType::F32,
        };
        match plan {
            Plan::Tiles(blueprint) => this.launch_tiles(blueprint, dtype),
            Plan::Plain => this.plain(dtype),
            Plan::LargeM => this.large_m(dtype),
        }
    }

    /// The rows of the shared expert in f32, if there is one.
    fn shared_rows(&self, x: &CubeTensor, portable: bool) -> Option<CubeTensor> {
        let shared = self.shared.as_ref()?;
        let [gate_up, down] = shared.matrices();
        let schedules = match portable || !shared.have_tiles(x) {
            true => [Schedule::Portable; 2],
            false => Schedule::of_expert(x, [gate_up, down]),
        };
        let rows = output(x, [x.meta.shape()[0], down.rows], DType::F32);
        shared.multiply(Product::of_rows(x, gate_up), schedules, None, &rows);
        Some(rows)
    }

    /// Uses the kernel for any device: both products of the shared expert, then those of the routed
    /// ones, whose sums are added to it.
    fn plain(&self, dtype: DType) -> CubeTensor {
        let [tokens, _] = self.sizes();
        let addend = self.shared_rows(&self.x, true);
        let sums = output(&self.x, [tokens, self.experts.matrices[1].rows], dtype);
        let schedules = [Schedule::Portable; 2];
        let experts = &self.experts;
        experts.multiply(self.product(), schedules, addend.as_ref(), &sums);
        sums
    }

    /// Computes a part of the tokens at a time if their sums would take too much memory.
    fn large_m(&self, dtype: DType) -> CubeTensor {
        let [tokens, slots] = self.ids.dims();
        let [_, down] = self.experts.matrices();
        let most = (MAX_PAIRS / slots)
            .min(MAX_SUMS / (slots * down.rows * 4))
            .max(1);
        if tokens <= most {
            return self.large_m_range(0..tokens, dtype);
        }
        // Parts of the same size have tiles of the same height, which leave less over.
        let most = tokens.div_ceil(tokens.div_ceil(most));
        let firsts = (0..tokens).step_by(most);
        let ranges = firsts.map(|first| first..tokens.min(first + most));
        let sums = ranges.map(|range| self.large_m_range(range, dtype));
        CubeBackend::float_cat(sums.collect(), 0)
    }

    fn large_m_range(&self, range: Range<usize>, dtype: DType) -> CubeTensor {
        let [_, slots] = self.ids.dims();
        let pairs = range.len() * slots;
        let part = |tensor: &CubeTensor| narrow(tensor, range.start, range.len());
        let x = aligned(part(&self.x));
        let (ids, scores) = (
            into_contiguous(part(&self.ids)),
            into_contiguous(part(&self.scores)),
        );
        let [gate_up, down] = self.experts.matrices();
        let schedules = match self.experts.have_tiles(&x) {
            true => Schedule::of_pairs(&x, pairs, [gate_up, down]),
            false => [Schedule::Portable; 2],
        };
        let sorted = sort(&ids, gate_up.count, schedules[0].rows(x.dtype));
        let product = Product {
            grouping: Grouping::Sorted(&sorted),
            pairs,
            per_row: slots,
            scores: Some(&scores),
            ..Product::of_rows(&x, gate_up)
        };
        let rows = output(&x, [pairs, down.rows], DType::F32);
        self.experts.multiply(product, schedules, None, &rows);
        let addend = self.shared_rows(&x, false);
        sum_slots(rows, (&ids, gate_up.count), addend.as_ref(), dtype)
    }
}
