//! The host side: which kernels, and for how many tokens at a time.

use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::args::PackedExperts;
use crate::gemm::launch::{
    Experts, Grouping, LargeM, LargeMTiles, Mixture, MixtureBlueprint, Portable, Role,
    SMALL_M_PAIRS, SMALL_M_ROWS, SortedPairs, can_multiply, can_sum_pairs, has_tiles, sort,
    sum_slots,
};
use crate::gemm::{Matrices, terms};
use crate::launching::{aligned, narrow, output};

/// Pairs that are multiplied at a time: the sums of every pair and column of the output are in
/// memory.
const MAX_PAIRS: usize = 1 << 16;
/// Bytes of those sums, at most.
const MAX_SUMS: usize = 1 << 30;

impl From<PackedExperts<CubeBackend>> for Experts {
    fn from(experts: PackedExperts<CubeBackend>) -> Self {
        Self {
            matrices: [experts.gate_up, experts.down].map(Matrices::from),
            limit: experts.limit,
            rounded: experts.rounded,
        }
    }
}

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
    mixture.can_launch().then(|| mixture.launch())
}

impl Experts {
    /// Both products of many pairs, in f32, a row for each. There is a pair for each of the scores
    /// of sorted ones, or else for each row of `x`.
    fn large_m(
        &self,
        x: &CubeTensor,
        sorted: Option<(&SortedPairs, &CubeTensor)>,
        [gated_tiles, tiles]: [LargeMTiles; 2],
    ) -> CubeTensor {
        let [gate_up, down] = self.matrices();
        let (sorted, scores) = sorted.unzip();
        let slots = scores.map_or(1, |scores| scores.meta.shape()[1]);
        let pairs = x.meta.shape()[0] * slots;
        let rows = output(x, [pairs, down.rows], DType::F32);
        if !has_tiles(x, self.matrices()) {
            let grouping = sorted.map_or(Grouping::One, Grouping::Sorted);
            self.plain(x, scores, &grouping, None, Role::Rows, &rows);
            return rows;
        }
        let columns = tiles.hidden_columns(down);
        let layout = self.hidden(columns, DType::BF16, terms(x.dtype));
        let hidden = layout.output(x, pairs);
        let gated = LargeM {
            sorted,
            scores,
            gated: Some(down.format),
            pairs,
            pairs_per_row: slots,
            limit: self.limit,
            ..LargeM::of_rows(x, gate_up, gated_tiles)
        };
        gated.launch(&hidden);
        LargeM {
            x: &layout.finish(hidden),
            scores: None,
            matrices: down,
            gated: None,
            permuted: true,
            pairs_per_row: 1,
            tiles,
            ..gated
        }
        .launch(&rows);
        rows
    }

    /// Both products by the kernel for any device, the second in `role`. There is a pair for each
    /// of the `scores`, or else for each row of `x`.
    fn plain(
        &self,
        x: &CubeTensor,
        scores: Option<&CubeTensor>,
        grouping: &Grouping<'_>,
        addend: Option<&CubeTensor>,
        role: Role,
        result: &CubeTensor,
    ) {
        let slots = scores.map_or(1, |scores| scores.meta.shape()[1]);
        let pairs = x.meta.shape()[0] * slots;
        let [gate_up, down] = self.matrices();
        let layout = self.hidden(down.columns, x.dtype, 1);
        let hidden = layout.output(x, pairs);
        let gated = Portable {
            x,
            grouping,
            scores,
            addend: None,
            matrices: gate_up,
            role: Role::Gated,
            pairs,
            pairs_per_row: slots,
            slots,
            limit: self.limit,
        };
        gated.launch(&hidden);
        Portable {
            x: &layout.finish(hidden),
            scores: None,
            addend,
            matrices: down,
            role,
            pairs_per_row: 1,
            ..gated
        }
        .launch(result);
    }
}

/// How a small number of tokens is computed: on tensor cores, or on any device.
enum SmallM {
    Tiles(Box<MixtureBlueprint>),
    Plain,
}

