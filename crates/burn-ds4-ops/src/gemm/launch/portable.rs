use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::stream::small_pairs;
use super::{Grouping, Product, optional};
use crate::caps::{Caps, Target};
use crate::gemm::kernel::{
    CUBE_X_ROWS, EpilogueLaunch, PairsLaunch, PortableBlueprint, Role, WeightFormat, X_ROWS,
    portable_kernel,
};
use crate::launching::address_type;

/// Whether a cube can group so many pairs and sum those of each token.
pub(crate) fn can_sum_pairs(x: &CubeTensor, pairs: usize) -> bool {
    let caps = Caps::of(&x.client);
    caps.fits_shared(sum_bytes(small_pairs(pairs), caps.lanes(), caps.target))
}

/// Bytes of shared memory of a cube that sums the pairs of tokens.
const fn sum_bytes(pairs: u32, plane: u32, target: Target) -> usize {
    let blueprint = PortableBlueprint {
        // Weights are not in shared memory.
        format: WeightFormat::Dense,
        role: Role::Sum,
        pairs: Some(pairs),
        x_rows: 1,
        plane,
        planes: PortableBlueprint::planes_for(Some(pairs), plane),
        target,
    };
    blueprint.shared_bytes()
}

impl Product<'_> {
    /// Launches [`portable_kernel`]. Without a gate, the pairs of a token that are grouped by every
    /// cube are summed.
    pub(super) fn launch_portable(&self, result: &CubeTensor) {
        let matrices = self.matrices;
        let client = self.x.client.clone();
        let caps = Caps::of(&client);
        let (plane, target) = (caps.lanes(), caps.target);
        let (ids, sorted) = match self.grouping {
            Grouping::Ids(ids) => (Some(ids), None),
            _ => (None, self.sorted()),
        };
        let role = match (self.gated, ids) {
            (Some(_), _) => Role::Gated,
            (None, Some(_)) => Role::Sum,
            (None, None) => Role::Rows,
        };
        let pairs = ids.map(|_| small_pairs(self.pairs));
        let planes = PortableBlueprint::planes_for(pairs, plane);
        // Rows of a matrix, if all have as many.
        let rows = self.pairs.div_ceil(matrices.count.max(1)) as u32;
        let blueprint = PortableBlueprint {
            format: matrices.format,
            role,
            pairs,
            x_rows: rows.next_power_of_two().min(X_ROWS),
            plane,
            planes,
            target,
        };
        let groups = match (role, self.grouping) {
            (Role::Sum, _) => 1,
            (_, Grouping::Every) => self.pairs.div_ceil(CUBE_X_ROWS as usize),
            (_, Grouping::Ids(_)) => self.pairs.min(matrices.count),
            (_, Grouping::Sorted(_)) => matrices.count,
        };
        let cubes = self.outputs().div_ceil(planes as usize);
        let slots = ids.map_or(1, |ids| ids.meta.shape()[1]);
        let ids_dtype = ids.map_or(DType::U32, |ids| ids.dtype);
        let dtypes = [self.x.dtype, matrices.element(), ids_dtype, result.dtype];
        // SAFETY: rows past the end are read as the last, ids are those of matrices, writes are
        // within the output.
        unsafe {
            portable_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes as u32, groups as u32, 1),
                CubeDim::new_2d(plane, planes),
                address_type([self.x, &matrices.words, result]),
                self.x.clone().into_buffer_arg(),
                self.x.meta.strides()[0],
                PairsLaunch::new(
                    optional(ids),
                    optional(sorted.map(|sorted| &sorted.order)),
                    optional(sorted.map(|sorted| &sorted.starts)),
                    self.pairs as u32,
                    self.per_row as u32,
                    slots as u32,
                ),
                matrices.arg(),
                EpilogueLaunch::new(
                    optional(self.scores),
                    optional(self.addend),
                    self.limit as f32,
                ),
                result.clone().into_buffer_arg(),
                blueprint,
                dtypes.map(dtype_to_storage_type),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caps::tests::H200;

    #[test]
    fn planes_of_a_lane_need_more_shared_memory_than_every_device_has() {
        let bytes = |plane| sum_bytes(128, plane, H200.target);
        assert_eq!([32, 8, 4].map(bytes), [4_616, 10_760, 18_952]);
        assert_eq!(bytes(1), 68_104);
    }
}
