//! Products of a few rows of `x` by 16-bit weights, on tensor cores.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::group::Located;
use crate::intrinsics::{
    Target, await_copies, commit_copies, half_differences, halves_to_bf16, multiply_tiles,
    sync_group, sync_planes,
};
use crate::packed::kernel::{pair, part_of};

/// Chunks of 16 bytes to a lane and row of a stretch.
const STEP: u32 = 4;
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
    /// Numbers whose sum an element of `x` is in what is multiplied: one of the dtype of the weights, or so many in `bf16`.
    pub parts: u32,
    /// Numbers in `bf16` whose sum a weight is; one is the weight itself.
    pub weight_parts: u32,
    /// Tiles of 8 rows of `x`.
    pub tiles: u32,
    /// Planes that share a tile of weights, and so many groups of them that are a cube.
    pub planes: u32,
    pub groups: u32,
    /// Rows of `x` that are copied to shared memory first; 0 if they do not fit.
    pub lines: u32,
    /// Vectors from one such row to the next.
    pub pitch: u32,
    /// Stretches of a plane that are on their way or being multiplied.
    pub depth: u32,
    /// Whether the stretches are all full.
    pub even: bool,
    pub target: Target,
}

impl TilesBlueprint {
    /// Bytes of shared memory.
    pub const fn shared_bytes(self) -> usize {
        let planes = self.planes * self.groups;
        let ring = planes * self.depth * VECTORS;
        let stage = 2 * planes * self.tiles * 32;
        (ring + stage + self.lines * self.pitch) as usize * 16
    }

    /// Vectors of `x` of 8 columns.
    const fn vectors(self) -> u32 {
        if self.parts == 3 { 2 } else { 1 }
    }

    /// Whether `x` of a whole stretch is read before its weights have come: not if that takes too many registers.
    const fn ahead(self) -> bool {
        self.tiles * self.vectors() <= 2
    }

    /// Vectors of `x` that a lane reads before they are needed.
    const fn held(self) -> u32 {
        if self.ahead() {
            STEP * self.tiles * self.vectors()
        } else {
            1
        }
    }

    /// Sums of a tile: of the first parts in turns, and of all others, which are so much smaller that they would be cut off among those.
    const fn sums(self) -> u32 {
        if self.parts * self.weight_parts == 1 {
            2
        } else {
            3
        }
    }

    const fn dtype(self) -> &'static str {
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
}

#[cube]
impl Cursor {
    fn new(tile: u32, plane: u32, heights: &Sequence<u32>) -> Cursor {
        Cursor {
            tile,
            located: Located::new(tile, heights, 16u32),
            stretch: plane,
        }
    }

    /// Goes on to the plane's next stretch.
    fn advance(
        &mut self,
        heights: &Sequence<u32>,
        plane: u32,
        stretches: u32,
        #[comptime] blueprint: TilesBlueprint,
    ) {
        self.stretch += blueprint.planes;
        if self.stretch >= stretches {
            self.stretch = plane;
            self.tile += CUBE_COUNT_X * blueprint.groups;
            self.located.aim(self.tile, heights, 16u32);
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
    #[comptime] blueprint: TilesBlueprint,
    #[define(X, Y)] _dtypes: [ElemType; 2],
) {
    let group = UNIT_POS_X / 4;
    let quarter = UNIT_POS_X % 4;
    let TilesBlueprint {
        tiles,
        planes,
        groups,
        depth,
        even,
        ..
    } = comptime!(blueprint);
    let plane = UNIT_POS_Y % planes;
    let side = UNIT_POS_Y / planes;
    let vectors = columns / 8;
    let stretches = (columns + comptime!(STRETCH - 1)) / STRETCH;
    let mut ring = Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(
        (groups * planes * depth * VECTORS) as usize
    ));
    let mut stage =
        Shared::<[f32]>::new_slice(comptime!((groups * 2 * planes * tiles * 128) as usize));
    let mut copy = Shared::<[Vector<X, N>]>::new_slice(comptime!(
        (blueprint.lines * blueprint.pitch) as usize
    ));
    if comptime!(blueprint.lines > 0) {
        let row_vectors = vectors * comptime!(blueprint.vectors());
        let mut at = UNIT_POS;
        while at < rows * row_vectors {
            let row = at / row_vectors;
            let vector = at % row_vectors;
            let from = row as usize * x_vectors + vector as usize;
            let to = (row * comptime!(blueprint.pitch) + vector) as usize;
            copy_async(
                &x[from..from + 1],
                &mut copy[to..to + 1],
                comptime!(8 / blueprint.vectors()),
            );
            at += CUBE_DIM;
        }
        commit_copies();
    }

    let own = UNIT_POS_Y * comptime!(depth * VECTORS);
    let first_tile = side * CUBE_COUNT_X + CUBE_POS_X;
    let mut next = Cursor::new(first_tile, plane, heights);
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
        next.advance(heights, plane, stretches, blueprint);
    }

