use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::Matrices;
use super::small_m::cubes_of;
use crate::packed::kernel::{Pairing, SmallMBlueprint, small_m_pair_kernel};

/// A launch of [`small_m_pair_kernel`].
pub(crate) struct SmallMPair<'a> {
    pub x: &'a CubeTensor,
    /// Of one format and number of columns, so that one blueprint fits both.
    pub matrices: [&'a Matrices; 2],
    pub blueprint: SmallMBlueprint,
}

impl SmallMPair<'_> {
    /// Writes the products with both matrices.
    pub(crate) fn launch(self, [result, other_result]: [&CubeTensor; 2]) {
        let [matrices, other] = self.matrices;
        let client = self.x.client.clone();
        let size = 16 / self.x.elem_size();
        let tiles = self.matrices.map(|matrices| matrices.rows.div_ceil(16));
        let all = tiles[0] + tiles[1];
        // At least one cube for each matrix.
        let cubes = cubes_of(&client, all).max(2);
        let first = (cubes * tiles[0] + all / 2) / all;
        let x_vectors = self.x.meta.strides()[0] / size;
        // SAFETY: rows and columns past the end are read as others, and not used; writes are within
        // the outputs.
        unsafe {
            small_m_pair_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes as u32, 1, 1),
                self.blueprint.cube_dim(),
                // Offsets in shared memory that are as wide as addresses are part of the
                // instructions.
                AddressType::U64,
                size,
                matrices.scale_vector(),
                self.x.clone().into_buffer_arg(),
                matrices.words_arg(),
                matrices.scales_arg(),
                other.words_arg(),
                other.scales_arg(),
                result.clone().into_buffer_arg(),
                other_result.clone().into_buffer_arg(),
                self.x.meta.shape()[0] as u32,
                first.clamp(1, cubes - 1) as u32,
                x_vectors,
                matrices.stack(),
                other.stack(),
                self.blueprint.paired(Pairing::One),
                dtype_to_storage_type(self.x.dtype),
            );
        }
    }
}