impl Mixture {
    /// A small number of tokens that must be computed in the way of many goes without a shared
    /// expert: that one may have a way of its own.
    fn can_launch(&self) -> bool {
        let [tokens, slots] = self.ids.shape().dims();
        let multiplies = |experts: &Experts| can_multiply(&self.x, experts.matrices());
        let with = |shared: &Experts| {
            multiplies(shared) && (tokens > SMALL_M_ROWS || self.small_m().is_some())
        };
        slots <= SMALL_M_PAIRS && multiplies(&self.experts) && self.shared.as_ref().is_none_or(with)
    }

    fn launch(self) -> CubeTensor {
        let this = Self {
            x: aligned(self.x),
            ids: into_contiguous(self.ids),
            scores: into_contiguous(self.scores),
            experts: self.experts.contiguous(),
            shared: self.shared.map(Experts::contiguous),
        };
        let dtype = match this.shared {
            Some(_) => this.x.dtype,
            None => DType::F32,
        };
        match this.small_m() {
            Some(SmallM::Tiles(blueprint)) => this.launch_tiles(&blueprint, dtype),
            Some(SmallM::Plain) => this.plain(dtype),
            None => this.large_m(dtype),
        }
    }

    /// `None` for many tokens, or where shared memory is too small. For small M, nothing else
    /// depends on the number of tokens, because a token's result would then depend on it.
    fn small_m(&self) -> Option<SmallM> {
        let [tokens, slots] = self.ids.shape().dims();
        let pairs = SMALL_M_ROWS * slots;
        let tiles = has_tiles(&self.x, self.experts.matrices());
        let differs = |shared: &Experts| has_tiles(&self.x, shared.matrices()) != tiles;
        if tokens > SMALL_M_ROWS
            || pairs > SMALL_M_PAIRS
            || self.shared.as_ref().is_some_and(differs)
        {
            return None;
        }
        if tiles {
            MixtureBlueprint::new(self).map(|blueprint| SmallM::Tiles(Box::new(blueprint)))
        } else {
            can_sum_pairs(&self.x, pairs).then_some(SmallM::Plain)
        }
    }

    /// Uses the kernel for any device: both products of the shared expert, then those of the routed
    /// ones, whose sums are added to it.
    fn plain(&self, dtype: DType) -> CubeTensor {
        let (x, tokens) = (&self.x, self.ids.meta.shape()[0]);
        let result =
            |experts: &Experts, dtype| output(x, [tokens, experts.matrices[1].rows], dtype);
        let addend = self.shared.as_ref().map(|shared| {
            let sums = result(shared, DType::F32);
            shared.plain(x, None, &Grouping::One, None, Role::Rows, &sums);
            sums
        });
        let sums = result(&self.experts, dtype);
        let (grouping, scores) = (Grouping::Small(&self.ids), Some(&self.scores));
        let experts = &self.experts;
        experts.plain(x, scores, &grouping, addend.as_ref(), Role::Sum, &sums);
        sums
    }

    /// Computes a part of the tokens at a time if their sums would take too much memory.
    fn large_m(&self, dtype: DType) -> CubeTensor {
        let [tokens, slots] = self.ids.shape().dims();
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
        let [_, slots] = self.ids.shape().dims();
        let pairs = range.len() * slots;
        let part = |tensor: &CubeTensor| narrow(tensor, range.start, range.len());
        let x = aligned(part(&self.x));
        let (ids, scores) = (
            into_contiguous(part(&self.ids)),
            into_contiguous(part(&self.scores)),
        );
        let experts = self.experts.matrices();
        let (count, tiles) = (experts[0].count, LargeMTiles::of_pairs(&x, pairs, experts));
        let sorted = sort(&ids, count, tiles.rows(x.dtype));
        let rows = self
            .experts
            .large_m(&x, Some((&sorted, &scores)), [tiles; 2]);
        let of_shared = |shared: &Experts| {
            shared.large_m(&x, None, LargeMTiles::of_expert(&x, shared.matrices()))
        };
        let addend = self.shared.as_ref().map(of_shared);
        sum_slots(rows, (&ids, count), addend.as_ref(), dtype)
    }
}
