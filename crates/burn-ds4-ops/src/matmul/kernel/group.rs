use cubecl::prelude::*;

/// Some rows of one of several matrices.
#[derive(CubeType)]
pub(super) struct Located {
    /// The matrix, and its number of rows.
    pub which: u32,
    pub rows: u32,
    /// The first of the rows.
    pub row: u32,
}

#[cube]
impl Located {
    /// Tile `tile` of `height` rows, counted through matrices of so many rows each; past the end, one past that of the last.
    pub fn new(tile: u32, heights: &Sequence<u32>, #[comptime] height: u32) -> Located {
        let mut located = Located {
            which: 0u32,
            rows: 0u32,
            row: 0u32,
        };
        located.aim(tile, heights, height);
        located
    }

    /// Becomes another tile.
    pub fn aim(&mut self, tile: u32, heights: &Sequence<u32>, #[comptime] height: u32) {
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

    /// Where a result belongs: of row `of` of `x` and row `row` of the matrix, each matrix's results being at one of `starts`.
    pub fn place(&self, of: u32, row: u32, starts: &Sequence<usize>) -> usize {
        let mut start = *starts.index(0usize);
        #[unroll]
        for i in 1..starts.len() {
            start = select(self.which == comptime!(i as u32), *starts.index(i), start);
        }
        start + of as usize * self.rows as usize + row as usize
    }
}
