use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::{Matrices, optional, parts};
use crate::intrinsics::Target;
use crate::launching::{has_fp8_conversion, processors};
use crate::packed::kernel::{Columns, FewBlueprint, Format, Pairing, few_kernel, few_sum_kernel};

/// Planes of a cube of the few rows' kernels, at most: so many that a unit has no more than 128 registers.
const PLANES: usize = 16;
/// Planes that share a tile, at most.
const TILE_PLANES: usize = 8;
/// Bytes of `x` that those stage, at most.
const STAGED_BYTES: usize = 70 << 10;
/// Sums of tiles and planes that wait in shared memory: 512 bytes each.
const WAITING: usize = 48;
/// Planes that share a tile where the pairs of tokens are added up, at most.
const SUM_PLANES: usize = 4;
/// Tiles of a cube that adds up the pairs of tokens.
const SUM_TILES: u32 = 2;

impl FewBlueprint {
    /// For so many rows of `x`, or pairs with one.
    pub fn new(
        x: DType,
        ordered: bool,
        matrices: &Matrices,
        (rows, pairs): (usize, usize),
        client: &Client,
    ) -> Self {
        // The sums of all pairs and of all planes that share a tile have to be kept, where they are added up.
        let sharing = if ordered { SUM_PLANES } else { TILE_PLANES };
        let blueprint = Self::cut(x, ordered, matrices, (pairs, sharing), client);
        let of = |lines| Self { lines, ..blueprint };
        if ordered {
            let all = of(pairs.next_power_of_two() as u32 * blueprint.columns.parts);
            let few = all.staged_bytes() <= STAGED_BYTES && all.fits(client);
            return if few { all } else { blueprint };
        }
        let parts = blueprint.columns.parts;
        let mut lines = (rows.next_power_of_two() as u32 * parts).min(8);
        while lines > parts && of(lines).staged_bytes() > STAGED_BYTES {
            lines /= 2;
        }
        of(lines)
    }

    /// For so many planes to a tile at most, without rows of `x`.
    fn cut(
        x: DType,
        ordered: bool,
        matrices: &Matrices,
        (pairs, sharing): (usize, usize),
        client: &Client,
    ) -> Self {
        let stretch = matrices.format.stretch() as usize;
        let stretches = matrices.columns.div_ceil(stretch);
        let rounds = stretches.div_ceil(sharing);
        let planes = stretches.div_ceil(rounds);
        let groups = PLANES / planes;
        Self {
            columns: Columns {
                format: matrices.format,
                parts: parts(x),
                ordered,
                halves: matrices.format == Format::Fp8 && !ordered && has_fp8_conversion(client),
            },
            pairs: pairs.next_power_of_two().max(8) as u32,
            pairing: Pairing::Ids,
            lines: 0,
            planes: planes as u32,
            rounds: rounds as u32,
            groups: groups as u32,
            cube_planes: (planes * groups) as u32,
            batch: if ordered {
                SUM_TILES
            } else {
                (WAITING / (planes * groups)).max(1) as u32
            },
            even: matrices.columns == planes * rounds * stretch,
            target: Target::of(client),
        }
    }

    /// For the tokens of a shared expert, of which all are in shared memory. Where the experts of tokens have been added up, as many
    /// planes as there are multiply by it.
    pub(super) fn of_shared(x: DType, matrices: &Matrices, tokens: usize, client: &Client) -> Self {
        let blueprint = Self::cut(x, true, matrices, (tokens, TILE_PLANES), client);
        Self {
            lines: tokens.next_power_of_two() as u32 * blueprint.columns.parts,
            ..blueprint
        }
    }

    /// With as many planes to a cube as the other needs.
    pub(super) fn side_by_side([one, other]: [Self; 2]) -> [Self; 2] {
        let cube_planes = one.cube_planes.max(other.cube_planes);
        [one, other].map(|blueprint| Self {
            cube_planes,
            ..blueprint
        })
    }

    /// Whether shared memory is large enough.
    pub fn fits(&self, client: &Client) -> bool {
        let most = client.properties().hardware.max_shared_memory_size;
        self.staged_bytes() <= STAGED_BYTES && self.shared_bytes() <= most
    }

