use crate::caps::Target;
use crate::gemm::kernel::groups::{GroupsBlueprint, Pairing};
use crate::gemm::kernel::input::{InputLayout, SCALE_VEC8S};
use crate::gemm::kernel::weights::{K_STEPS, ReaderBlueprint, WeightFormat};

/// How the kernels of the stream schedule are compiled for one problem.
///
/// Planes of a cube split K of a tile of 16 rows of weights: each multiplies some of the K-blocks,
/// and the partial sums are reduced in shared memory. The split depends on the weights alone, so
/// that a row's result does not depend on the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StreamBlueprint {
    /// Formats of the weights and of `x`.
    pub input: InputLayout,
    /// (token, slot) pairs, at most, and how they find their matrices.
    pub pairs: u32,
    pub pairing: Pairing,
    /// Whether all pairs are of one token.
    pub one_token: bool,
    /// Rows of `x` in shared memory, where each term of a row counts as a row. Where the pairs of a
    /// token are summed, all rows or none; else those that are multiplied at a time. A tile has 8,
    /// of which some may be the same; there are two tiles of more.
    pub x_rows: u32,
    /// Whether these rows are operands in registers instead, one K-block of them at a time: each
    /// plane reads those of its own K-blocks. One part of K then is one K-block of a plane.
    pub x_in_registers: bool,
    /// K-blocks of a plane whose columns of `x` are in shared memory at a time, by which those of
    /// the plane can be divided.
    pub x_k_blocks: u32,
    /// Sums of the K-blocks of a tile, which are added in their order: K-block `b` is part of sum
    /// `b % k_splits`. There is one for each plane, or for several with `x_in_registers`.
    pub k_splits: u32,
    /// Planes that split K of a tile.
    pub planes: u32,
    /// K-blocks of a plane.
    pub plane_k_blocks: u32,
    /// Groups of such planes in a cube, each with a tile of its own.
    pub concurrent_tiles: u32,
    /// Planes of a cube: those of its groups, or more.
    pub cube_planes: u32,
    /// Whether the pipeline of a plane has one K-block, each K-step of which is replaced once it is
    /// multiplied, in place of two. It takes half as much shared memory.
    pub one_stage: bool,
    /// Tiles of a group whose partials are in shared memory at a time; where the pairs of a token
    /// are summed, all tiles of a cube.
    pub partial_tiles: u32,
    /// Whether K fills all K-blocks of all planes.
    pub k_aligned: bool,
    /// Whether all scales of a K-block of FP4 are read at once.
    pub scale_vectors: bool,
    /// Whether blocks of FP8 begin anew in parts of the rows.
    pub in_parts: bool,
    /// Half of the rows are a gate, whose activation is multiplied by the other half and by the
    /// score. The result is in the order in which weights of this format are decoded.
    pub gated: Option<WeightFormat>,
    pub target: Target,
}

/// Vectors of a lane in a K-block.
pub(super) const LANE_VECTORS: u32 = 2 * K_STEPS;
/// Rows of `x` in a tile that has all K-steps. A lane has the sums of as many columns.
pub(super) const SPREAD_ROWS: u32 = 8 / K_STEPS;
/// Pairs up to which each plane groups them for itself: those that its lanes can hold.
const PLANE_PAIRS: u32 = 32;

impl StreamBlueprint {
    /// How its pairs are grouped.
    pub const fn groups(self) -> GroupsBlueprint {
        GroupsBlueprint {
            pairing: self.pairing,
            pairs: self.pairs,
            one_token: self.one_token && self.pairs <= PLANE_PAIRS,
            planes: match self.pairs <= PLANE_PAIRS {
                true => Some(self.cube_planes),
                false => None,
            },
            target: self.target,
        }
    }

    /// How its weights are read.
    pub const fn reader(self) -> ReaderBlueprint {
        ReaderBlueprint {
            format: self.input.format,
            k_aligned: self.k_aligned,
            scale_vectors: self.scale_vectors,
            in_parts: self.in_parts,
            target: self.target,
        }
    }

    /// Rows of weights of a tile that have results of their own.
    pub const fn tile_outputs(self) -> u32 {
        if self.gated.is_some() { 8 } else { 16 }
    }

    /// Columns of `x` in shared memory at a time, padded to whole K-blocks.
    pub const fn x_columns(self) -> u32 {
        self.planes * self.x_k_blocks * self.input.format.k_block()
    }

    /// vec8s of a row of these columns.
    pub const fn row_vec8s(self) -> u32 {
        self.x_columns() / 8
    }

    /// How often columns of `x` come to shared memory. If more than once, partials wait there for
    /// the next.
    pub const fn x_loads(self) -> u32 {
        self.plane_k_blocks / self.x_k_blocks
    }

    /// Whether the pairs of a token are summed.
    pub const fn sums_pairs(self) -> bool {
        self.input.permuted && !matches!(self.pairing, Pairing::Sorted)
    }

