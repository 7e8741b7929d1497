use cubecl::prelude::*;

/// Blocks of rows that every row of `x` has picked for itself, in place of all: `[rows, count]`, none or one such list.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Picks {
    blocks: Sequence<Box<[i32]>>,
    /// Picks of a row of `x`, and rows of `x`.
    count: u32,
    tokens: u32,
    /// Rows of a block, and the last block.
    height: u32,
    last: u32,
}

#[cube]
impl Picks {
    /// Lists of pairs that are told apart by `tile`, tiles being of `height` rows: a place in the lists, and the row of `x` whose list
    /// it is. Those of the same place in all lists are neighbours: lists are ascending, so that one block is often picked by several.
    fn pair(&self, tile: u32, #[comptime] height: u32) -> (u32, u32) {
        let tiles = self.height.div_ceil(height);
        let pair = min(tile / tiles, self.count * self.tokens - 1);
        (pair / self.tokens, pair % self.tokens)
    }

    /// Begins to read the block that tile `tile` is of, past the end the last; without picks, nothing.
    pub fn read(&self, tile: u32, #[comptime] height: u32) -> i32 {
        let mut block = 0i32;
        if comptime!(self.blocks.len() == 1) {
            let (pick, of) = self.pair(tile, height);
            block = self.blocks.index(0usize)[(of * self.count + pick) as usize];
        }
        block
    }
}

/// Some rows of one of several matrices.
#[derive(CubeType)]
pub(super) struct Located {
    /// The matrix, and its number of rows, or where those of a block end.
    pub which: u32,
    pub rows: u32,
    /// The first of the rows.
    pub row: u32,
    /// With picks: the row of `x` that they are for, and what the results of the block's matrix row 0 would come after.
    pub of: u32,
    before: u32,
}

#[cube]
impl Located {
    /// Tile `tile` of `height` rows, counted through matrices of so many rows each, or through picks, whose `block` it is of; past the
    /// end, one past that of the last, or the last.
    pub fn new(
        tile: u32,
        block: i32,
        heights: &Sequence<u32>,
        picks: &Picks,
        #[comptime] height: u32,
    ) -> Located {
        let mut located = Located {
            which: 0u32,
            rows: 0u32,
            row: 0u32,
            of: 0u32,
            before: 0u32,
        };
        located.aim(tile, block, heights, picks, height);
        located
    }

    /// Becomes another tile.
    pub fn aim(
        &mut self,
        tile: u32,
        block: i32,
        heights: &Sequence<u32>,
        picks: &Picks,
        #[comptime] height: u32,
    ) {
        if comptime!(picks.blocks.len() == 1) {
            let (pick, of) = picks.pair(tile, height);
            let first = min(u32::cast_from(block), picks.last) * picks.height;
            self.of = of;
            self.row = first + tile % picks.height.div_ceil(height) * height;
            self.rows = first + picks.height;
            self.before = pick * picks.height - first;
        } else {
            let mut own = tile;
            let mut found = false;
            #[unroll]
            for i in 0..heights.len() {
                let rows = *heights.index(i);
                let tiles = (rows + comptime!(height - 1)) / height;
                if !found {
                    self.which = comptime!(i as u32).runtime();
                    self.rows = rows;
                    self.row = own * height;
                    found = own < tiles;
                    own -= tiles;
                }
            }
        }
    }

    /// Whether there is a result of row `of` of `x`, of so many, and row `row` of the matrix.
    pub fn has(&self, of: u32, rows: u32, row: u32, picks: &Picks) -> bool {
        if comptime!(picks.blocks.len() == 1) {
            of == self.of && row < self.rows
        } else {
            of < rows && row < self.rows
        }
    }

    /// Where a result belongs: of row `of` of `x` and row `row` of the matrix, each matrix's results being at one of `starts`.
    pub fn place(&self, of: u32, row: u32, starts: &Sequence<usize>, picks: &Picks) -> usize {
        if comptime!(picks.blocks.len() == 1) {
            let results = picks.count as usize * picks.height as usize;
            // Modulo 2^32, of which nothing is left.
            of as usize * results + (row + self.before) as usize
        } else {
            let mut start = *starts.index(0usize);
            #[unroll]
            for i in 1..starts.len() {
                start = select(self.which == comptime!(i as u32), *starts.index(i), start);
            }
            start + of as usize * self.rows as usize + row as usize
        }
    }
}
