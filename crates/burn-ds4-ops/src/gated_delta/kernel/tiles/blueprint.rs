use crate::gated_delta::kernel::RuleOptions;

/// Columns of a column block: four lanes read 64 bytes of a row.
pub(crate) const COLUMN_BLOCK: u32 = 32;
/// Rows of a tile.
pub(crate) const TILE_ROWS: u32 = 16;
/// The number of `bf16` terms of an f32.
pub(super) const TERMS: u32 = 3;

/// How [`tiles_kernel`](super::tiles_kernel) is compiled. It needs PTX.
///
/// A plane keeps some rows of a state in registers, as they were read. The products of all keys and
/// queries with the state are products of tiles. From these, and from the products of keys and
/// queries with each other, each lane computes the corrections and outputs of one row, token by
/// token. The state afterwards is again a product of tiles. Meanwhile the next state is copied to
/// shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TilesBlueprint {
    /// Tokens of a sequence.
    pub tokens: u32,
    /// Column blocks of a row, 32 columns each.
    pub column_blocks: u32,
    /// Tiles of 16 rows in a plane: one or two.
    pub tiles: u32,
    /// Planes of a group, which share a state or a part of it, and groups of a cube.
    pub planes: u32,
    pub groups: u32,
    /// Stages of a group's pipeline: states that are being copied or read.
    pub depth: u32,
    pub rule: RuleOptions,
}

impl TilesBlueprint {
    /// Tiles of 8 tokens.
    pub(super) const fn token_tiles(self) -> u32 {
        self.tokens.div_ceil(8)
    }

    /// The number of tokens, rounded up to whole tiles.
    pub(super) const fn padded(self) -> u32 {
        8 * self.token_tiles()
    }

    /// Pairs of tokens: one or two, or those of whole tiles.
    pub(super) const fn pairs(self) -> u32 {
        match self.tokens {
            1 | 2 => 1,
            3 | 4 => 2,
            _ => 4 * self.token_tiles(),
        }
    }

    /// Words of the corrections of a row: the pairs of tokens for every term, rounded up to whole
    /// tiles of four.
    pub(super) const fn correction_words(self) -> u32 {
        (TERMS * self.pairs()).next_multiple_of(4)
    }

    /// Rows of a plane.
    pub(super) const fn plane_rows(self) -> u32 {
        TILE_ROWS * self.tiles
    }

    /// Rows of a group.
    pub const fn group_rows(self) -> u32 {
        self.planes * self.plane_rows()
    }

    /// Units of a group.
    pub(super) const fn group_units(self) -> u32 {
        32 * self.planes
    }

    /// Vectors of a row of the state, a key or a query.
    pub(super) const fn row_vectors(self) -> u32 {
        4 * self.column_blocks
    }

    /// Rows that are fetched for a group: of the state, the keys and the queries.
    pub(super) const fn fetched_rows(self) -> u32 {
        self.group_rows() + 2 * self.padded()
    }

    /// The offset in shared memory of a column of keys, which has one word for each pair of tokens.
    /// With one tile of tokens, lanes that read together have no bank conflicts.
    pub(super) const fn column_offset(self, column: u32) -> u32 {
        column * (self.padded() / 2) + column / 8 * 8
    }

    /// Words of the keys of a group.
    pub(super) const fn group_words(self) -> u32 {
        self.column_offset(COLUMN_BLOCK * self.column_blocks)
    }

    /// Bytes of shared memory of a cube.
    pub const fn shared_bytes(self) -> usize {
        let fetched = self.depth * self.fetched_rows() * self.row_vectors() * 16;
        let rows = self.group_rows() * (self.product_pitch() + self.correction_pitch()) * 4;
        let grams = 2 * self.padded() * (self.padded() + 2) * 4;
        (self.groups * (fetched + rows + grams + self.group_words() * 4)) as usize
    }

    /// Distance from the products of a row to those of the next.
    pub(super) const fn product_pitch(self) -> u32 {
        2 * self.padded() + 1
    }

    /// Distance from the corrections of a row to those of the next.
    pub(super) const fn correction_pitch(self) -> u32 {
        self.correction_words() + 1
    }
}
