use crate::caps::Target;
use crate::warpgroup::WARPGROUP;

/// Heads of a cube, which are the rows of all products.
pub(crate) const WARPGROUP_HEADS: u32 = 64;
/// Warpgroups that multiply. Each sums half of the channels.
pub(super) const GROUPS: u32 = 2;
/// Columns of a stage, and the words with a bit for each.
pub(super) const COLUMNS: u32 = 64;
pub(super) const COLUMN_WORDS: u32 = COLUMNS / 32;
/// Vectors of a row in a tile of rows, and bytes of a tile.
pub(super) const TILE_VECTORS: u32 = 8;
pub(super) const TILE_BYTES: u32 = 64 * 128;
/// How [`cached_wgmma_kernel`](super::super::cached_wgmma_kernel) is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CachedWgmmaBlueprint {
    /// Vectors of 8 channels of a row: 16, 32, 48 or 64.
    pub vectors: u32,
    /// Those in front of queries and results that are not rotated.
    pub unrotated: u32,
    /// Stages of [`COLUMNS`] rows.
    pub stages: u32,
    /// As of [`CachedBlueprint`](super::super::CachedBlueprint).
    pub causal: bool,
    /// Whether rows are `f16` rather than `bf16`.
    pub f16_input: bool,
    pub target: Target,
}

impl CachedWgmmaBlueprint {
    pub const fn units(self) -> u32 {
        (1 + GROUPS) * WARPGROUP
    }

    /// Tiles of a row.
    pub(super) const fn tiles(self) -> u32 {
        self.vectors / TILE_VECTORS
    }

    /// Channels of a warpgroup.
    pub(super) const fn channels(self) -> u32 {
        self.vectors * 8 / GROUPS
    }

    pub(super) const fn dtype(self) -> &'static str {
        if self.f16_input { "f16" } else { "bf16" }
    }

    pub(super) const fn stage_bytes(self) -> u32 {
        self.tiles() * TILE_BYTES
    }

    /// Shared memory of a cube: queries, stages, words of their columns, barriers.
    pub const fn shared_bytes(self) -> usize {
        let stage = self.stage_bytes() + COLUMN_WORDS * 4 + 24;
        (self.stage_bytes() + self.stages * stage) as usize
    }
}
