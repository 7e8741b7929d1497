//! The host side: which kernels, and for how many tokens at a time.

mod mixture;

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::backend::PackedExperts;
use crate::gemm::launch::{
    Grouping, Hidden, LargeM, LargeMTiles, Mixture, MixtureBlueprint, Portable, Role,
    SMALL_M_PAIRS, SMALL_M_ROWS, can_multiply, has_tiles, sort, sum_slots,
};
use crate::gemm::{Matrices, terms};
use crate::launching::{aligned, is_wide_int, narrow, output};

pub(super) use mixture::WithShared;

/// Pairs that are multiplied at a time: the sums of every pair and column of the output are in
/// memory.
const MAX_PAIRS: usize = 1 << 16;
/// Bytes of those sums, at most.
const MAX_SUMS: usize = 1 << 30;

/// Matrices of experts of one kind.
pub(crate) struct Experts {
    /// Gate and up, and down.
    matrices: [Matrices; 2],
    limit: f64,
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
    fn matrices(&self) -> [&Matrices; 2] {
        self.matrices.each_ref()
    }

    /// The hidden values for the kernel for any device.
    fn plain_hidden(&self, x: &CubeTensor) -> Hidden<'_> {
        let [_, down] = self.matrices();
        Hidden {
            down,
            columns: down.columns,
            dtype: x.dtype,
            terms: 1,
            rounded: self.rounded,
        }
    }

    fn contiguous(self) -> Self {
        Self {
            matrices: self.matrices.map(Matrices::contiguous),
            ..self
        }
    }
}

/// Arguments of the routed experts.
pub(crate) struct Routed {
    pub x: CubeTensor,
    pub ids: CubeTensor,
    pub scores: CubeTensor,
    pub experts: Experts,
}

impl Routed {
    pub(crate) fn can_launch(&self) -> bool {
        let [_, slots] = self.ids.shape().dims();
        is_wide_int(self.ids.dtype)
            && slots <= SMALL_M_PAIRS
            && can_multiply(&self.x, self.experts.matrices())
    }

    pub(crate) fn launch(self) -> CubeTensor {
        let this = self.prepared();
        let [tokens, slots] = this.ids.shape().dims();
        let tiles = has_tiles(&this.x, this.experts.matrices());
        // For small M, no decision depends on the number of tokens, because a token's result would
        // then depend on it.
        if tokens > SMALL_M_ROWS || SMALL_M_ROWS * slots > SMALL_M_PAIRS {
            return this.large_m(tiles);
        }
        if !tiles {
            return this.plain_small_m(None, DType::F32);
        }
        let mixture = this.mixture();
        match MixtureBlueprint::new(&mixture) {
            Some(blueprint) => mixture.launch(&blueprint, DType::F32),
            None => this.large_m(tiles),
        }
    }

    /// Without a shared expert.
    fn mixture(&self) -> Mixture<'_> {
        Mixture {
            x: &self.x,
            ids: &self.ids,
            scores: &self.scores,
            experts: self.experts.matrices(),
            limit: self.experts.limit,
            rounded: self.experts.rounded,
            shared: None,
        }
    }

    /// Uses the kernel for any device, for a small number of tokens; adds `addend` to the sums, if
    /// there is one.
    fn plain_small_m(self, addend: Option<&CubeTensor>, dtype: DType) -> CubeTensor {
        let [tokens, _] = self.ids.shape().dims();
        let [_, down] = self.experts.matrices();
        let sums = output(&self.x, [tokens, down.rows], dtype);
        let grouping = Grouping::Small(&self.ids);
        let (scores, role) = (&self.scores, Role::Sum);
        self.plain((&self.x, scores, addend), &grouping, role, &sums);
        sums
    }

    /// Both products of some of the tokens by the kernel for any device, the second in `role`.
    fn plain(
        &self,
        (x, scores, addend): (&CubeTensor, &CubeTensor, Option<&CubeTensor>),
        grouping: &Grouping<'_>,
        role: Role,
        result: &CubeTensor,
    ) {
        let [tokens, slots] = scores.shape().dims();
        let pairs = tokens * slots;
        let [gate_up, down] = self.experts.matrices();
        let layout = self.experts.plain_hidden(x);
        let hidden = layout.output(x, pairs);
        let gated = Portable {
            x,
            grouping,
            scores: Some(scores),
            addend: None,
            matrices: gate_up,
            role: Role::Gated,
            pairs,
            pairs_per_row: slots,
            slots,
            limit: self.experts.limit,
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

    /// Computes a part of the tokens at a time if their sums would take too much memory.
    fn large_m(self, tiles: bool) -> CubeTensor {
        let [tokens, slots] = self.ids.shape().dims();
        let [_, down] = self.experts.matrices();
        let most = (MAX_PAIRS / slots)
            .min(MAX_SUMS / (slots * down.rows * 4))
            .max(1);
        if tokens <= most {
            return self.large_m_range(0, tokens, tiles);
        }
        // Parts of the same size have tiles of the same height, which leave less over.
        let most = tokens.div_ceil(tokens.div_ceil(most));
        let firsts = (0..tokens).step_by(most);
        let sums = firsts.map(|first| self.large_m_range(first, most.min(tokens - first), tiles));
        CubeBackend::float_cat(sums.collect(), 0)
    }

    fn large_m_range(&self, first: usize, tokens: usize, tiles: bool) -> CubeTensor {
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
        if tiles {
            let layout = Hidden {
                down,
                columns: large_m.hidden_columns(down),
                dtype: DType::BF16,
                terms: terms(x.dtype),
                rounded: self.experts.rounded,
            };
            let hidden = layout.output(&x, pairs);
            LargeM {
                x: &x,
                sorted: Some(&sorted),
                scores: Some(&scores),
                matrices: gate_up,
                gated: Some(down.format),
                permuted: false,
                pairs,
                groups: 1,
                pairs_per_row: slots,
                tiles: large_m,
                dtype: x.dtype,
                limit: self.experts.limit,
            }
            .launch(&hidden);
            LargeM {
                x: &layout.finish(hidden),
                sorted: Some(&sorted),
                scores: None,
                matrices: down,
                gated: None,
                permuted: true,
                pairs,
                groups: 1,
                pairs_per_row: 1,
                tiles: large_m,
                dtype: x.dtype,
                limit: self.experts.limit,
            }
            .launch(&rows_of_pairs);
        } else {
            let grouping = Grouping::Sorted(&sorted);
            self.plain((&x, &scores, None), &grouping, Role::Rows, &rows_of_pairs);
        }
        sum_slots(rows_of_pairs, &ids, gate_up.count)
    }
}