    /// Tiles of 8 rows of `x` that are multiplied at a time: one where pairs are summed.
    pub const fn x_tiles(self) -> u32 {
        if self.x_rows > 8 && !self.sums_pairs() {
            self.x_rows / 8
        } else {
            1
        }
    }

    /// vec8s from one row of `x` to the next in shared memory, such that eight lanes that read
    /// together have no bank conflict. The scales of a row follow its vec8s.
    pub const fn row_pitch(self) -> u32 {
        let scales = if self.input.f16_input {
            self.row_vec8s() / SCALE_VEC8S
        } else {
            0
        };
        self.row_vec8s() + scales.next_multiple_of(8) + 4
    }

    /// Columns of `x` in a cache line of 128 bytes.
    pub const fn cache_line_columns(self) -> u32 {
        if self.input.terms == 4 { 32 } else { 64 }
    }

    /// Units of a cube.
    pub const fn cube_units(self) -> u32 {
        32 * self.cube_planes
    }

    /// vec8s of `x` that a unit of the cube puts into shared memory.
    pub const fn unit_vec8s(self) -> u32 {
        (self.x_rows * self.row_vec8s()).div_ceil(self.cube_units())
    }

    /// Whether all units have as many.
    pub const fn fills_units(self) -> bool {
        (self.x_rows * self.row_vec8s()).is_multiple_of(self.cube_units())
    }

    /// vec8s of `x` in shared memory.
    pub const fn shared_vec8s(self) -> u32 {
        if self.x_in_registers {
            0
        } else {
            self.x_rows * self.row_pitch()
        }
    }

    /// Bytes of `x` in shared memory.
    pub const fn x_bytes(self) -> usize {
        self.shared_vec8s() as usize * 16
    }

    /// vec8s of `x` of a K-block in the registers of a lane.
    pub const fn lane_vec8s(self) -> u32 {
        if self.x_in_registers {
            K_STEPS * self.x_tiles() * self.input.format.vec8s()
        } else {
            0
        }
    }

    /// Partials of a tile, for each tile of `x`: of planes, or of K-blocks.
    pub const fn tile_partials(self) -> u32 {
        if self.x_in_registers {
            self.planes * self.x_loads()
        } else {
            self.planes
        }
    }

    /// Partials that are in shared memory at a time, unless pairs are summed.
    pub const fn partials(self) -> u32 {
        self.partial_tiles * self.concurrent_tiles * self.tile_partials() * self.x_tiles()
    }

    /// Bytes of the partials in shared memory.
    pub const fn partial_bytes(self) -> usize {
        if self.sums_pairs() {
            (self.partial_tiles * self.pairs * self.planes) as usize * 64
        } else {
            self.partials() as usize * 512
        }
    }

    /// Vectors of 16 bytes of shared memory in a plane's pipeline of weights.
    pub const fn plane_ring_vectors(self) -> u32 {
        let stages = if self.one_stage { 1 } else { 2 };
        stages * LANE_VECTORS * 32
    }

    /// The same in the pipelines of all planes.
    pub const fn ring_vectors(self) -> u32 {
        self.plane_ring_vectors() * self.cube_planes
    }

    /// Bytes of these pipelines.
    pub const fn ring_bytes(self) -> usize {
        self.ring_vectors() as usize * 16
    }

    /// Bytes of shared memory to group so many pairs, or fewer. Each plane groups few pairs for
    /// itself, which takes more than a cube's groups of many.
    pub const fn group_bytes(self) -> usize {
        let few = Self {
            pairs: if self.pairs < PLANE_PAIRS {
                self.pairs
            } else {
                PLANE_PAIRS
            },
            ..self
        };
        let (few, own) = (few.groups().shared_bytes(), self.groups().shared_bytes());
        if few > own { few } else { own }
    }

    /// Bytes of shared memory of a cube.
    pub const fn shared_bytes(self) -> usize {
        self.ring_bytes() + self.group_bytes() + self.partial_bytes() + self.x_bytes()
    }

    /// Whether `x` is read at least a K-step before it is multiplied: from memory, and single rows
    /// by FP8. With more rows, and with gates, that takes longer.
    pub const fn reads_ahead(self) -> bool {
        let single_row = self.x_rows == 1 && self.x_loads() == 1;
        self.x_rows == 0 || (self.input.f16_input && self.gated.is_none() && single_row)
    }

    /// Pairs of a group up to which all K-steps of `x` from memory are
    /// [in one tile](super::place::XColumns::KSteps).
    pub const fn spread_pairs(self) -> u32 {
        if self.x_rows == 0 {
            SPREAD_ROWS / self.input.terms
        } else {
            0
        }
    }

    /// Pairs that are multiplied at a time.
    pub const fn pass_pairs(self) -> u32 {
        self.x_rows / self.input.terms
    }
}
