//! The projection of the streams of tokens, with split-K: its columns are divided among cubes. Each
//! cube has some channels of all streams, which are also what it needs to spread an output over
//! them.

use cubecl::prelude::*;

use super::expand::PendingOutput;
use super::token::Streams;
use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::{group_sum, modulo, read_ordered};

/// How the kernels are compiled. Only [`cube_tokens`](Self::cube_tokens) depends on the tokens, and
/// a token has the same bits whatever others its cube has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProjectBlueprint {
    /// Tokens of a cube, at most, in shared memory.
    pub cube_tokens: u32,
    /// Streams of a token.
    pub streams: u32,
    /// Rows of the projection.
    pub rows: u32,
    /// Channels of a split, a power of two.
    pub channels: u32,
    /// Lanes that share a row.
    pub lanes: u32,
    /// Rows that a cube computes at once.
    pub groups: u32,
    /// The instructions that the kernels may use.
    pub target: Target,
}

impl ProjectBlueprint {
    /// Products and, last, the sum of squares.
    pub fn sums(&self) -> u32 {
        self.rows + 1
    }

    fn rounds(&self) -> u32 {
        self.sums().div_ceil(self.groups)
    }

    /// Vectors of `size` in all streams of a split.
    fn columns(&self, size: usize) -> usize {
        (self.streams * self.channels) as usize / size
    }

    /// Vectors of `size` of a cube's tokens.
    fn shared_vectors(&self, size: usize) -> usize {
        self.cube_tokens as usize * self.columns(size)
    }

    /// Vectors of a split in each lane.
    fn lane_vectors(&self, size: usize) -> usize {
        self.columns(size) / self.lanes as usize
    }
}

/// Spreads an output over the streams, where one is pending, as
/// [`expand_kernel`](super::expand_kernel) does, and multiplies the streams of all tokens by the
/// rows of `function`, and by themselves.
///
/// - `function`: `[rows, n, d]`
/// - `partials`: the partials of the products and of the sum of squares for each split,
///   `[tokens, rows + 1, splits]`
///
/// Cube `(x, y)` computes split `x` of group `y` of the tokens.
#[cube(launch_unchecked, address_type = "dynamic")]
// Compile-time conditions have an `if` of their own, so that the code they exclude is not compiled.
#[allow(clippy::collapsible_if)]
pub(crate) fn expand_project_kernel<F: Float, Y: Float, W: Float, N: Size, M: Size>(
    spread: &mut SpreadOutput<F, Y, N>,
    streams: &Streams<F, N>,
    function: &[Vector<W, M>],
    partials: &mut [f32],
    #[comptime] blueprint: ProjectBlueprint,
    #[define(F, Y, W)] _dtypes: [ElemType; 3],
) {
    let n = comptime!(blueprint.streams);
    let size = N::value();
    let vectors = comptime!(blueprint.channels / size as u32);
    let piece = M::value();
    // Requested before the kernel waits for the streams.
    let row_vectors = streams.vectors * comptime!((size / piece) as u32);
    let weights = read_weights(function, row_vectors, 0u32, blueprint);
    let mut shared_streams =
        Shared::<[Vector<f32, M>]>::new_slice(comptime!(blueprint.shared_vectors(piece)));
    let (first_token, tokens) = cube_tokens(streams, blueprint);
    let mut index = UNIT_POS;
    while index < tokens * comptime!(n * vectors) {
        let vector = CUBE_POS_X * vectors + index % vectors;
        let inside = vector < streams.vectors;
        let at = select(inside, vector, 0u32) as usize;
        let token = (first_token + index / comptime!(n * vectors)) as usize;
        let target = (modulo(index / vectors, n)) as usize;
        let value = spread.stream(streams, token, target, at, blueprint);
        #[comptime]
        if let ComptimeOption::Some(expanded) = spread.expanded.as_mut() {
            if inside {
                let to = token * comptime!(n as usize) + target;
                expanded[to * streams.vectors as usize + at] = value;
            }
        }
        let value = select(inside, value, Vector::new(F::new(0.0)));
        store_shared(value, index, &mut shared_streams);
        index += CUBE_DIM;
    }
    sync_cube();
    add_round(&weights, &shared_streams, partials, tokens, 0u32, blueprint);
    #[unroll]
    for round in 1..comptime!(blueprint.rounds()) {
        let weights = read_weights(function, row_vectors, round, blueprint);
        add_round(
            &weights,
            &shared_streams,
            partials,
            tokens,
            round,
            blueprint,
        );
    }
}

/// An output that is pending, and the streams with it spread over them.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SpreadOutput<F: Float, Y: Float, N: Size> {
    pub pending: ComptimeOption<PendingOutput<Y, N>>,
    /// `[tokens, n, d]`; only where an output is pending.
    pub expanded: ComptimeOption<Box<[Vector<F, N>]>>,
}

