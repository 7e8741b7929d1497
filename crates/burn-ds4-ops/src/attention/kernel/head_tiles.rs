//! Tiles of heads on tensor cores: what the kernels do with a block of rows in shared memory.

use cubecl::prelude::*;

use super::softmax::softmax_weight;
use crate::attention::options::{HIDDEN_BELOW, MASKED};
use crate::caps::Target;
use crate::intrinsics::{group_max, group_sums, modulo, multiply_tiles, pack_bf16, pack_f16};

/// Heads of a tile, and planes of a cube.
pub(crate) const TILE_HEADS: u32 = 16;
pub(crate) const TILE_PLANES: u32 = 8;
/// Lanes of a plane.
pub(crate) const LANES: u32 = 32;
/// Channels of the weighted sums that a plane computes, and the same in vectors.
pub(crate) const SLICE_CHANNELS: u32 = 64;
pub(super) const SLICE_VECTORS: u32 = SLICE_CHANNELS / 8;
/// Columns of a tile of weights.
pub(crate) const SUMMED_COLUMNS: u32 = 16;
/// Words between rows of logits, and between rows of weights, so that values that are read together
/// are in different banks.
const LOGIT_GAP: u32 = 8;
const WEIGHT_GAP: u32 = 4;

/// The heads of a cube, and the block of rows that they attend to. Both are in shared memory:
/// vectors of 8 channels of rows where [`swizzled`] says, queries as [stored](store_queries).
///
/// Rows `r` and `r + 8` of a tile of heads are neighbouring heads, which a plane prepares: a lane
/// multiplies both at once.
///
/// A block goes through three phases with a barrier after each. First, planes [multiply the
/// queries](multiply_queries) by the columns. Then, each [computes the
/// weights](PlaneSoftmax::weigh) of some heads. Last, each [adds a slice](add_rows) of the
/// channels of all heads. The weights of columns are rounded to 16 bits, and the divisor is the
/// sum of the rounded weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HeadTiles {
    /// Tiles of [`TILE_HEADS`] heads of a cube: 1, 2 or 4.
    pub head_tiles: u32,
    /// Vectors of 8 channels of a row: a multiple of 8, at most 64.
    pub vectors: u32,
    /// Columns of a block, at most: a multiple of [`SUMMED_COLUMNS`].
    pub columns: u32,
    /// Sums of a dot product, which take turns: 1 or 2. With few tiles, neighbouring products would
    /// otherwise depend on each other.
    pub dot_sums: u32,
    /// Whether rows are `f16` rather than `bf16`.
    pub f16_input: bool,
    pub target: Target,
}

impl HeadTiles {
    /// Heads of a cube.
    pub const fn heads(self) -> u32 {
        self.head_tiles * TILE_HEADS
    }

    /// Heads whose weights a plane computes.
    pub const fn plane_heads(self) -> u32 {
        self.heads() / TILE_PLANES
    }

    /// Planes among which the heads of logits are divided. Their columns are among the others.
    const fn logit_planes(self) -> u32 {
        if self.head_tiles == 1 { 1 } else { 2 }
    }

    /// Words of a row of logits, and of a row of weights, two to a word.
    const fn logit_stride(self) -> u32 {
        self.columns + LOGIT_GAP
    }

    const fn weight_stride(self) -> u32 {
        self.columns / 2 + WEIGHT_GAP
    }

    /// Vectors of the queries of a cube, and of a block of rows.
    pub const fn query_vectors(self) -> u32 {
        self.heads() * self.vectors
    }

    pub const fn block_vectors(self) -> u32 {
        self.columns * self.vectors
    }

    /// Words of the logits of a block, and of its weights.
    pub const fn logit_words(self) -> u32 {
        self.heads() * self.logit_stride()
    }

    pub const fn weight_words(self) -> u32 {
        self.heads() * self.weight_stride()
    }

    /// Shared memory of a cube that has `stages` blocks of rows, each with a bias for every column,
    /// and three numbers for each head.
    pub const fn shared_bytes(self, stages: u32) -> usize {
        let vectors = self.query_vectors() + stages * self.block_vectors();
        let of_block = self.logit_words() + self.weight_words();
        let words = of_block + stages * self.columns + 3 * self.heads();
        (16 * vectors + 4 * words) as usize
    }
}

