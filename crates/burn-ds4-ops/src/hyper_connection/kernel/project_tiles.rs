//! The projection of the streams of many tokens, on tensor cores.

use cubecl::prelude::*;

use super::expand::PendingOutput;
use super::token::Streams;
use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::gemm::kernel::{bf16_pair, term_of};
use crate::intrinsics::{group_sum, modulo, multiply_tiles};

/// Tokens that a plane multiplies at a time.
pub(crate) const TILE_TOKENS: usize = 16;
/// Channels of a step: four lanes have eight each.
pub(crate) const STEP_CHANNELS: usize = 32;
/// Terms in `bf16` of a number of the projection, which hold all bits of an `f32`.
const TERMS: u32 = 3;

/// How [`project_tiles_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProjectTilesBlueprint {
    /// Streams of a token.
    pub streams: u32,
    /// Rows of the projection.
    pub rows: u32,
    /// Channels of a split, a multiple of [`STEP_CHANNELS`].
    pub channels: u32,
    /// Planes of a cube.
    pub planes: u32,
    pub target: Target,
}

impl ProjectTilesBlueprint {
    fn steps(self) -> u32 {
        self.channels / STEP_CHANNELS as u32
    }

    /// Tiles of eight rows of the projection.
    fn row_tiles(self) -> u32 {
        self.rows.div_ceil(8)
    }

    /// Tiles of eight rows and the channels of a step in a split of the projection.
    fn split_tiles(self) -> u32 {
        self.streams * self.steps() * self.row_tiles()
    }

    /// Bytes of shared memory: the terms of a split of the projection.
    pub fn shared_bytes(self) -> usize {
        (self.split_tiles() * TERMS * 32 * 16) as usize
    }
}

