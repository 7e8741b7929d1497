use cubecl::prelude::*;

/// Matrices of one number of columns, in elements of `W`, and where the products with them go.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MatrixList<W: CubePrimitive> {
    pub words: Sequence<Box<[W]>>,
    /// Their numbers of rows.
    pub heights: Sequence<u32>,
    /// Where in the output the products `[rows, height]` with each begin.
    pub starts: Sequence<usize>,
    /// If there are any, the output has the products with the picked rows of the one matrix.
    pub picks: Picks,
    /// Tiles of rows of all matrices, or of all picks.
    pub tiles: u32,
}

/// Blocks of rows that every row of `x` has picked for itself, instead of all rows of the matrix:
/// one list `[rows, count]`, or none.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Picks {
    blocks: Sequence<Box<[i32]>>,
    /// Picks of a row of `x`, and number of rows of `x`.
    count: u32,
    x_rows: u32,
    /// Rows of a block, and index of the last block.
    height: u32,
    last: u32,
}

#[cube]
impl Picks {
    /// The pick of a tile of `height` rows, as an index into the lists and the row of `x` whose
    /// list it is. Picks with the same index in all lists are neighbours: lists are ascending, so
    /// that several rows often picked the same block.
    fn pair(&self, tile: u32, #[comptime] height: u32) -> (u32, u32) {
        let tiles = self.height.div_ceil(height);
        let pair = min(tile / tiles, self.count * self.x_rows - 1);
        (pair / self.x_rows, pair % self.x_rows)
    }

    /// Begins to read the block of tile `tile`. A tile past the end has the last pick. Without
    /// picks, this reads nothing.
    pub fn read(&self, tile: u32, #[comptime] height: u32) -> i32 {
        let mut block = 0i32;
        if comptime!(self.blocks.len() == 1) {
            let (pick, x_row) = self.pair(tile, height);
            block = self.blocks.index(0usize)[(x_row * self.count + pick) as usize];
        }
        block
    }
}

/// The rows of a tile: some rows of one of several matrices.
#[derive(CubeType)]
pub(super) struct TileRows {
    /// The matrix, and its number of rows; with picks, the end of the block.
    pub matrix: u32,
    pub rows: u32,
    /// The first row of the tile.
    pub row: u32,
    /// With picks: the row of `x` that the tile is for, and the distance from a row of the matrix
    /// to its result.
    pub x_row: u32,
    offset: u32,
}

#[cube]
impl TileRows {
    /// The rows of tile `tile` of `height` rows, counted through matrices with `heights` rows each,
    /// or through picks, where `block` is the one of the tile. A tile past the end begins after the
    /// last row, or is that of the last pick.
    pub fn new<W: CubePrimitive>(
        tile: u32,
        block: i32,
        group: &MatrixList<W>,
        #[comptime] height: u32,
    ) -> TileRows {
        let mut tile_rows = TileRows {
            matrix: 0u32,
            rows: 0u32,
            row: 0u32,
            x_row: 0u32,
            offset: 0u32,
        };
        tile_rows.seek::<W>(tile, block, group, height);
        tile_rows
    }

    /// Moves to another tile.
    pub fn seek<W: CubePrimitive>(
        &mut self,
        tile: u32,
        block: i32,
        group: &MatrixList<W>,
        #[comptime] height: u32,
    ) {
        let picks = &group.picks;
        if comptime!(picks.blocks.len() == 1) {
            let (pick, x_row) = picks.pair(tile, height);
            let first = min(u32::cast_from(block), picks.last) * picks.height;
            self.x_row = x_row;
            self.row = first + tile % picks.height.div_ceil(height) * height;
            self.rows = first + picks.height;
            self.offset = pick * picks.height - first;
        } else {
            let mut own = tile;
            let mut found = false;
            #[unroll]
            for i in 0..group.heights.len() {
                let rows = *group.heights.index(i);
                let tiles = (rows + comptime!(height - 1)) / height;
                if !found {
                    self.matrix = comptime!(i as u32).runtime();
                    self.rows = rows;
                    self.row = own * height;
                    found = own < tiles;
                    own -= tiles;
                }
            }
        }
    }

    /// Whether this tile has a result for row `x_row` of the `rows` rows of `x` and row `row` of
    /// the matrix.
    pub fn contains<W: CubePrimitive>(
        &self,
        x_row: u32,
        rows: u32,
        row: u32,
        group: &MatrixList<W>,
    ) -> bool {
        if comptime!(group.picks.blocks.len() == 1) {
            x_row == self.x_row && row < self.rows
        } else {
            x_row < rows && row < self.rows
        }
    }

    /// Index in the output of the result for row `x_row` of `x` and row `row` of the matrix. The
    /// results of each matrix begin at one of `starts`.
    pub fn output_index<W: CubePrimitive>(
        &self,
        x_row: u32,
        row: u32,
        group: &MatrixList<W>,
    ) -> usize {
        let picks = &group.picks;
        let starts = &group.starts;
        if comptime!(picks.blocks.len() == 1) {
            let results = picks.count as usize * picks.height as usize;
            // `offset` may be negative: the sum wraps modulo 2^32.
            x_row as usize * results + (row + self.offset) as usize
        } else {
            let mut start = *starts.index(0usize);
            #[unroll]
            for i in 1..starts.len() {
                start = select(self.matrix == comptime!(i as u32), *starts.index(i), start);
            }
            start + x_row as usize * self.rows as usize + row as usize
        }
    }
}
