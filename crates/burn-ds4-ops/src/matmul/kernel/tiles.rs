//! Products of a few rows of `x` by 16-bit weights, on tensor cores.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::group::{Located, Picks};
use super::parts::{add_products, weights_of};
use super::source::{Source, SourceBlueprint};
use crate::intrinsics::{Target, await_copies, commit_copies, sync_group, sync_planes};

/// Chunks of 16 bytes to a lane and row of a stretch.
pub(super) const STEP: u32 = 4;
/// Columns of a stretch: 256 bytes of each row.
pub(crate) const STRETCH: u32 = 32 * STEP;
/// Vectors of 16 bytes of a row of a stretch.
const ROW_VECTORS: u32 = 4 * STEP;
/// Vectors of a stretch of 16 rows.
const VECTORS: u32 = 16 * ROW_VECTORS;

/// How [`tiles_kernel`] is compiled.
///
/// The planes of a cube share a tile of 16 rows of weights: each multiplies by every so manieth stretch of columns, and their sums meet
/// in shared memory. That depends on the number of columns alone, so a row's result depends neither on the other rows of `x`, nor on
/// other weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TilesBlueprint {
    /// Whether the weights are `f16`; else `bf16`.
    pub halves: bool,
    /// Numbers in `bf16` whose sum a weight is; one is the weight itself.
    pub weight_parts: u32,
    /// Where `x` is read from.
    pub source: SourceBlueprint,
    /// Planes that share a tile of weights, and so many groups of them that are a cube.
    pub planes: u32,
    pub groups: u32,
    /// Stretches of a plane that are on their way or being multiplied.
    pub depth: u32,
    pub target: Target,
}

impl TilesBlueprint {
    /// Bytes of shared memory.
    pub const fn shared_bytes(self) -> usize {
        let planes = self.planes * self.groups;
        let ring = planes * self.depth * VECTORS;
        let stage = 2 * planes * self.source.tiles * 32;
        (ring + stage + self.source.shared_vectors()) as usize * 16
    }

    /// Sums of a tile: of the first parts in turns, and of all others, which are so much smaller that they would be cut off among those.
    pub(super) const fn sums(self) -> u32 {
        if self.source.parts * self.weight_parts == 1 {
            2
        } else {
            3
        }
    }

    pub(super) const fn dtype(self) -> &'static str {
        if self.halves && self.weight_parts == 1 {
            "f16"
        } else {
            "bf16"
        }
    }
}

/// Stretches of weights, in the order in which a plane multiplies by them.
#[derive(CubeType)]
struct Cursor {
    /// Tile of all matrices' tiles, and the rows that it is.
    tile: u32,
    located: Located,
    /// Stretch of the tile.
    stretch: u32,
    /// The pick that the plane's next tile is of.
    coming: i32,
}

#[cube]
impl Cursor {
    fn new(tile: u32, step: u32, plane: u32, heights: &Sequence<u32>, picks: &Picks) -> Cursor {
        let block = picks.read(tile, 16u32);
        let coming = picks.read(tile + step, 16u32);
        Cursor {
            tile,
            located: Located::new(tile, block, heights, picks, 16u32),
            stretch: plane,
            coming,
        }
    }

    /// Goes on to the plane's next stretch.
    fn advance(
        &mut self,
        heights: &Sequence<u32>,
        picks: &Picks,
        plane: u32,
        stretches: u32,
        #[comptime] blueprint: TilesBlueprint,
    ) {
        self.stretch += blueprint.planes;
        if self.stretch >= stretches {
            self.stretch = plane;
            self.tile += CUBE_COUNT_X * blueprint.groups;
            self.located
                .aim(self.tile, self.coming, heights, picks, 16u32);
            self.coming = picks.read(self.tile + CUBE_COUNT_X * blueprint.groups, 16u32);
        }
    }
}

/// Begins to copy a stretch to the ring: two rows at a time, 256 bytes of each. Where rows are odd, halves of 128 bytes change places, so
/// that the lanes of a product, which read 64 bytes of each of eight rows, meet no bank twice.
#[cube]
#[allow(clippy::too_many_arguments)]
fn fetch(
    words: &Sequence<Box<[Vector<u32, Const<4>>]>>,
    ring: &mut Shared<[Vector<u32, Const<4>>]>,
    slot: u32,
    cursor: &Cursor,
    vectors: u32,
    #[comptime] even: bool,
) {
    let side = UNIT_POS_X / ROW_VECTORS;
    let column = UNIT_POS_X % ROW_VECTORS;
    let mut vector = cursor.stretch * ROW_VECTORS + column;
    if comptime!(!even) {
        // Past the end, what is read is not used.
        vector = select(vector < vectors, vector, 0u32);
    }
    let to = slot + side * ROW_VECTORS + (column ^ (side * 4));
    #[unroll]
    for i in 0..words.len() {
        let which = comptime!(i as u32);
        if comptime!(words.len() == 1) || cursor.located.which == which {
            let words = words.index(i);
            #[unroll]
            for j in 0..8u32 {
                let row = min(
                    cursor.located.row + comptime!(2 * j) + side,
                    cursor.located.rows - 1,
                );
                let at = row as usize * vectors as usize + vector as usize;
                let to = (to + comptime!(2 * j * ROW_VECTORS)) as usize;
                copy_async(&words[at..at + 1], &mut ring[to..to + 1], 4u32);
            }
        }
    }
}