    // Where the lane's vectors are: of rows of `x`, and of a stretch of the weights' rows.
    let mut lines = Array::<usize>::new(comptime!(tiles as usize));
    #[unroll]
    for t in 0..tiles {
        let row = min(comptime!(8 * t) + group, rows - 1);
        lines[t as usize] = if comptime!(blueprint.lines > 0) {
            (row * comptime!(blueprint.pitch)) as usize
        } else {
            row as usize * x_vectors
        };
    }
    let line = own + group * ROW_VECTORS;
    let turn = group % 2 * 4;

    if comptime!(blueprint.lines > 0) {
        await_copies(depth);
        sync_cube();
    }

    let mut slot = 0u32;
    let mut buffer = side * 2;
    let mut tile = first_tile;
    while tile < all {
        let each = comptime!(blueprint.sums());
        let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!((each * tiles) as usize));
        #[unroll]
        for i in 0..comptime!((each * tiles) as usize) {
            sums[i] = Vector::new(0.0f32);
        }
        let mut stretch = plane;
        while stretch < stretches {
            let first = stretch * STRETCH + quarter * 8;
            let mut held = Array::<Vector<X, N>>::new(comptime!(blueprint.held() as usize));
            if comptime!(blueprint.ahead()) {
                #[unroll]
                for c in 0..STEP {
                    #[unroll]
                    for t in 0..tiles {
                        #[unroll]
                        for v in 0..comptime!(blueprint.vectors()) {
                            let to = comptime!((c * tiles + t) * blueprint.vectors() + v);
                            held[to as usize] = read(
                                x,
                                &copy,
                                lines[t as usize],
                                first + comptime!(c * 32),
                                columns,
                                v,
                                blueprint,
                            );
                        }
                    }
                }
            }
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
                    let mut raw =
                        Array::<Vector<X, N>>::new(comptime!(blueprint.vectors() as usize));
                    #[unroll]
                    for v in 0..comptime!(blueprint.vectors()) {
                        raw[v as usize] = if comptime!(blueprint.ahead()) {
                            held[comptime!(((c * tiles + t) * blueprint.vectors() + v) as usize)]
                        } else {
                            read(x, &copy, lines[t as usize], column, columns, v, blueprint)
                        };
                    }
                    add_products(
                        &low_parts,
                        &high_parts,
                        &raw,
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
            next.advance(heights, plane, stretches, blueprint);
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
        sync_planes(side, planes);
        let located = Located::new(tile, heights, 16u32);
        let mut place = plane * 32 + UNIT_POS_X;
        while place < comptime!(tiles * 128) {
            let mut total = stage[(base + place) as usize];
            #[unroll]
            for p in 1..planes {
                total += stage[(base + comptime!(p * tiles * 128) + place) as usize];
            }
            let of = place / 16;
            let row = located.row + place % 16;
            if of < rows && row < located.rows {
                let to = located.place(of, row, starts);
                output[to] = Y::cast_from(total);
            }
            place += comptime!(planes * 32);
        }
        tile += CUBE_COUNT_X * groups;
    }
}

/// Vector `v` of the 8 columns of a row of `x` at `column`, of the copy if there is one; zeros past the end.
#[cube]
#[allow(clippy::too_many_arguments)]
fn read<X: Float, N: Size>(
    x: &[Vector<X, N>],
    copy: &Shared<[Vector<X, N>]>,
    line: usize,
    column: u32,
    columns: u32,
    #[comptime] v: u32,
    #[comptime] blueprint: TilesBlueprint,
) -> Vector<X, N> {
    let vector = column / 8 * comptime!(blueprint.vectors()) + v;
    let inside = column < columns;
    let vector = if comptime!(blueprint.even) {
        vector
    } else {
        select(inside, vector, 0u32)
    };
    let at = line + vector as usize;
    let values = if comptime!(blueprint.lines > 0) {
        copy[at]
    } else {
        x[at]
    };
    if comptime!(blueprint.even) {
        values
    } else {
        select(inside, values, Vector::new(X::from_int(0)))
    }
}

/// Adds the products of a lane's 16 bytes of two rows of weights with the same columns of a row of `x` to the sums of tile `t`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn add_products<X: Float, N: Size>(
    low: &Array<Vector<u32, Const<4>>>,
    high: &Array<Vector<u32, Const<4>>>,
    x: &Array<Vector<X, N>>,
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] t: u32,
    #[comptime] turn: u32,
    #[comptime] blueprint: TilesBlueprint,
) {
    #[unroll]
    for part in 0..comptime!(blueprint.parts) {
        let columns = columns_of(x, part, blueprint);
        #[unroll]
        for weight_part in 0..comptime!(blueprint.weight_parts as usize) {
            let sum = comptime!(if part == 0 && weight_part == 0 {
                turn
            } else {
                2
            });
            let to = comptime!((t * blueprint.sums() + sum) as usize);
            #[unroll]
            for m in 0..2usize {
                sums[to] = multiply_tiles(
                    low[weight_part].extract(comptime!(2 * m)),
                    high[weight_part].extract(comptime!(2 * m)),
                    low[weight_part].extract(comptime!(2 * m + 1)),
                    high[weight_part].extract(comptime!(2 * m + 1)),
                    columns.extract(comptime!(2 * m)),
                    columns.extract(comptime!(2 * m + 1)),
                    sums[to],
                    comptime!(blueprint.dtype()),
                );
            }
        }
    }
}