/// The position of a vector in its row in shared memory. Lanes `4 * g + q` of a quarter of a plane
/// read the vectors `q` of rows `g`, or the vectors `g` of rows `2 * q`.
#[cube]
pub(super) fn swizzled(row: u32, vector: u32) -> u32 {
    vector ^ ((row & 6) ^ ((row & 1) << 2))
}

/// The row of head `h` of a plane, of those that it prepares.
#[cube]
pub(super) fn plane_row(#[comptime] h: u32) -> u32 {
    UNIT_POS_Y + comptime!(h / 2 * TILE_HEADS + h % 2 * 8)
}

/// The head of a row, counted from the first of a cube.
#[cube]
pub(super) fn head_of_row(row: u32) -> u32 {
    row / TILE_HEADS * TILE_HEADS + row % 8 * 2 + row / 8 % 2
}

/// Stores vector `vector` of the queries of rows `row`, one of the first eight of its tile, and
/// `row + 8`, as a lane multiplies them: for each half of a vector, words of both rows in turn. In
/// odd steps, lanes are in another order, so that those that store together do so to different
/// banks.
#[cube]
pub(super) fn store_queries<F: Float>(
    queries: &mut Shared<[Vector<F, Const<8>>]>,
    row: u32,
    vector: u32,
    low: Vector<F, Const<8>>,
    high: Vector<F, Const<8>>,
    #[comptime] tiles: HeadTiles,
) {
    let low = Vector::<u32, Const<4>>::reinterpret(low);
    let high = Vector::<u32, Const<4>>::reinterpret(high);
    let step = row / TILE_HEADS * comptime!(tiles.vectors / 4) + vector / 4;
    let lane = (row % 8 * 4 + vector % 4) ^ (vector & 4);
    #[unroll]
    for half in 0..2usize {
        let mut operands = Vector::<u32, Const<4>>::new(low.extract(comptime!(2 * half)));
        operands.insert(1usize, high.extract(comptime!(2 * half)));
        operands.insert(2usize, low.extract(comptime!(2 * half + 1)));
        operands.insert(3usize, high.extract(comptime!(2 * half + 1)));
        let to = (step * comptime!(2 * LANES) + lane) as usize;
        queries[to + comptime!(half * LANES as usize)] =
            Vector::<F, Const<8>>::reinterpret(operands);
    }
}

