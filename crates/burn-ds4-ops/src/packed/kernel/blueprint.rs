use super::columns::Columns;
use super::groups::Pairing;
use super::halves::SCALED_UNITS;
use super::stream::RING_BYTES;
use crate::intrinsics::Target;

/// How the kernels for a few rows of `x` are compiled.
///
/// A cube's planes share a tile of 16 rows of weights: each multiplies by stretches of columns, and their sums meet in shared
/// memory. The cut depends on the weights alone, so that a row's result does not depend on how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FewBlueprint {
    /// How the weights are stored, and `x`.
    pub columns: Columns,
    /// (token, slot) pairs, at most, and how they find their matrices.
    pub pairs: u32,
    pub pairing: Pairing,
    /// Rows of `x`, each part by itself, that are in shared memory. Where pairs are added up, all or none; else those that are
    /// multiplied at a time: a tile has 8, of which some may be the same.
    pub lines: u32,
    /// Planes that share a tile.
    pub planes: u32,
    /// Stretches of a plane.
    pub rounds: u32,
    /// Tiles that a cube multiplies side by side.
    pub groups: u32,
    /// Planes of a cube: those of its tiles, or more.
    pub cube_planes: u32,
    /// Tiles whose sums wait in shared memory: of a group; or all of a cube, where pairs are added up.
    pub batch: u32,
    /// Whether the stretches are all full.
    pub even: bool,
    pub target: Target,
}

impl FewBlueprint {
    /// Units of 8 columns of a row of `x`, filled up to the end of the last stretch.
    pub const fn units(self) -> u32 {
        self.planes * self.rounds * self.columns.format.stretch() / 8
    }

    /// From one row of `x` to the next in shared memory, in units: such that eight lanes that read together meet no bank twice. Scales
    /// come behind the units.
    pub const fn pitch(self) -> u32 {
        let scales = if self.columns.halves {
            self.units() / SCALED_UNITS
        } else {
            0
        };
        self.units() + scales.next_multiple_of(8) + 4
    }

    /// Columns of `x` in 128 bytes, a line of the cache.
    pub const fn line_columns(self) -> u32 {
        if self.columns.parts == 4 { 32 } else { 64 }
    }

    pub const fn units_of_cube(self) -> u32 {
        32 * self.cube_planes
    }

    /// Units of `x` that a unit of the cube stages.
    pub const fn own_units(self) -> u32 {
        (self.lines * self.units()).div_ceil(self.units_of_cube())
    }

    /// Bytes of `x` in shared memory.
    pub const fn staged_bytes(self) -> usize {
        (self.lines * self.pitch()) as usize * 16
    }

    /// Bytes of the sums that wait in shared memory.
    pub const fn waiting_bytes(self) -> usize {
        if self.columns.ordered {
            (self.batch * self.pairs * self.planes) as usize * 64
        } else {
            (self.batch * self.groups * self.planes) as usize * 512
        }
    }

    /// Bytes of shared memory of the weights on their way, and for the pairs.
    pub const fn other_bytes(self) -> usize {
        RING_BYTES * self.cube_planes as usize + (4 << 10)
    }

    pub const fn shared_bytes(self) -> usize {
        self.other_bytes() + self.waiting_bytes() + self.staged_bytes()
    }

    /// Pairs that are multiplied at a time.
    pub const fn pass(self) -> u32 {
        self.lines / self.columns.parts
    }
}