/// Multiplies up to `8 * tiles` rows of `x` by all rows of some matrices of 16-bit weights.
///
/// - `x`: rows of vectors of 16 bytes, `x_vectors` from one to the next
/// - `words`, `heights`: matrices of `columns` each, and their numbers of rows
/// - `output`: the products with each matrix, `[rows, height]`, at `starts`
/// - `picks`: if there are any, `output` is the products with the rows picked, of the one matrix
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn tiles_kernel<X: Float, Y: Float, N: Size>(
    x: &[Vector<X, N>],
    words: &Sequence<Box<[Vector<u32, Const<4>>]>>,
    output: &mut [Y],
    rows: u32,
    x_vectors: usize,
    columns: u32,
    all: u32,
    heights: &Sequence<u32>,
    starts: &Sequence<usize>,
    picks: &Picks,
    #[comptime] blueprint: TilesBlueprint,
    #[define(X, Y)] _dtypes: [ElemType; 2],
) {
    let group = UNIT_POS_X / 4;
    let quarter = UNIT_POS_X % 4;
    let TilesBlueprint {
        planes,
        groups,
        depth,
        ..
    } = comptime!(blueprint);
    let SourceBlueprint { tiles, even, .. } = comptime!(blueprint.source);
    let plane = UNIT_POS_Y % planes;
    let side = UNIT_POS_Y / planes;
    let vectors = columns / 8;
    let stretches = (columns + comptime!(STRETCH - 1)) / STRETCH;
    let mut ring = Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(
        (groups * planes * depth * VECTORS) as usize
    ));
    let mut stage =
        Shared::<[f32]>::new_slice(comptime!((groups * 2 * planes * tiles * 128) as usize));
    // First `x`, which all wait for: it is on its way when the weights follow.
    let mut source = Source::new(x, rows, x_vectors, columns, blueprint.source);
    source.fetch();

    let own = UNIT_POS_Y * comptime!(depth * VECTORS);
    let first_tile = side * CUBE_COUNT_X + CUBE_POS_X;
    let step = CUBE_COUNT_X * groups;
    let mut next = Cursor::new(first_tile, step, plane, heights, picks);
    #[unroll]
    for slot in 0..depth {
        if next.tile < all {
            fetch(
                words,
                &mut ring,
                own + comptime!(slot * VECTORS),
                &next,
                vectors,
                even,
            );
        }
        commit_copies();
        next.advance(heights, picks, plane, stretches, blueprint);
    }

    let line = own + group * ROW_VECTORS;
    let turn = group % 2 * 4;

    source.store(depth);

    let mut slot = 0u32;
    let mut buffer = side * 2;
    let mut tile = first_tile;
    while tile < all {
        let block = picks.read(tile, 16u32);
        let each = comptime!(blueprint.sums());
        let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!((each * tiles) as usize));
        #[unroll]
        for i in 0..comptime!((each * tiles) as usize) {
            sums[i] = Vector::new(0.0f32);
        }
        let mut stretch = plane;
        while stretch < stretches {
            let first = stretch * STRETCH + quarter * 8;
            let held = source.read_ahead(first);
            await_copies(comptime!(depth - 1));
            sync_group(blueprint.target);
            let line = line + slot * VECTORS;
            #[unroll]
            for c in 0..STEP {
                let column = first + comptime!(c * 32);
                let at = (line + ((comptime!(4 * c) + quarter) ^ turn)) as usize;
                let mut low = ring[at];
                let mut high = ring[at + comptime!(8 * ROW_VECTORS as usize)];
                if comptime!(!even) {
                    let inside = column < columns;
                    low = select(inside, low, Vector::new(0u32));
                    high = select(inside, high, Vector::new(0u32));
                }
                let low_parts = weights_of(low, blueprint);
                let high_parts = weights_of(high, blueprint);
                #[unroll]
                for t in 0..tiles {
                    let columns = source.columns(&held, t, c, column);
                    add_products(
                        &low_parts,
                        &high_parts,
                        &columns,
                        &mut sums,
                        t,
                        c % 2,
                        blueprint,
                    );
                }
            }
            sync_group(blueprint.target);
            if next.tile < all {
                fetch(words, &mut ring, own + slot * VECTORS, &next, vectors, even);
            }
            commit_copies();
            next.advance(heights, picks, plane, stretches, blueprint);
            slot = select(slot + 1 == depth, 0u32, slot + 1);
            stretch += planes;
        }

        // Two buffers in turns: who writes one again has met all others since they read it.
        let base = buffer * comptime!(planes * tiles * 128);
        buffer ^= 1u32;
        #[unroll]
        for t in 0..tiles {
            let first = comptime!((each * t) as usize);
            let mut sum = sums[first] + sums[comptime!(first + 1)];
            if comptime!(each == 3) {
                sum += sums[comptime!(first + 2)];
            }
            #[unroll]
            for i in 0..4u32 {
                // Column by column of the tile: 16 rows of weights each.
                let place = (comptime!(8 * t) + quarter * 2 + comptime!(i % 2)) * 16
                    + group
                    + comptime!(i / 2 * 8);
                let to = base + plane * comptime!(tiles * 128) + place;
                stage[to as usize] = sum.extract(i as usize);
            }
        }
        if comptime!(planes == 1) {
            sync_group(blueprint.target);
        } else {
            sync_planes(side, planes);
        }
        let located = Located::new(tile, block, heights, picks, 16u32);
        let mut place = plane * 32 + UNIT_POS_X;
        while place < comptime!(tiles * 128) {
            let mut total = stage[(base + place) as usize];
            #[unroll]
            for p in 1..planes {
                total += stage[(base + comptime!(p * tiles * 128) + place) as usize];
            }
            let of = place / 16;
            let row = located.row + place % 16;
            if located.has(of, rows, row, picks) {
                let to = located.place(of, row, starts, picks);
                output[to] = Y::cast_from(total);
            }
            place += comptime!(planes * 32);
        }
        tile += CUBE_COUNT_X * groups;
    }
}