/// Writes the logits of the block of `columns` columns, whole tiles of weights, that begins at
/// column `first` of `rows`.
#[cube]
pub(super) fn multiply_queries<F: Float>(
    queries: &Shared<[Vector<F, Const<8>>]>,
    rows: &Shared<[Vector<F, Const<8>>]>,
    biases: &Shared<[f32]>,
    logits: &mut Shared<[f32]>,
    first: u32,
    columns: u32,
    scale: f32,
    #[comptime] tiles: HeadTiles,
) {
    let (vectors, stride) = comptime!((tiles.vectors, tiles.logit_stride()));
    let planes = comptime!(tiles.logit_planes());
    let column_planes = comptime!(TILE_PLANES / planes);
    let m_tiles = comptime!(tiles.head_tiles / planes);
    let n_tiles = comptime!((tiles.columns / 8).div_ceil(column_planes));
    let dtype = comptime!(if tiles.f16_input { "f16" } else { "bf16" });
    let (group, group_lane) = (UNIT_POS_X / 4, UNIT_POS_X % 4);
    let first_tile = modulo(UNIT_POS_Y, planes) * m_tiles;
    let first_row = first_tile * TILE_HEADS + group;
    let even = swizzled(group, group_lane);
    // The first column of each tile of the plane, and where the lane's first vectors of it are, for
    // even and odd steps; a tile that is not there repeats the last one.
    let mut starts = Array::<u32>::new(n_tiles as usize);
    let mut keys_at = Array::<usize>::new(comptime!(2 * n_tiles as usize));
    #[unroll]
    for n in 0..n_tiles {
        let own = UNIT_POS_Y / planes * 8 + comptime!(n * column_planes * 8);
        let start = min(own, columns - 8);
        starts[n as usize] = start;
        // The rows of all tiles of a lane are the same modulo 8.
        let row = (first + start + group) as usize * vectors as usize;
        keys_at[comptime!(2 * n as usize)] = row + even as usize;
        keys_at[comptime!(2 * n as usize + 1)] = row + (even ^ 4) as usize;
    }
    let queries_at = (first_tile * comptime!(TILE_HEADS * vectors)) as usize;
    let mut slots = Array::<usize>::new(2usize);
    slots[0] = queries_at + UNIT_POS_X as usize;
    slots[1] = queries_at + (UNIT_POS_X ^ 4) as usize;
    let dot_sums = comptime!(tiles.dot_sums);
    let count = comptime!((m_tiles * n_tiles * dot_sums) as usize);
    let mut sums = Array::<Vector<f32, Const<4>>>::new(count);
    #[unroll]
    for i in 0..count {
        sums[i] = Vector::new(0.0f32);
    }
    #[unroll]
    for step in 0..comptime!(vectors as usize / 4) {
        let odd = comptime!(step % 2);
        let mut keys = Array::<Vector<u32, Const<4>>>::new(n_tiles as usize);
        #[unroll]
        for n in 0..comptime!(n_tiles as usize) {
            let at = keys_at[comptime!(2 * n + odd)] + comptime!(step / 2 * 8);
            keys[n] = Vector::<u32, Const<4>>::reinterpret(rows[at]);
        }
        #[unroll]
        for m in 0..m_tiles {
            #[unroll]
            for half in 0..2u32 {
                let turn = comptime!((2 * step as u32 + half) % dot_sums);
                let ahead = comptime!(
                    (m * TILE_HEADS * vectors + (2 * step as u32 + half) * LANES) as usize
                );
                let query = Vector::<u32, Const<4>>::reinterpret(queries[slots[odd] + ahead]);
                #[unroll]
                for n in 0..n_tiles {
                    let key = keys[n as usize];
                    let own = comptime!(((m * n_tiles + n) * dot_sums + turn) as usize);
                    sums[own] = multiply_tiles(
                        query.extract(0usize),
                        query.extract(1usize),
                        query.extract(2usize),
                        query.extract(3usize),
                        key.extract(comptime!(2 * half as usize)),
                        key.extract(comptime!(2 * half as usize + 1)),
                        sums[own],
                        dtype,
                    );
                }
            }
        }
    }
    #[unroll]
    for n in 0..n_tiles {
        #[unroll]
        for part in 0..2u32 {
            let column = starts[n as usize] + group_lane * 2 + part;
            let bias = biases[(first + column) as usize];
            let hidden = bias < HIDDEN_BELOW;
            #[unroll]
            for m in 0..m_tiles {
                let own = comptime!(((m * n_tiles + n) * dot_sums) as usize);
                let mut dots = sums[own];
                #[unroll]
                for turn in 1..comptime!(dot_sums as usize) {
                    dots += sums[comptime!(own + turn)];
                }
                let at = ((first_row + comptime!(m * 16)) * stride + column) as usize;
                let low = fma(dots.extract(comptime!(part as usize)), scale, bias);
                let high = fma(dots.extract(comptime!(part as usize + 2)), scale, bias);
                logits[at] = select(hidden, MASKED, low);
                logits[at + comptime!((8 * stride) as usize)] = select(hidden, MASKED, high);
            }
        }
    }
}

/// The softmax of the heads that a plane prepares.
#[derive(CubeType)]
pub(super) struct PlaneSoftmax {
    /// The largest logits so far, at first what their sinks allow for.
    pub maxima: Array<f32>,
    /// This lane's parts of the sums of weights relative to them.
    pub totals: Array<f32>,
    #[cube(comptime)]
    tiles: HeadTiles,
}

#[cube]
impl PlaneSoftmax {
    pub fn new(#[comptime] tiles: HeadTiles) -> PlaneSoftmax {
        let heads = comptime!(tiles.plane_heads() as usize);
        let mut softmax = PlaneSoftmax {
            maxima: Array::new(heads),
            totals: Array::new(heads),
            tiles,
        };
        #[unroll]
        for h in 0..heads {
            softmax.maxima[h] = HIDDEN_BELOW.runtime();
            softmax.totals[h] = 0.0f32;
        }
        softmax
    }

