use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::Matrices;
use super::few::cubes_of;
use crate::packed::kernel::{FewBlueprint, Pairing, few_pair_kernel};

/// A launch of [`few_pair_kernel`].
pub(crate) struct FewPair<'a> {
    pub x: &'a CubeTensor,
    /// Of one format and as many columns, so that one blueprint is that of both.
    pub matrices: [&'a Matrices; 2],
    pub blueprint: FewBlueprint,
}

impl FewPair<'_> {
    /// Writes the products with both matrices.
    pub(crate) fn launch(self, [result, other_result]: [&CubeTensor; 2]) {
        let [matrices, other] = self.matrices;
        let client = self.x.client.clone();
        let size = 16 / self.x.elem_size();
        let tiles = self.matrices.map(|matrices| matrices.rows.div_ceil(16));
        let all = tiles[0] + tiles[1];
        // One for each matrix at least.
        let cubes = cubes_of(&client, all).max(2);
        let first = (cubes * tiles[0] + all / 2) / all;
        let x_vectors = self.x.meta.strides()[0] / size;
        // SAFETY: rows and columns past the end are read as others, and not used; writes are within the outputs.
        unsafe {
            few_pair_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes as u32, 1, 1),
                self.blueprint.cube_dim(),
                // Offsets in shared memory that are as wide as addresses are part of the instructions.
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
