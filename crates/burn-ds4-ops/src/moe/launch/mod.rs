//! The host side: which kernels, and for how many tokens at a time.

mod mixture;

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use crate::launching::{aligned, is_wide_int, narrow, output};
use crate::packed::launch::{
    FEW_PAIRS, FEW_ROWS, Few, FewBlueprint, Grouping, Many, Matrices, Pairing, Plain, Role,
    can_multiply, has_tiles, launch_sum, many_tiles, parts, sort, sum_slots,
};

pub(super) use mixture::WithShared;

/// Pairs that are multiplied at a time: their sums, one for each pair and column of the output, have to be kept.
const MAX_PAIRS: usize = 1 << 16;
/// Bytes of the sums, likewise.
const MAX_SUMS: usize = 1 << 30;

/// What the routed experts are called with.
pub(crate) struct Routed {
    pub x: CubeTensor,
    pub ids: CubeTensor,
    pub scores: CubeTensor,
    pub gate_up: Matrices,
    pub down: Matrices,
    pub limit: f64,
}

impl Routed {
    pub(crate) fn can_launch(&self) -> bool {
        let [_, slots] = self.ids.shape().dims();
        is_wide_int(self.ids.dtype)
            && slots <= FEW_PAIRS
            && can_multiply(&self.x, [&self.gate_up, &self.down])
    }

    pub(crate) fn launch(self) -> CubeTensor {
        let this = self.prepared();
        let [tokens, slots] = this.ids.shape().dims();
        let tiles = has_tiles(&this.x, [&this.gate_up, &this.down]);
        // Whatever decides must be the same for any few tokens, or a token's result would depend on their number.
        if tokens > FEW_ROWS || FEW_ROWS * slots > FEW_PAIRS {
            return this.many(tiles);
        }
        let client = this.x.client.clone();
        let blueprints = |rows| {
            let counts = (rows, rows * slots);
            let dtype = this.x.dtype;
            (
                FewBlueprint::new(dtype, false, &this.gate_up, counts, &client),
                FewBlueprint::new(dtype, true, &this.down, counts, &client),
            )
        };
        let most = blueprints(FEW_ROWS);
        if !tiles {
            this.plain_few(None, DType::F32)
        } else if most.0.fits(&client) && most.1.fits(&client) {
            let (blueprint, sum) = blueprints(tokens);
            this.few(blueprint, sum)
        } else {
            this.many(tiles)
        }
    }

    fn few(self, blueprint: FewBlueprint, sum: FewBlueprint) -> CubeTensor {
        let [tokens, slots] = self.ids.shape().dims();
        let pairs = tokens * slots;
        let lines = pairs * parts(self.x.dtype) as usize;
        let hidden = output(&self.x, [lines, self.down.padded_columns()], DType::BF16);
        Few {
            x: &self.x,
            pairing: Pairing::Ids,
            ids: Some(&self.ids),
            scores: Some(&self.scores),
            matrices: &self.gate_up,
            gated: Some(self.down.format),
            pairs,
            share: slots,
            limit: self.limit,
            blueprint,
        }
        .launch(&hidden);
        let sums = output(&self.x, [tokens, self.down.rows], DType::F32);
        launch_sum(hidden, &self.ids, slots, &self.down, sum, &sums);
        sums
    }

    /// With something added to the sums, if there is.
    fn plain_few(self, addend: Option<&CubeTensor>, dtype: DType) -> CubeTensor {
        let [tokens, _] = self.ids.shape().dims();
        let sums = output(&self.x, [tokens, self.down.rows], dtype);
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
        let hidden = output(x, [pairs, self.down.columns], x.dtype);
        Plain {
            x,
            grouping,
            scores: Some(scores),
            addend: None,
            matrices: &self.gate_up,
            role: Role::Gated,
            pairs,
            share: slots,
            slots,
            limit: self.limit,
        }
        .launch(&hidden);
        Plain {
            x: &hidden,
            grouping,
            scores: None,
            addend,
            matrices: &self.down,
            role,
            pairs,
            share: 1,
            slots,
            limit: self.limit,
        }
        .launch(result);
    }

    /// A part of the tokens at a time, if they are very many.
    fn many(self, tiles: bool) -> CubeTensor {
        let [tokens, slots] = self.ids.shape().dims();
        let rows = self.down.rows;
        let most = (MAX_PAIRS / slots)
            .min(MAX_SUMS / (slots * rows * 4))
            .max(1);
        if tokens <= most {
            return self.many_of(0, tokens, tiles);
        }
        let firsts = (0..tokens).step_by(most);
        let sums = firsts.map(|first| self.many_of(first, most.min(tokens - first), tiles));
        CubeBackend::float_cat(sums.collect(), 0)
    }

    fn many_of(&self, first: usize, tokens: usize, tiles: bool) -> CubeTensor {
        let [_, slots] = self.ids.shape().dims();
        let pairs = tokens * slots;
        let x = aligned(narrow(&self.x, first, tokens));
        let ids = into_contiguous(narrow(&self.ids, first, tokens));
        let scores = into_contiguous(narrow(&self.scores, first, tokens));
        let rows = self.down.rows;
        let parts = parts(x.dtype) as usize;
        let columns = many_tiles((pairs * parts).div_ceil(self.gate_up.count));
        let sorted = sort(&ids, self.gate_up.count, 8 * columns / parts);
        // A row for every pair.
        let rows_of_pairs = output(&x, [pairs, rows], DType::F32);
        if tiles {
            let hidden = output(&x, [pairs * parts, self.down.padded_columns()], DType::BF16);
            Many {
                x: &x,
                sorted: Some(&sorted),
                scores: Some(&scores),
                matrices: &self.gate_up,
                gated: Some(self.down.format),
                ordered: false,
                pairs,
                share: slots,
                columns,
                dtype: x.dtype,
                limit: self.limit,
            }
            .launch(&hidden);
            Many {
                x: &hidden,
                sorted: Some(&sorted),
                scores: None,
                matrices: &self.down,
                gated: None,
                ordered: true,
                pairs,
                share: 1,
                columns,
                dtype: x.dtype,
                limit: self.limit,
            }
            .launch(&rows_of_pairs);
        } else {
            let grouping = Grouping::Sorted(&sorted);
            self.plain((&x, &scores, None), &grouping, Role::Rows, &rows_of_pairs);
        }
        sum_slots(rows_of_pairs, &ids, self.gate_up.count)
    }
}