    /// Writes the weights of `columns` columns for the plane's heads, two to a word, relative to
    /// the largest of the logits so far, and the factors that sums before are multiplied by.
    /// `at_once` heads do not wait for each other. Every lane of the plane must call this.
    pub fn weigh<F: Float>(
        &mut self,
        logits: &Shared<[f32]>,
        weights: &mut Shared<[u32]>,
        factors: &mut Shared<[f32]>,
        columns: u32,
        #[comptime] at_once: u32,
    ) {
        let tiles = comptime!(self.tiles);
        let lane_pairs = comptime!((tiles.columns / 2).div_ceil(LANES));
        let mut own = Array::<f32>::new(comptime!((2 * lane_pairs * at_once) as usize));
        let mut maxima = Array::<f32>::new(at_once as usize);
        #[unroll]
        for first in 0..comptime!(tiles.plane_heads() / at_once) {
            #[unroll]
            for i in 0..at_once {
                let h = comptime!(first * at_once + i);
                let start = (plane_row(h) * comptime!(tiles.logit_stride())) as usize;
                let mut maximum = self.maxima[h as usize];
                #[unroll]
                for pair in 0..lane_pairs {
                    let column = (UNIT_POS_X + pair * LANES) * 2;
                    let inside = column < columns;
                    let at = start + select(inside, column, 0u32) as usize;
                    let even = select(inside, logits[at], MASKED);
                    let odd = select(inside, logits[at + 1], MASKED);
                    maximum = max(maximum, max(even, odd));
                    let to = comptime!(2 * (i * lane_pairs + pair) as usize);
                    own[to] = even;
                    own[comptime!(to + 1)] = odd;
                }
                maxima[i as usize] = maximum;
            }
            #[unroll]
            for i in 0..at_once as usize {
                // No lane has a NaN, because the maximum of a NaN and a number is the number.
                maxima[i] = group_max(maxima[i], LANES, tiles.target);
            }
            #[unroll]
            for i in 0..at_once {
                let h = comptime!(first * at_once + i);
                let row = plane_row(h);
                let maximum = maxima[i as usize];
                let mut total = 0.0f32;
                #[unroll]
                for pair in 0..lane_pairs {
                    let from = comptime!(2 * (i * lane_pairs + pair) as usize);
                    let even = softmax_weight(own[from] - maximum, tiles.target);
                    let odd = softmax_weight(own[comptime!(from + 1)] - maximum, tiles.target);
                    total += f32::cast_from(F::cast_from(even)) + f32::cast_from(F::cast_from(odd));
                    let column_pair = UNIT_POS_X + pair * LANES;
                    if column_pair * 2 < columns {
                        let to = row * comptime!(tiles.weight_stride()) + column_pair;
                        weights[to as usize] = if comptime!(tiles.f16_input) {
                            pack_f16(even, odd)
                        } else {
                            pack_bf16(even, odd)
                        };
                    }
                }
                let h = h as usize;
                let factor = softmax_weight(self.maxima[h] - maximum, tiles.target);
                self.totals[h] = self.totals[h] * factor + total;
                self.maxima[h] = maximum;
                if UNIT_POS_X == 0 {
                    factors[row as usize] = factor;
                }
            }
        }
    }

    /// Adds up the parts of all lanes. Every lane of the plane must call this.
    pub fn add_lanes(&mut self) {
        let tiles = comptime!(self.tiles);
        group_sums(&mut self.totals, tiles.plane_heads(), LANES, tiles.target);
    }
}