#[cube]
impl<F: Float, Y: Float, N: Size> SpreadOutput<F, Y, N> {
    /// Vector `at` of stream `target` of a token, with the output spread over it.
    fn stream(
        &self,
        streams: &Streams<F, N>,
        token: usize,
        target: usize,
        at: usize,
        #[comptime] blueprint: ProjectBlueprint,
    ) -> Vector<F, N> {
        #[comptime]
        if let ComptimeOption::Some(pending) = &self.pending {
            let n = comptime!(blueprint.streams as usize);
            let mut values = Array::<Vector<F, N>>::new(n);
            let mut factors = Array::<f32>::new(comptime!(1 + n));
            let first = token * comptime!((2 + n) * n) + target;
            // What is used first is read last.
            #[unroll]
            for i in 0..n {
                let source = comptime!(n - 1 - i);
                let from = token * streams.token + source * streams.stream + at;
                values[source] = read_ordered(&streams.values, from, blueprint.target);
            }
            #[unroll]
            for i in 0..comptime!(1 + n) {
                let row = comptime!(n - i);
                let from = first + comptime!((1 + row) * n);
                factors[row] = read_ordered(&pending.coefficients, from, blueprint.target);
            }
            let from = token * pending.stride + at;
            let own = read_ordered(&pending.output, from, blueprint.target);
            let mut sum = Vector::<f32, N>::cast_from(own) * Vector::new(factors[0]);
            #[unroll]
            for source in 0..n {
                let comb = factors[comptime!(1 + source)];
                sum = fma(Vector::new(comb), Vector::cast_from(values[source]), sum);
            }
            Vector::<F, N>::cast_from(sum)
        } else {
            streams.values[token * streams.token + target * streams.stream + at]
        }
    }
}

/// The first token of a cube, and how many it has.
#[cube]
fn cube_tokens<F: Float, N: Size>(
    streams: &Streams<F, N>,
    #[comptime] blueprint: ProjectBlueprint,
) -> (u32, u32) {
    let first = CUBE_POS_Y * blueprint.cube_tokens;
    (first, min(streams.tokens - first, blueprint.cube_tokens))
}

/// Stores a vector of a split in shared memory, as it has been rounded.
#[cube]
fn store_shared<F: Float, N: Size, M: Size>(
    value: Vector<F, N>,
    index: u32,
    shared_streams: &mut Shared<[Vector<f32, M>]>,
) {
    let size = N::value();
    let piece = M::value();
    let pieces = comptime!(size / piece);
    #[unroll]
    for i in 0..pieces {
        let mut part = Vector::<f32, M>::new(0.0f32);
        #[unroll]
        for j in 0..piece {
            part.insert(j, f32::cast_from(value.extract(comptime!(i * piece + j))));
        }
        shared_streams[index as usize * pieces + i] = part;
    }
}

/// Reads a lane's vectors of a row of `function`, whose streams have `vectors` vectors. The lanes
/// of a row read the vectors of the split strided.
#[cube]
fn read_weights<W: Float, M: Size>(
    function: &[Vector<W, M>],
    vectors: u32,
    #[comptime] round: u32,
    #[comptime] blueprint: ProjectBlueprint,
) -> Array<Vector<f32, M>> {
    let ProjectBlueprint {
        streams,
        rows,
        channels,
        lanes,
        groups,
        ..
    } = comptime!(blueprint);
    let size = M::value();
    let lane_vectors = comptime!(blueprint.lane_vectors(size));
    let split_vectors = comptime!(channels / size as u32);
    let row = min(UNIT_POS / lanes + comptime!(round * groups), rows - 1);
    let mut weights = Array::<Vector<f32, M>>::new(lane_vectors);
    #[unroll]
    for i in 0..lane_vectors {
        let first = comptime!(i as u32 * lanes);
        let stream = row * streams + comptime!(first / split_vectors);
        let vector =
            CUBE_POS_X * split_vectors + UNIT_POS % lanes + comptime!(first % split_vectors);
        let inside = vector < vectors;
        let from = stream as usize * vectors as usize + select(inside, vector, 0u32) as usize;
        let values = Vector::<f32, M>::cast_from(function[from]);
        weights[i] = select(inside, values, Vector::new(0.0f32));
    }
    weights
}

/// Writes the partials of the rows that the cube computes in one round.
/// Every unit of the cube must call this.
#[cube]
fn add_round<M: Size>(
    weights: &Array<Vector<f32, M>>,
    shared_streams: &Shared<[Vector<f32, M>]>,
    partials: &mut [f32],
    tokens: u32,
    #[comptime] round: u32,
    #[comptime] blueprint: ProjectBlueprint,
) {
    let size = M::value();
    let columns = comptime!(blueprint.columns(size));
    let lane_vectors = comptime!(blueprint.lane_vectors(size));
    let lanes = comptime!(blueprint.lanes);
    let lane = UNIT_POS % lanes;
    let row = UNIT_POS / lanes + comptime!(round * blueprint.groups);
    let squares = row == blueprint.rows;
    for token in 0..tokens {
        let first = token as usize * columns + lane as usize;
        let mut sums = Vector::<f32, M>::new(0.0f32);
        #[unroll]
        for i in 0..lane_vectors {
            let x = shared_streams[first + comptime!(i * lanes as usize)];
            sums = fma(select(squares, x, weights[i]), x, sums);
        }
        let mut sum = sums.extract(0usize);
        #[unroll]
        for j in 1..size {
            sum += sums.extract(j);
        }
        let sum = group_sum(sum, lanes, blueprint.target);
        if lane == 0 && row <= blueprint.rows {
            let own = (CUBE_POS_Y * blueprint.cube_tokens + token) as usize;
            let to = own * comptime!(blueprint.sums() as usize) + row as usize;
            partials[to * CUBE_COUNT_X as usize + CUBE_POS_X as usize] = sum;
        }
    }
}