/// Spreads an output over the streams, where one is pending, as
/// [`expand_kernel`](super::expand_kernel) does, and multiplies the streams of all tokens by the
/// rows of `function`, and by themselves.
///
/// - `function`: `[rows, n, d]`
/// - `expanded`: `[tokens, n, d]`; not written if nothing is pending
/// - `partials`: the partials of the products and of the sum of squares for each split,
///   `[tokens, rows + 1, splits]`
///
/// Cube `(x, y)` has split `x` of the projection in shared memory. Planes take 16 tokens at a time
/// and keep the products with all rows in registers. The order of channels in a step is that in
/// which lanes read them, for tokens and rows alike.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn project_tiles_kernel<F: Float, W: Float, N: Size, M: Size>(
    pending: &ComptimeOption<PendingOutput<F, N>>,
    streams: &Streams<F, N>,
    function: &[Vector<W, M>],
    expanded: &mut [Vector<F, N>],
    partials: &mut [f32],
    #[comptime] blueprint: ProjectTilesBlueprint,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    let ProjectTilesBlueprint {
        rows,
        planes,
        target,
        ..
    } = comptime!(blueprint);
    let n = comptime!(blueprint.streams);
    let (steps, row_tiles) = comptime!((blueprint.steps(), blueprint.row_tiles()));
    let mut weights =
        Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(blueprint.shared_bytes() / 16));
    store_terms(function, &mut weights, streams.vectors, blueprint);
    sync_cube();
    let (group, quarter) = (UNIT_POS_X / 4, UNIT_POS_X % 4);
    let tiles = streams.tokens.div_ceil(comptime!(TILE_TOKENS as u32));
    for tile in range_stepped(
        CUBE_POS_Y * planes + UNIT_POS_Y,
        tiles,
        CUBE_COUNT_Y * planes,
    ) {
        let first = tile * comptime!(TILE_TOKENS as u32) + group;
        let low = TokenPart::new(pending, first, streams.tokens, n);
        let high = TokenPart::new(pending, first + 8, streams.tokens, n);
        let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(2 * row_tiles as usize));
        #[unroll]
        for i in 0..comptime!(2 * row_tiles as usize) {
            sums[i] = Vector::new(0.0f32);
        }
        let mut low_squares = 0.0f32;
        let mut high_squares = 0.0f32;
        for step in 0..steps {
            let vector = (CUBE_POS_X * steps + step) * 4 + quarter;
            let low_values = low.values(pending, streams, vector, n);
            let high_values = high.values(pending, streams, vector, n);
            #[unroll]
            for stream in 0..n {
                let own_low = low.stream(pending, &low_values, stream, n);
                let own_high = high.stream(pending, &high_values, stream, n);
                #[comptime]
                if let ComptimeOption::Some(_pending) = pending {
                    let at = comptime!(stream) * streams.vectors + vector;
                    if vector < streams.vectors {
                        let token_vectors = n * streams.vectors;
                        if first < streams.tokens {
                            let to = first as usize * token_vectors as usize + at as usize;
                            expanded[to] = own_low;
                        }
                        if first + 8 < streams.tokens {
                            let to = (first + 8) as usize * token_vectors as usize + at as usize;
                            expanded[to] = own_high;
                        }
                    }
                }
                let own_low = Vector::<u32, Const<4>>::reinterpret(own_low);
                let own_high = Vector::<u32, Const<4>>::reinterpret(own_high);
                low_squares = add_squares(own_low, low_squares);
                high_squares = add_squares(own_high, high_squares);
                #[unroll]
                for tile in 0..row_tiles {
                    let at = ((comptime!(stream) * steps + step) * row_tiles + tile)
                        * comptime!(TERMS * 32)
                        + UNIT_POS_X;
                    #[unroll]
                    for term in 0..TERMS {
                        let words = weights[(at + comptime!(term * 32)) as usize];
                        // Small terms would be lost in the sums of the first.
                        let to = comptime!((2 * tile + term.min(1)) as usize);
                        #[unroll]
                        for half in 0..2usize {
                            let (i, j) = comptime!((2 * half, 2 * half + 1));
                            sums[to] = multiply_tiles(
                                own_low.extract(i),
                                own_high.extract(i),
                                own_low.extract(j),
                                own_high.extract(j),
                                words.extract(i),
                                words.extract(j),
                                sums[to],
                                "bf16",
                            );
                        }
                    }
                }
            }
        }
        let low_squares = group_sum(low_squares, 4u32, target);
        let high_squares = group_sum(high_squares, 4u32, target);
        #[unroll]
        for half in 0..2u32 {
            let token = first + comptime!(8 * half);
            if token < streams.tokens {
                let to = token as usize * comptime!((rows + 1) as usize);
                let splits = CUBE_COUNT_X as usize;
                #[unroll]
                for tile in 0..row_tiles {
                    let at = comptime!(2 * tile as usize);
                    let sum = sums[at] + sums[comptime!(at + 1)];
                    #[unroll]
                    for column in 0..2u32 {
                        let row = comptime!(8 * tile + column) + quarter * 2;
                        if row < rows {
                            let sum = sum.extract(comptime!((2 * half + column) as usize));
                            partials[(to + row as usize) * splits + CUBE_POS_X as usize] = sum;
                        }
                    }
                }
                if quarter == 0 {
                    let squares = if comptime!(half == 0) {
                        low_squares
                    } else {
                        high_squares
                    };
                    partials[(to + rows as usize) * splits + CUBE_POS_X as usize] = squares;
                }
            }
        }
    }
}

/// Stores the terms of the cube's split of the projection, as lanes read them.
#[cube]
fn store_terms<W: Float, M: Size>(
    function: &[Vector<W, M>],
    weights: &mut Shared<[Vector<u32, Const<4>>]>,
    vectors: u32,
    #[comptime] blueprint: ProjectTilesBlueprint,
) {
    let (steps, row_tiles) = comptime!((blueprint.steps(), blueprint.row_tiles()));
    let size = M::value();
    for index in range_stepped(UNIT_POS, comptime!(blueprint.split_tiles() * 32), CUBE_DIM) {
        let (tile, lane) = (index / 32, index % 32);
        let row = modulo(tile, row_tiles) * 8 + lane / 4;
        let step = modulo(tile / row_tiles, steps);
        let stream = tile / comptime!(row_tiles * steps);
        let vector = (CUBE_POS_X * steps + step) * 4 + lane % 4;
        let inside = row < blueprint.rows && vector < vectors;
        let from = (row * blueprint.streams + stream) as usize * vectors as usize + vector as usize;
        let from = select(inside, from, 0usize) * comptime!(8 / size);
        let mut values = Array::<f32>::new(8usize);
        #[unroll]
        for piece in 0..comptime!(8 / size) {
            let read = function[from + piece];
            #[unroll]
            for i in 0..size {
                let value = f32::cast_from(read.extract(i));
                values[comptime!(piece * size + i)] = select(inside, value, 0.0f32);
            }
        }
        #[unroll]
        for term in 0..TERMS {
            let mut words = Vector::<u32, Const<4>>::new(0u32);
            #[unroll]
            for i in 0..4usize {
                let low = term_of(values[comptime!(2 * i)], term);
                let high = term_of(values[comptime!(2 * i + 1)], term);
                words.insert(i, bf16_pair(low, high));
            }
            weights[((tile * TERMS + term) * 32 + lane) as usize] = words;
        }
    }
}

