use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::SMALL_M_ROWS;
use super::stream::{MAX_X_BYTES, small_pairs};
use crate::caps::Caps;
use crate::gemm::Matrices;
use crate::gemm::kernel::{
    InputLayout, StreamBlueprint, SumProblemLaunch, SumSizesLaunch, slot_sum_kernel,
};

/// Planes that split K of a tile where the pairs of tokens are summed, and of a shared expert, at
/// most.
const SPLIT_K_PLANES: usize = 4;
const SHARED_SPLIT_K_PLANES: usize = 8;

/// Planes of a cube, at most, and its tiles: the best first. As with other products, the number of
/// tokens does not matter.
const BUDGETS: [(usize, u32); 4] = [(16, 2), (8, 2), (8, 1), (4, 1)];

/// How a launch that sums the pairs of tokens is compiled, for the routed experts and for the
/// shared one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SumBlueprint {
    experts: StreamBlueprint,
    shared: Option<StreamBlueprint>,
}

impl SumBlueprint {
    /// `None` where shared memory is too small for any number of tokens up to [`SMALL_M_ROWS`].
    pub fn new(
        dtype: DType,
        experts: &Matrices,
        shared: Option<&Matrices>,
        (tokens, slots): (usize, usize),
        caps: &Caps,
    ) -> Option<Self> {
        let of = |budget, tokens| {
            let without_x =
                Self::of_budget(dtype, experts, shared, (tokens, slots), (caps, budget));
            // All rows of `x` are in shared memory, or none.
            let with_x = without_x.with_x_in_shared(tokens, slots);
            if with_x.fits(caps) { with_x } else { without_x }
        };
        let fits = |budget: &&(usize, u32)| of(**budget, SMALL_M_ROWS).fits(caps);
        BUDGETS.iter().find(fits).map(|budget| of(*budget, tokens))
    }

    fn of_budget(
        dtype: DType,
        experts: &Matrices,
        shared: Option<&Matrices>,
        (tokens, slots): (usize, usize),
        (caps, (planes, tiles)): (&Caps, (usize, u32)),
    ) -> Self {
        let of = |matrices: &Matrices, pairs, most| {
            let split = StreamBlueprint::split(dtype, matrices, most, (caps, planes));
            StreamBlueprint {
                input: InputLayout {
                    permuted: true,
                    f16_input: false,
                    ..split.input
                },
                pairs: small_pairs(pairs),
                partial_tiles: tiles,
                ..split
            }
        };
        let experts = of(experts, tokens * slots, SPLIT_K_PLANES);
        // A group of planes for each tile.
        let most = SHARED_SPLIT_K_PLANES.min(planes / tiles as usize);
        let Some(shared) = shared.map(|matrices| of(matrices, tokens, most)) else {
            return Self {
                experts,
                shared: None,
            };
        };
        let [experts, shared] = StreamBlueprint::with_common_planes([experts, shared]);
        Self {
            experts,
            shared: Some(shared),
        }
    }

    fn with_x_in_shared(self, tokens: usize, slots: usize) -> Self {
        let with_rows = |blueprint: StreamBlueprint, rows: usize| StreamBlueprint {
            x_rows: rows.next_power_of_two() as u32 * blueprint.input.terms,
            ..blueprint
        };
        Self {
            experts: with_rows(self.experts, tokens * slots),
            shared: self.shared.map(|shared| with_rows(shared, tokens)),
        }
    }

    /// A cube has the partials and the rows of both.
    fn fits(&self, caps: &Caps) -> bool {
        let both = [Some(self.experts), self.shared];
        let mut bytes = self.experts.other_bytes();
        for blueprint in both.into_iter().flatten() {
            if blueprint.x_bytes() > MAX_X_BYTES {
                return false;
            }
            bytes += blueprint.partial_bytes() + blueprint.x_bytes();
        }
        bytes <= caps.shared_bytes
    }
}

/// Rows of `x` in the order in which kernels read them, and the matrices of a stack.
pub(crate) struct SumProblem<'a> {
    pub x: &'a CubeTensor,
    pub matrices: &'a Matrices,
}

impl SumProblem<'_> {
    fn arg(&self) -> SumProblemLaunch {
        SumProblemLaunch::new(self.x.clone().into_buffer_arg(), self.matrices.arg())
    }
}

/// Multiplies the rows of all pairs by their matrices, and sums those of each token. `ids` are
/// `[tokens, slots]`, `output` is `[tokens, rows]`.
pub(crate) fn launch_sum(
    ids: &CubeTensor,
    experts: &SumProblem<'_>,
    shared: Option<&SumProblem<'_>>,
    blueprint: &SumBlueprint,
    output: &CubeTensor,
) {
    let client = ids.client.clone();
    let [tokens, slots] = [ids.meta.shape()[0], ids.meta.shape()[1]];
    let SumBlueprint {
        experts: own,
        shared: other,
    } = *blueprint;
    let tiles = 16 * own.partial_tiles as usize;
    let dtypes = [ids.dtype, output.dtype].map(dtype_to_storage_type);
    // SAFETY: rows and columns past the end are read as others, and not used; ids are those of
    // matrices; writes are within the output.
    unsafe {
        slot_sum_kernel::launch_unchecked(
            &client,
            CubeCount::Static(experts.matrices.rows.div_ceil(tiles) as u32, 1, 1),
            own.cube_dim(),
            // Offsets in shared memory that are as wide as addresses are part of the instructions.
            AddressType::U64,
            Some(ids.clone().into_buffer_arg()).into(),
            experts.arg(),
            // Something else to bind where there is no shared expert.
            shared.unwrap_or(experts).arg(),
            output.clone().into_buffer_arg(),
            SumSizesLaunch::new(tokens as u32, slots as u32),
            own,
            other,
            dtypes,
        );
    }
}
