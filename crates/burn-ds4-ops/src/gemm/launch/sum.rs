use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::stream::{DOWN_SPLIT_K_PLANES, small_pairs};
use super::work::{Blueprints, CubeWork};
use crate::caps::Caps;
use crate::gemm::Matrices;
use crate::gemm::kernel::{
    InputLayout, PairSizesLaunch, Pairing, StreamBlueprint, SumProblemLaunch, slot_sum_kernel,
};

/// Planes that split K of a tile of a shared expert, at most.
const SHARED_SPLIT_K_PLANES: usize = 8;

/// Planes of a cube, at most, and its tiles: the best first.
const BUDGETS: [(usize, u32); 4] = [(16, 2), (8, 2), (8, 1), (4, 1)];

/// How a launch that sums the pairs of tokens is compiled. `None` where shared memory is too small
/// for any number of tokens up to [`SMALL_M_ROWS`](super::SMALL_M_ROWS).
pub(crate) fn sum_blueprints(
    dtype: DType,
    experts: &Matrices,
    shared: Option<&Matrices>,
    (tokens, slots): (usize, usize),
    caps: &Caps,
) -> Option<Blueprints> {
    let of = |&(planes, tiles): &(usize, u32), tokens: usize| {
        let blueprints = |x_in_shared| {
            let of = |matrices: &Matrices, (slots, pairing): (usize, Pairing), most| {
                let split = StreamBlueprint::split(dtype, matrices, most, (caps, planes));
                let rows = (tokens.next_power_of_two() * slots) as u32 * split.input.terms;
                StreamBlueprint {
                    input: InputLayout {
                        permuted: true,
                        f16_input: false,
                        ..split.input
                    },
                    pairs: small_pairs(tokens * slots),
                    pairing,
                    one_token: tokens == 1,
                    x_rows: if x_in_shared { rows } else { 0 },
                    partial_tiles: tiles,
                    ..split
                }
            };
            // A group of planes for each tile.
            let most = SHARED_SPLIT_K_PLANES.min(planes / tiles as usize);
            let shared = shared.map(|matrices| of(matrices, (1, Pairing::One), most));
            let experts = of(experts, (slots, Pairing::Ids), DOWN_SPLIT_K_PLANES);
            Blueprints::new(experts, shared)
        };
        // All rows of `x` are in shared memory, or none.
        let with_x = blueprints(true);
        match with_x.fits(caps, CubeWork::Both) {
            true => with_x,
            false => blueprints(false),
        }
    };
    Blueprints::by_budget(&BUDGETS, tokens, (caps, CubeWork::Both), of)
}

/// Multiplies the rows of all pairs by their matrices, and sums those of each token. `problems` are
/// the experts', and the shared expert's if there is one: rows of `x` in the order in which kernels
/// read them, and a stack of matrices. `ids` are `[tokens, slots]`, `output` is `[tokens, rows]`.
pub(crate) fn launch_sum(
    ids: &CubeTensor,
    problems: &[(CubeTensor, &Matrices)],
    blueprints: &Blueprints,
    output: &CubeTensor,
) {
    let (x, matrices) = &problems[0];
    // Something else to bind where there is no shared expert.
    let (shared_x, shared) = problems.get(1).unwrap_or(&problems[0]);
    let arg = |x: &CubeTensor, matrices: &Matrices| {
        SumProblemLaunch::new(x.clone().into_buffer_arg(), matrices.arg())
    };
    let client = ids.client.clone();
    let [tokens, slots] = [ids.meta.shape()[0], ids.meta.shape()[1]];
    let Blueprints { first: own, second } = *blueprints;
    let tiles = 16 * own.partial_tiles as usize;
    let dtypes = [ids.dtype, output.dtype].map(dtype_to_storage_type);
    // SAFETY: rows and columns past the end are read as others, and not used; ids are those of
    // matrices; writes are within the output.
    unsafe {
        slot_sum_kernel::launch_unchecked(
            &client,
            CubeCount::Static(matrices.rows.div_ceil(tiles) as u32, 1, 1),
            own.cube_dim(),
            // Offsets in shared memory that are as wide as addresses are part of the instructions.
            AddressType::U64,
            Some(ids.clone().into_buffer_arg()).into(),
            arg(x, matrices),
            arg(shared_x, shared),
            output.clone().into_buffer_arg(),
            PairSizesLaunch::new(tokens as u32, slots as u32),
            own,
            second,
            dtypes,
        );
    }
}
