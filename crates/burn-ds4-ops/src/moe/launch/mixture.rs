use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::Routed;
use crate::launching::{aligned, output};
use crate::packed::launch::{
    FEW_PAIRS, FEW_ROWS, Grouping, Matrices, Mixture, MixtureBlueprint, Plain, Role, can_multiply,
    has_tiles,
};

/// What a few tokens' experts are called with, those they are routed to and the one they share.
pub(crate) struct WithShared {
    pub routed: Routed,
    pub gate_up: Matrices,
    pub down: Matrices,
    pub limit: f64,
}

impl WithShared {
    /// No decision depends on how many tokens there are, as long as they are few: a token's result would.
    pub fn can_launch(&self) -> bool {
        let [tokens, slots] = self.routed.ids.shape().dims();
        let x = &self.routed.x;
        let few = tokens <= FEW_ROWS && FEW_ROWS * slots <= FEW_PAIRS;
        if !few || !self.routed.can_launch() || !can_multiply(x, [&self.gate_up, &self.down]) {
            return false;
        }
        match self.tiles() {
            [true, true] => MixtureBlueprint::new(&self.mixture(), FEW_ROWS, slots).is_some(),
            [false, false] => true,
            _ => false,
        }
    }

    /// Whether tensor cores multiply by the experts, and by the shared one.
    fn tiles(&self) -> [bool; 2] {
        let x = &self.routed.x;
        [
            has_tiles(x, [&self.routed.gate_up, &self.routed.down]),
            has_tiles(x, [&self.gate_up, &self.down]),
        ]
    }

    fn mixture(&self) -> Mixture<'_> {
        Mixture {
            x: &self.routed.x,
            ids: &self.routed.ids,
            scores: &self.routed.scores,
            experts: [&self.routed.gate_up, &self.routed.down],
            shared: [&self.gate_up, &self.down],
            limits: [self.routed.limit, self.limit],
        }
    }

    /// The sums in the dtype of `x`.
    pub fn launch(self) -> CubeTensor {
        let [tokens, slots] = self.routed.ids.shape().dims();
        let dtype = self.routed.x.dtype;
        let this = Self {
            routed: self.routed.prepared(),
            gate_up: self.gate_up.contiguous(),
            down: self.down.contiguous(),
            limit: self.limit,
        };
        if this.tiles() == [false, false] {
            return this.plain(dtype);
        }
        let mixture = this.mixture();
        let blueprint = MixtureBlueprint::new(&mixture, tokens, slots);
        mixture.launch(blueprint.expect("fewer than fit"), dtype)
    }

    /// By the kernel for any device: both products of the shared expert, then those of the others, to which they are added.
    fn plain(self, dtype: DType) -> CubeTensor {
        let [tokens, _] = self.routed.ids.shape().dims();
        let x = &self.routed.x;
        let hidden = output(x, [tokens, self.down.columns], dtype);
        let shared = output(x, [tokens, self.down.rows], DType::F32);
        let gated = Plain {
            x,
            grouping: &Grouping::One,
            scores: None,
            addend: None,
            matrices: &self.gate_up,
            role: Role::Gated,
            pairs: tokens,
            share: 1,
            slots: 1,
            limit: self.limit,
        };
        gated.launch(&hidden);
        let down = Plain {
            x: &hidden,
            matrices: &self.down,
            role: Role::Rows,
            ..gated
        };
        down.launch(&shared);
        self.routed.plain_few(Some(&shared), dtype)
    }
}

impl Routed {
    /// As kernels read it.
    pub(super) fn prepared(self) -> Self {
        Self {
            x: aligned(self.x),
            ids: into_contiguous(self.ids),
            scores: into_contiguous(self.scores),
            gate_up: self.gate_up.contiguous(),
            down: self.down.contiguous(),
            limit: self.limit,
        }
    }
}