/// One of a lane's two tokens. The last one stands for those past the end.
#[derive(CubeType)]
struct TokenPart {
    token: u32,
    /// What spreads a pending output: the factors of the output, then those of each stream.
    factors: Array<f32>,
}

#[cube]
impl TokenPart {
    fn new<F: Float, N: Size>(
        pending: &ComptimeOption<PendingOutput<F, N>>,
        token: u32,
        tokens: u32,
        #[comptime] n: u32,
    ) -> TokenPart {
        let token = min(token, tokens - 1);
        let count = comptime!(((1 + n) * n) as usize);
        let mut factors = Array::<f32>::new(count);
        #[comptime]
        if let ComptimeOption::Some(pending) = pending {
            let first = token as usize * comptime!(((2 + n) * n) as usize) + comptime!(n as usize);
            #[unroll]
            for i in 0..count {
                factors[i] = pending.coefficients[first + i];
            }
        }
        TokenPart { token, factors }
    }

    /// The token's vectors of the streams and, last, of a pending output. Zeros stand for channels
    /// past the end.
    fn values<F: Float, N: Size>(
        &self,
        pending: &ComptimeOption<PendingOutput<F, N>>,
        streams: &Streams<F, N>,
        vector: u32,
        #[comptime] n: u32,
    ) -> Array<Vector<F, N>> {
        let mut values = Array::<Vector<F, N>>::new(comptime!((n + 1) as usize));
        let inside = vector < streams.vectors;
        let at = select(inside, vector, 0u32) as usize;
        let first = self.token as usize * streams.token + at;
        #[unroll]
        for stream in 0..comptime!(n as usize) {
            let value = streams.values[first + stream * streams.stream];
            values[stream] = select(inside, value, Vector::new(F::new(0.0)));
        }
        #[comptime]
        if let ComptimeOption::Some(pending) = pending {
            let value = pending.output[self.token as usize * pending.stride + at];
            values[comptime!(n as usize)] = select(inside, value, Vector::new(F::new(0.0)));
        }
        values
    }

    /// A stream with a pending output spread over it, rounded as it is written.
    fn stream<F: Float, N: Size>(
        &self,
        pending: &ComptimeOption<PendingOutput<F, N>>,
        values: &Array<Vector<F, N>>,
        #[comptime] stream: u32,
        #[comptime] n: u32,
    ) -> Vector<F, N> {
        let mut own = values[comptime!(stream as usize)];
        #[comptime]
        if let ComptimeOption::Some(_pending) = pending {
            let output = Vector::<f32, N>::cast_from(values[comptime!(n as usize)]);
            let mut sum = output * Vector::new(self.factors[comptime!(stream as usize)]);
            #[unroll]
            for source in 0..n {
                let factor = self.factors[comptime!((n + source * n + stream) as usize)];
                let value = Vector::<f32, N>::cast_from(values[comptime!(source as usize)]);
                sum = fma(Vector::new(factor), value, sum);
            }
            own = Vector::cast_from(sum);
        }
        own
    }
}

/// Adds the squares of eight `bf16` values.
#[cube]
fn add_squares(words: Vector<u32, Const<4>>, sum: f32) -> f32 {
    let mut sum = sum;
    #[unroll]
    for i in 0..4usize {
        let word = words.extract(i);
        let (low, high) = (
            f32::reinterpret(word << 16),
            f32::reinterpret(word & 0xffff_0000u32),
        );
        sum = fma(high, high, fma(low, low, sum));
    }
    sum
}