/// The parts of a lane's 16 bytes of weights.
#[cube]
fn weights_of(
    words: Vector<u32, Const<4>>,
    #[comptime] blueprint: TilesBlueprint,
) -> Array<Vector<u32, Const<4>>> {
    let mut parts = Array::<Vector<u32, Const<4>>>::new(comptime!(blueprint.weight_parts as usize));
    if comptime!(blueprint.weight_parts == 1) {
        parts[0] = words;
    } else {
        let mut first = Vector::<u32, Const<4>>::new(0u32);
        let mut second = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for i in 0..4usize {
            // The upper eight bits of a significand of eleven, and the rest.
            let word = words.extract(i);
            let upper = word & 0xfff8_fff8u32;
            first.insert(i, halves_to_bf16(upper));
            second.insert(i, halves_to_bf16(half_differences(word, upper)));
        }
        parts[0] = first;
        parts[1] = second;
    }
    parts
}

/// The four pairs of 8 columns of `x`, or a part of them.
#[cube]
fn columns_of<X: Float, N: Size>(
    x: &Array<Vector<X, N>>,
    #[comptime] part: u32,
    #[comptime] blueprint: TilesBlueprint,
) -> Vector<u32, Const<4>> {
    if comptime!(blueprint.parts == 1) {
        Vector::<u32, Const<4>>::reinterpret(x[0usize])
    } else {
        let mut pairs = Vector::<u32, Const<4>>::new(0u32);
        let size = comptime!(8 / blueprint.vectors() as usize);
        #[unroll]
        for i in 0..4usize {
            let vector = Vector::<f32, N>::cast_from(x[comptime!(2 * i / size)]);
            let low = part_of(vector.extract(comptime!(2 * i % size)), part);
            let high = part_of(vector.extract(comptime!(2 * i % size + 1)), part);
            pairs.insert(i, pair(low, high));
        }
        pairs
    }
}
