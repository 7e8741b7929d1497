use crate::caps::Target;
use crate::gemm::kernel::input::InputLayout;
use crate::gemm::kernel::weights::{ReaderBlueprint, WeightFormat};

/// Columns of weights that a cube multiplies between two barriers.
pub(super) const K_BLOCK: u32 = 128;
/// vec8s of a K-block.
pub(super) const K_BLOCK_VEC8S: u32 = K_BLOCK / 8;
/// vec8s from one row of `x` to the next in shared memory, such that eight lanes that read together
/// have no bank conflict.
pub(super) const ROW_PITCH: u32 = K_BLOCK_VEC8S + 4;
/// Tiles of 16 rows of a plane. Each term of `x` that the plane reads serves both.
pub(super) const ROW_TILES: u32 = 2;

/// How [`large_m_kernel`](super::large_m_kernel) is compiled.
///
/// A cube multiplies `8 * x_tiles` columns, which are rows of `x`, by `32 * planes` rows of
/// weights. The planes share `x`, which goes through shared memory one K-block at a time; each
/// plane reads and decodes its own weights in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LargeMBlueprint {
    /// Formats of the weights and of `x`.
    pub input: InputLayout,
    /// Tiles of 8 columns, which are rows of `x`.
    pub x_tiles: u32,
    pub planes: u32,
    /// Half of the rows are a gate, whose activation is multiplied by the other half and by the
    /// score. The result is in the order in which weights of this format are decoded.
    pub gated: Option<WeightFormat>,
    /// Whether K is a multiple of the K-block.
    pub k_aligned: bool,
    pub target: Target,
}

impl LargeMBlueprint {
    pub const fn reader(self) -> ReaderBlueprint {
        ReaderBlueprint {
            format: self.input.format,
            k_aligned: self.k_aligned,
            scale_vectors: false,
            in_parts: true,
            target: self.target,
        }
    }

    /// Rows of `x` of a cube.
    pub const fn rows(self) -> u32 {
        8 * self.x_tiles / self.input.terms
    }

    /// vec8s that a unit of the cube puts into shared memory for a K-block.
    pub const fn unit_vec8s(self) -> u32 {
        (8 * self.x_tiles * K_BLOCK_VEC8S).div_ceil(self.planes * 32)
    }

    /// Rows of the output of a cube.
    pub const fn outputs(self) -> u32 {
        let rows = 16 * ROW_TILES * self.planes;
        if self.gated.is_some() { rows / 2 } else { rows }
    }
}