/// Adds the rows of the block of `columns` columns, whole tiles of weights, that begins at column
/// `first` of `rows`, times their weights, to the sums of a slice of channels.
#[cube]
pub(super) fn add_rows<F: Float>(
    rows: &Shared<[Vector<F, Const<8>>]>,
    weights: &Shared<[u32]>,
    sums: &mut Array<Vector<f32, Const<4>>>,
    first: u32,
    columns: u32,
    #[comptime] tiles: HeadTiles,
) {
    let (vectors, stride) = comptime!((tiles.vectors, tiles.weight_stride()));
    let head_tiles = comptime!(tiles.head_tiles);
    let dtype = comptime!(if tiles.f16_input { "f16" } else { "bf16" });
    let (group, group_lane) = (UNIT_POS_X / 4, UNIT_POS_X % 4);
    // The columns of a lane are the same modulo 8, but for the lowest bit.
    let even = UNIT_POS_Y * SLICE_VECTORS + swizzled(group_lane * 2, group);
    let own_rows = (first + group_lane * 2) as usize * vectors as usize;
    let mut rows_at = Array::<usize>::new(2usize);
    rows_at[0] = own_rows + even as usize;
    rows_at[1] = own_rows + (even ^ 4) as usize;
    let mut weights_at = (group * stride + group_lane) as usize;
    for _ in 0..columns / SUMMED_COLUMNS {
        // Of 16 columns, the four that are this lane's part of a tile.
        let mut values = Array::<Vector<u32, Const<4>>>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            let row = comptime!((i / 2 * 8 + i % 2) * vectors as usize);
            let at = rows_at[comptime!(i % 2)] + row;
            values[i] = Vector::<u32, Const<4>>::reinterpret(rows[at]);
        }
        let mut words = Array::<u32>::new(comptime!(4 * head_tiles as usize));
        #[unroll]
        for m in 0..comptime!(head_tiles as usize) {
            #[unroll]
            for i in 0..4usize {
                let row = comptime!((16 * m + i % 2 * 8) * stride as usize);
                words[comptime!(4 * m + i)] = weights[weights_at + comptime!(row + i / 2 * 4)];
            }
        }
        rows_at[0] += comptime!((SUMMED_COLUMNS * vectors) as usize);
        rows_at[1] += comptime!((SUMMED_COLUMNS * vectors) as usize);
        weights_at += comptime!(SUMMED_COLUMNS as usize / 2);
        #[unroll]
        for i in 0..8usize {
            let (word, upper) = comptime!((i / 2, i % 2 == 1));
            let before = join_words(values[0].extract(word), values[1].extract(word), upper);
            let after = join_words(values[2].extract(word), values[3].extract(word), upper);
            #[unroll]
            for m in 0..head_tiles {
                let of_tile = comptime!(4 * m as usize);
                let own = comptime!(8 * m as usize + i);
                sums[own] = multiply_tiles(
                    words[of_tile],
                    words[comptime!(of_tile + 1)],
                    words[comptime!(of_tile + 2)],
                    words[comptime!(of_tile + 3)],
                    before,
                    after,
                    sums[own],
                    dtype,
                );
            }
        }
    }
}

/// Multiplies the sums so far by the factors of their heads.
#[cube]
pub(super) fn rescale(
    sums: &mut Array<Vector<f32, Const<4>>>,
    factors: &Shared<[f32]>,
    #[comptime] tiles: HeadTiles,
) {
    let group = UNIT_POS_X / 4;
    #[unroll]
    for m in 0..tiles.head_tiles {
        let low = factors[(group + comptime!(16 * m)) as usize];
        let high = factors[(group + comptime!(16 * m + 8)) as usize];
        let mut factor = Vector::<f32, Const<4>>::new(low);
        factor.insert(2usize, high);
        factor.insert(3usize, high);
        #[unroll]
        for i in 0..8u32 {
            let own = comptime!((8 * m + i) as usize);
            sums[own] *= factor;
        }
    }
}

/// Joins the lower or the upper 16 bits of two words.
#[cube]
fn join_words(first: u32, second: u32, #[comptime] upper: bool) -> u32 {
    if comptime!(upper) {
        (first >> 16) | (second & 0xffff_0000u32)
    } else {
        (first & 0xffffu32) | (second << 16)
    }
}

/// Vector `part` of the two of a slice that a lane has the sums of, for its head in half `half` of
/// the tiles: row `8 * half + UNIT_POS_X / 4` of the cube's.
#[cube]
pub(super) fn lane_sums(
    sums: &Array<Vector<f32, Const<4>>>,
    #[comptime] half: u32,
    #[comptime] part: u32,
) -> Vector<f32, Const<8>> {
    let mut vector = Vector::<f32, Const<8>>::new(0.0f32);
    #[unroll]
    for i in 0..8usize {
        let own = sums[comptime!(half as usize / 2 * 8 + i)];
        vector.insert(i, own.extract(comptime!((half % 2 * 2 + part) as usize)));
    }
    vector
}

/// The number of that vector in a row.
#[cube]
pub(super) fn lane_vector(#[comptime] part: u32) -> u32 {
    UNIT_POS_Y * SLICE_VECTORS + UNIT_POS_X % 4 * 2 + part
}
