use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::{Experts, Routed};
use crate::gemm::launch::{
    Grouping, Mixture, MixtureBlueprint, Portable, Role, SMALL_M_PAIRS, SMALL_M_ROWS, SharedExpert,
    can_multiply, has_tiles,
};
use crate::launching::{aligned, output};

/// Arguments of a mixture of experts for a small number of tokens: the routed experts and the
/// shared one.
pub(crate) struct WithShared {
    pub routed: Routed,
    pub shared: Experts,
}

impl WithShared {
    /// For small M, no decision depends on the number of tokens, because a token's result would
    /// then depend on it.
    pub fn can_launch(&self) -> bool {
        let [tokens, slots] = self.routed.ids.shape().dims();
        let x = &self.routed.x;
        let small = tokens <= SMALL_M_ROWS && SMALL_M_ROWS * slots <= SMALL_M_PAIRS;
        if !small || !self.routed.can_launch() || !can_multiply(x, self.shared.matrices()) {
            return false;
        }
        match self.tiles() {
            [true, true] => MixtureBlueprint::new(&self.mixture()).is_some(),
            [false, false] => true,
            _ => false,
        }
    }

    /// Whether tensor cores multiply by the routed experts, and by the shared one.
    fn tiles(&self) -> [bool; 2] {
        let x = &self.routed.x;
        [
            has_tiles(x, self.routed.experts.matrices()),
            has_tiles(x, self.shared.matrices()),
        ]
    }

    fn mixture(&self) -> Mixture<'_> {
        let shared = SharedExpert {
            matrices: self.shared.matrices(),
            limit: self.shared.limit,
            rounded: self.shared.rounded,
        };
        Mixture {
            shared: Some(shared),
            ..self.routed.mixture()
        }
    }

    /// The sums in the dtype of `x`.
    pub fn launch(self) -> CubeTensor {
        let dtype = self.routed.x.dtype;
        let this = Self {
            routed: self.routed.prepared(),
            shared: self.shared.contiguous(),
        };
        if this.tiles() == [false, false] {
            return this.plain(dtype);
        }
        let mixture = this.mixture();
        let blueprint = MixtureBlueprint::new(&mixture).expect("checked by can_launch");
        mixture.launch(&blueprint, dtype)
    }

    /// Uses the kernel for any device: both products of the shared expert, then those of the routed
    /// ones, whose sums are added to it.
    fn plain(self, dtype: DType) -> CubeTensor {
        let [tokens, _] = self.routed.ids.shape().dims();
        let x = &self.routed.x;
        let [gate_up, down] = self.shared.matrices();
        let layout = self.shared.plain_hidden(x);
        let hidden = layout.output(x, tokens);
        let shared = output(x, [tokens, down.rows], DType::F32);
        let gated = Portable {
            x,
            grouping: &Grouping::One,
            scores: None,
            addend: None,
            matrices: gate_up,
            role: Role::Gated,
            pairs: tokens,
            pairs_per_row: 1,
            slots: 1,
            limit: self.shared.limit,
        };
        gated.launch(&hidden);
        Portable {
            x: &layout.finish(hidden),
            matrices: down,
            role: Role::Rows,
            ..gated
        }
        .launch(&shared);
        self.routed.plain_small_m(Some(&shared), dtype)
    }
}

impl Routed {
    /// The arguments as kernels read them.
    pub(super) fn prepared(self) -> Self {
        Self {
            x: aligned(self.x),
            ids: into_contiguous(self.ids),
            scores: into_contiguous(self.scores),
            experts: self.experts.contiguous(),
        }
    }
}
