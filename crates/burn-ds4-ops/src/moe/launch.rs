//! The host side: which kernels, and for how many tokens at a time.

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::backend::PackedExperts;
use crate::gemm::launch::{
    Experts, Grouping, LargeM, LargeMTiles, Mixture, MixtureBlueprint, Portable, Role,
    SMALL_M_PAIRS, SMALL_M_ROWS, can_multiply, can_sum_pairs, has_tiles, sort, sum_slots,
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
    Tiles(MixtureBlueprint),
    Plain,
}

impl Mixture {
    /// A shared expert is computed with the others for a small number of tokens only.
    fn can_launch(&self) -> bool {
        let [_, slots] = self.ids.shape().dims();
        let multiplies = |experts: &Experts| can_multiply(&self.x, experts.matrices());
        let with = |shared: &Experts| multiplies(shared) && self.small_m().is_some();
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
            None => this.large_m(),
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
            MixtureBlueprint::new(self).map(SmallM::Tiles)
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
    fn large_m(&self) -> CubeTensor {
        let [tokens, slots] = self.ids.shape().dims();
        let [_, down] = self.experts.matrices();
        let most = (MAX_PAIRS / slots)
            .min(MAX_SUMS / (slots * down.rows * 4))
            .max(1);
        if tokens <= most {
            return self.large_m_range(0, tokens);
        }
        // Parts of the same size have tiles of the same height, which leave less over.
        let most = tokens.div_ceil(tokens.div_ceil(most));
        let firsts = (0..tokens).step_by(most);
        let sums = firsts.map(|first| self.large_m_range(first, most.min(tokens - first)));
        CubeBackend::float_cat(sums.collect(), 0)
    }

    fn large_m_range(&self, first: usize, tokens: usize) -> CubeTensor {
        let [_, slots] = self.ids.shape().dims();
        let pairs = tokens * slots;
        let x = aligned(narrow(&self.x, first, tokens));
        let ids = into_contiguous(narrow(&self.ids, first, tokens));
        let scores = into_contiguous(narrow(&self.scores, first, tokens));
        let [gate_up, down] = self.experts.matrices();
        let large_m = LargeMTiles::of_pairs(&x, pairs, self.experts.matrices());
        let sorted = sort(&ids, gate_up.count, large_m.rows(x.dtype));
        // A row for every pair.
        let rows_of_pairs = output(&x, [pairs, down.rows], DType::F32);
        if has_tiles(&x, self.experts.matrices()) {
            let columns = large_m.hidden_columns(down);
            let layout = self.experts.hidden(columns, DType::BF16, terms(x.dtype));
            let hidden = layout.output(&x, pairs);
            let gated = LargeM {
                sorted: Some(&sorted),
                scores: Some(&scores),
                gated: Some(down.format),
                pairs,
                pairs_per_row: slots,
                limit: self.experts.limit,
                ..LargeM::of_rows(&x, gate_up, large_m)
            };
            gated.launch(&hidden);
            LargeM {
                x: &layout.finish(hidden),
                scores: None,
                matrices: down,
                gated: None,
                permuted: true,
                pairs_per_row: 1,
                ..gated
            }
            .launch(&rows_of_pairs);
        } else {
            let (grouping, scores) = (Grouping::Sorted(&sorted), Some(&scores));
            let experts = &self.experts;
            experts.plain(&x, scores, &grouping, None, Role::Rows, &rows_of_pairs);
        }
        sum_slots(rows_of_pairs, &ids, gate_up.count)
    }
}
