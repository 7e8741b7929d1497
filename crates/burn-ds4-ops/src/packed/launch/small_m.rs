use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::{Matrices, optional, terms};
use crate::intrinsics::Target;
use crate::launching::{has_fp8_conversion, processors};
use crate::packed::kernel::{
    InputLayout, Pairing, SmallMBlueprint, WeightFormat, small_m_kernel, small_m_sum_kernel,
};

/// Planes of a cube of the small-M kernels, at most: with more, a unit would have fewer than 128
/// registers.
const CUBE_PLANES: usize = 16;
/// Planes that split K of a tile, at most.
const SPLIT_K_PLANES: usize = 8;
/// Bytes of `x` in shared memory, at most.
const MAX_X_BYTES: usize = 70 << 10;
/// Partials in shared memory, one for each tile and plane of 512 bytes, at most.
const MAX_PARTIALS: usize = 48;
/// Planes that split K of a tile where the pairs of tokens are summed, at most.
const SUM_SPLIT_K_PLANES: usize = 4;
/// Tiles of a cube that sums the pairs of tokens.
const SUM_TILES: u32 = 2;

impl SmallMBlueprint {
    /// The blueprint for a number of rows of `x` and of pairs.
    pub fn new(
        x: DType,
        permuted: bool,
        matrices: &Matrices,
        (rows, pairs): (usize, usize),
        client: &Client,
    ) -> Self {
        // Where pairs are summed, the partials of all pairs and planes have to fit.
        let max_planes = if permuted {
            SUM_SPLIT_K_PLANES
        } else {
            SPLIT_K_PLANES
        };
        let blueprint = Self::with_split(x, permuted, matrices, (pairs, max_planes), client);
        let with_rows = |x_rows| Self {
            x_rows,
            ..blueprint
        };
        if permuted {
            let all = with_rows(pairs.next_power_of_two() as u32 * blueprint.input.terms);
            let fits = all.x_bytes() <= MAX_X_BYTES && all.fits(client);
            return if fits { all } else { blueprint };
        }
        let terms = blueprint.input.terms;
        let mut x_rows = (rows.next_power_of_two() as u32 * terms).min(8);
        while x_rows > terms && with_rows(x_rows).x_bytes() > MAX_X_BYTES {
            x_rows /= 2;
        }
        with_rows(x_rows)
    }

    /// Without rows of `x` in shared memory, for at most `max_planes` planes to a tile.
    fn with_split(
        x: DType,
        permuted: bool,
        matrices: &Matrices,
        (pairs, max_planes): (usize, usize),
        client: &Client,
    ) -> Self {
        let k_block = matrices.format.k_block() as usize;
        let k_blocks = matrices.columns.div_ceil(k_block);
        let plane_k_blocks = k_blocks.div_ceil(max_planes);
        let planes = k_blocks.div_ceil(plane_k_blocks);
        let plane_groups = CUBE_PLANES / planes;
        Self {
            input: InputLayout {
                format: matrices.format,
                terms: terms(x),
                permuted,
                f16_input: matrices.format == WeightFormat::Fp8
                    && !permuted
                    && has_fp8_conversion(client),
            },
            pairs: pairs.next_power_of_two().max(8) as u32,
            pairing: Pairing::Ids,
            x_rows: 0,
            planes: planes as u32,
            plane_k_blocks: plane_k_blocks as u32,
            plane_groups: plane_groups as u32,
            cube_planes: (planes * plane_groups) as u32,
            partial_tiles: if permuted {
                SUM_TILES
            } else {
                (MAX_PARTIALS / (planes * plane_groups)).max(1) as u32
            },
            k_aligned: matrices.columns == planes * plane_k_blocks * k_block,
            target: Target::of(client),
        }
    }

    /// For the tokens of a shared expert, whose rows are all in shared memory. It is part of the
    /// launch that sums pairs, where as many planes as there are multiply by it.
    pub(super) fn for_shared_expert(
        x: DType,
        matrices: &Matrices,
        tokens: usize,
        client: &Client,
    ) -> Self {
        let blueprint = Self::with_split(x, true, matrices, (tokens, SPLIT_K_PLANES), client);
        Self {
            x_rows: tokens.next_power_of_two() as u32 * blueprint.input.terms,
            ..blueprint
        }
    }

    /// Gives both blueprints the larger number of planes to a cube.
    pub(super) fn with_common_planes([one, other]: [Self; 2]) -> [Self; 2] {
        let cube_planes = one.cube_planes.max(other.cube_planes);
        [one, other].map(|blueprint| Self {
            cube_planes,
            ..blueprint
        })
    }

    /// Whether shared memory is large enough.
    pub fn fits(&self, client: &Client) -> bool {
        let most = client.properties().hardware.max_shared_memory_size;
        self.x_bytes() <= MAX_X_BYTES && self.shared_bytes() <= most
    }

    pub(super) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(32, self.cube_planes)
    }

    /// The cubes that sum the pairs of tokens.
    pub(super) fn sum_cubes(&self, rows: usize) -> CubeCount {
        CubeCount::Static(rows.div_ceil(16 * self.partial_tiles as usize) as u32, 1, 1)
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

/// A launch of [`small_m_kernel`].
pub(crate) struct SmallM<'a> {
    pub x: &'a CubeTensor,
    /// How pairs find their matrices, and the ids for [`Pairing::Ids`].
    pub pairing: Pairing,
    pub ids: Option<&'a CubeTensor>,
    pub scores: Option<&'a CubeTensor>,
    pub matrices: &'a Matrices,
    pub gated: Option<WeightFormat>,
    pub pairs: usize,
    pub pairs_per_row: usize,
    pub limit: f64,
    pub blueprint: SmallMBlueprint,
}

impl SmallM<'_> {
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
        // SAFETY: rows and columns past the end are read as others, and not used; ids are those of
        // matrices; writes are within the output.
        unsafe {
            small_m_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes_of(&client, tiles) as u32, 1, 1),
                blueprint.cube_dim(),
                // Offsets in shared memory that are as wide as addresses are part of the
                // instructions.
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
                self.pairs_per_row as u32,
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

/// Launches [`small_m_sum_kernel`] without a shared expert.
pub(crate) fn launch_sum(
    hidden: CubeTensor,
    ids: &CubeTensor,
    slots: usize,
    matrices: &Matrices,
    blueprint: SmallMBlueprint,
    result: &CubeTensor,
) {
    let client = hidden.client.clone();
    let [tokens, rows] = [result.meta.shape()[0], matrices.rows];
    // SAFETY: rows and columns past the end are read as others, and not used; pairs whose ids are
    // no matrices' are left out; writes are within `[tokens, rows]`.
    unsafe {
        small_m_sum_kernel::launch_unchecked(
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