    pub(super) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(32, self.cube_planes)
    }

    /// The cubes that add up the pairs of tokens.
    pub(super) fn sum_cubes(&self, rows: usize) -> CubeCount {
        CubeCount::Static(rows.div_ceil(16 * self.batch as usize) as u32, 1, 1)
    }

    /// For pairs that find their matrices in this way.
    pub(super) fn paired(self, pairing: Pairing) -> Self {
        let pairs = if pairing == Pairing::Ids {
            self.pairs
        } else {
            8
        };
        Self {
            pairs,
            pairing,
            ..self
        }
    }
}

/// A cube for each multiprocessor, but no more than there are tiles.
pub(super) fn cubes_of(client: &Client, tiles: usize) -> usize {
    (processors(client) as usize).min(tiles)
}

/// A launch of [`few_kernel`].
pub(crate) struct Few<'a> {
    pub x: &'a CubeTensor,
    /// How pairs find their matrices, and their ids if it is by them.
    pub pairing: Pairing,
    pub ids: Option<&'a CubeTensor>,
    pub scores: Option<&'a CubeTensor>,
    pub matrices: &'a Matrices,
    pub gated: Option<Format>,
    pub pairs: usize,
    pub share: usize,
    pub limit: f64,
    pub blueprint: FewBlueprint,
}

impl Few<'_> {
    pub(crate) fn launch(self, result: &CubeTensor) {
        let matrices = self.matrices;
        let pairing = self.pairing;
        let blueprint = self.blueprint.paired(pairing);
        let client = self.x.client.clone();
        let size = 16 / self.x.elem_size();
        let groups = match pairing {
            Pairing::Ids => self.pairs.min(matrices.count),
            Pairing::One => 1,
            Pairing::Every => matrices.count,
        };
        let tiles = matrices.rows.div_ceil(16) * groups;
        let ids_dtype = self.ids.map_or(DType::U32, |ids| ids.dtype);
        let dtypes = [self.x.dtype, ids_dtype, result.dtype].map(dtype_to_storage_type);
        let x_vectors = self.x.meta.strides()[0] / size;
        // SAFETY: rows and columns past the end are read as others, and not used; ids are those of matrices; writes are within the
        // output.
        unsafe {
            few_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes_of(&client, tiles) as u32, 1, 1),
                blueprint.cube_dim(),
                // Offsets in shared memory that are as wide as addresses are part of the instructions.
                AddressType::U64,
                size,
                matrices.scale_vector(),
                self.x.clone().into_buffer_arg(),
                optional(self.ids),
                optional(self.scores),
                matrices.words_arg(),
                matrices.scales_arg(),
                result.clone().into_buffer_arg(),
                self.pairs as u32,
                self.share as u32,
                matrices.count as u32,
                x_vectors,
                matrices.stack(),
                self.limit as f32,
                self.gated,
                blueprint,
                dtypes,
            );
        }
    }
}

/// Launches [`few_sum_kernel`] without a shared expert.
pub(crate) fn launch_sum(
    hidden: CubeTensor,
    ids: &CubeTensor,
    slots: usize,
    matrices: &Matrices,
    blueprint: FewBlueprint,
    result: &CubeTensor,
) {
    let client = hidden.client.clone();
    let [tokens, rows] = [result.meta.shape()[0], matrices.rows];
    // SAFETY: as above.
    unsafe {
        few_sum_kernel::launch_unchecked(
            &client,
            blueprint.sum_cubes(rows),
            blueprint.cube_dim(),
            AddressType::U64,
            matrices.scale_vector(),
            matrices.scale_vector(),
            hidden.clone().into_buffer_arg(),
            hidden.into_buffer_arg(),
            ids.clone().into_buffer_arg(),
            matrices.words_arg(),
            matrices.scales_arg(),
            matrices.words_arg(),
            matrices.scales_arg(),
            result.clone().into_buffer_arg(),
            tokens as u32,
            slots as u32,
            matrices.count as u32,
            matrices.stack(),
            matrices.stack(),
            blueprint,
            None,
            [ids.dtype, result.dtype].map(dtype_to_storage_type),
        );
    }
}
