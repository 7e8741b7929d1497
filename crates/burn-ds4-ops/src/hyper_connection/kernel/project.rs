//! The projection of a few tokens' streams, its columns shared out among cubes: each has a stretch of the channels of all streams,
//! which is also what spreading an output over them takes.

use cubecl::prelude::*;

use super::token::Layout;
use crate::intrinsics::{Target, group_sum};
use crate::matmul::INVARIANT_ROWS;

/// Tokens of a launch at most, all of which a cube keeps: so many have the same bits as each alone.
pub(crate) const MAX_TOKENS: usize = INVARIANT_ROWS;

/// How the kernels are compiled. None of it depends on the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProjectBlueprint {
    /// Streams of a token.
    pub streams: u32,
    /// Rows of the projection.
    pub rows: u32,
    /// Channels of a stretch, a power of two.
    pub width: u32,
    /// Lanes that share a row.
    pub lanes: u32,
    /// Rows that a cube has at once.
    pub groups: u32,
    /// What the instructions are that the kernels may use.
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

    /// Vectors of `size` of all streams of a stretch.
    fn columns(&self, size: usize) -> usize {
        (self.streams * self.width) as usize / size
    }

    /// Those of a lane.
    fn share(&self, size: usize) -> usize {
        self.columns(size) / self.lanes as usize
    }
}

/// Multiplies the streams of all tokens by the rows of `function`, and by themselves.
///
/// - `streams`: see [`Layout`]
/// - `function`: `[rows, n, d]`
/// - `partials`: what each stretch adds to the products and to the sum of squares, `[tokens, rows + 1, stretches]`
///
/// A cube has a stretch.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn project_kernel<F: Float, W: Float, N: Size, M: Size>(
    streams: &[Vector<F, N>],
    function: &[Vector<W, M>],
    partials: &mut [f32],
    layout: Layout,
    #[comptime] blueprint: ProjectBlueprint,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    let n = comptime!(blueprint.streams);
    let size = N::value();
    let vectors = comptime!(blueprint.width / size as u32);
    let piece = M::value();
    let columns = comptime!(blueprint.columns(piece));
    // On its way before the streams are waited for.
    let row_vectors = layout.vectors * comptime!((size / piece) as u32);
    let weights = read_weights(function, row_vectors, 0u32, blueprint);
    let mut stage = Shared::<[Vector<f32, M>]>::new_slice(comptime!(MAX_TOKENS * columns));
    let mut item = UNIT_POS;
    while item < layout.tokens * comptime!(n * vectors) {
        let vector = CUBE_POS_X * vectors + item % vectors;
        let inside = vector < layout.vectors;
        let token = item / comptime!(n * vectors);
        let stream = item / vectors % n;
        let from = token as usize * layout.token + stream as usize * layout.stream;
        let value = streams[from + select(inside, vector, 0u32) as usize];
        let value = select(inside, value, Vector::new(F::new(0.0)));
        put(value, item, &mut stage);
        item += CUBE_DIM;
    }
    sync_cube();
    add_products(
        function,
        row_vectors,
        &weights,
        &stage,
        partials,
        layout.tokens,
        blueprint,
    );
}

/// [`project_kernel`] of the streams over which an output has been spread, as by [`expand_kernel`](super::expand_kernel).
///
/// - `output`: rows `output_vectors` vectors apart
/// - `coefficients`: `[tokens, (2 + n)·n]`
/// - `expanded`: `[tokens, n, d]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn expand_project_kernel<F: Float, Y: Float, W: Float, N: Size, M: Size>(
    output: &[Vector<Y, N>],
    streams: &[Vector<F, N>],
    coefficients: &[f32],
    function: &[Vector<W, M>],
    expanded: &mut [Vector<F, N>],
    partials: &mut [f32],
    layout: Layout,
    output_vectors: usize,
    #[comptime] blueprint: ProjectBlueprint,
    #[define(F, Y, W)] _dtypes: [ElemType; 3],
) {
    let n = comptime!(blueprint.streams);
    let size = N::value();
    let vectors = comptime!(blueprint.width / size as u32);
    let piece = M::value();
    let columns = comptime!(blueprint.columns(piece));
    // On its way before the streams are waited for.
    let row_vectors = layout.vectors * comptime!((size / piece) as u32);
    let weights = read_weights(function, row_vectors, 0u32, blueprint);
    let mut stage = Shared::<[Vector<f32, M>]>::new_slice(comptime!(MAX_TOKENS * columns));
    let mut item = UNIT_POS;
    while item < layout.tokens * comptime!(n * vectors) {
        let vector = CUBE_POS_X * vectors + item % vectors;
        let inside = vector < layout.vectors;
        let at = select(inside, vector, 0u32) as usize;
        let token = (item / comptime!(n * vectors)) as usize;
        let target = (item / vectors % n) as usize;
        let own = Vector::<f32, N>::cast_from(output[token * output_vectors + at]);
        let first = token * comptime!(((2 + n) * n) as usize);
        let post = coefficients[first + comptime!(n as usize) + target];
        let mut sum = own * Vector::new(post);
        #[unroll]
        for source in 0..comptime!(n as usize) {
            let comb = comptime!((2 + source as u32) * n) as usize;
            let comb = coefficients[first + comb + target];
            let value = streams[token * layout.token + source * layout.stream + at];
            sum = fma(Vector::new(comb), Vector::cast_from(value), sum);
        }
        let value = Vector::<F, N>::cast_from(sum);
        if inside {
            let to = token * comptime!(n as usize) + target;
            expanded[to * layout.vectors as usize + at] = value;
        }
        let value = select(inside, value, Vector::new(F::new(0.0)));
        put(value, item, &mut stage);
        item += CUBE_DIM;
    }
    sync_cube();
    add_products(
        function,
        row_vectors,
        &weights,
        &stage,
        partials,
        layout.tokens,
        blueprint,
    );
}

/// Keeps a vector of a stretch, as it has been rounded.
#[cube]
fn put<F: Float, N: Size, M: Size>(
    value: Vector<F, N>,
    item: u32,
    stage: &mut Shared<[Vector<f32, M>]>,
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
        stage[item as usize * pieces + i] = part;
    }
}

/// A lane's part of a row of `function`, which has streams of `vectors` vectors: those of the stretch by turns.
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
        width,
        lanes,
        groups,
        ..
    } = comptime!(blueprint);
    let size = M::value();
    let share = comptime!(blueprint.share(size));
    let stretch = comptime!(width / size as u32);
    let row = min(UNIT_POS / lanes + comptime!(round * groups), rows - 1);
    let mut weights = Array::<Vector<f32, M>>::new(share);
    #[unroll]
    for i in 0..share {
        let first = comptime!(i as u32 * lanes);
        let stream = row * streams + comptime!(first / stretch);
        let vector = CUBE_POS_X * stretch + UNIT_POS % lanes + comptime!(first % stretch);
        let inside = vector < vectors;
        let from = stream as usize * vectors as usize + select(inside, vector, 0u32) as usize;
        let values = Vector::<f32, M>::cast_from(function[from]);
        weights[i] = select(inside, values, Vector::new(0.0f32));
    }
    weights
}

/// Writes the sums of all tokens over a stretch. `weights` are those of the first round. All units of the cube must be here.
#[cube]
fn add_products<W: Float, M: Size>(
    function: &[Vector<W, M>],
    vectors: u32,
    weights: &Array<Vector<f32, M>>,
    stage: &Shared<[Vector<f32, M>]>,
    partials: &mut [f32],
    tokens: u32,
    #[comptime] blueprint: ProjectBlueprint,
) {
    add_round(weights, stage, partials, tokens, 0u32, blueprint);
    #[unroll]
    for round in 1..comptime!(blueprint.rounds()) {
        let weights = read_weights(function, vectors, round, blueprint);
        add_round(&weights, stage, partials, tokens, round, blueprint);
    }
}

/// Writes the sums of those rows that the cube has in one round.
#[cube]
fn add_round<M: Size>(
    weights: &Array<Vector<f32, M>>,
    stage: &Shared<[Vector<f32, M>]>,
    partials: &mut [f32],
    tokens: u32,
    #[comptime] round: u32,
    #[comptime] blueprint: ProjectBlueprint,
) {
    let size = M::value();
    let columns = comptime!(blueprint.columns(size));
    let share = comptime!(blueprint.share(size));
    let lanes = comptime!(blueprint.lanes);
    let lane = UNIT_POS % lanes;
    let row = UNIT_POS / lanes + comptime!(round * blueprint.groups);
    let squares = row == blueprint.rows;
    for token in 0..tokens {
        let first = token as usize * columns + lane as usize;
        let mut sums = Vector::<f32, M>::new(0.0f32);
        #[unroll]
        for i in 0..share {
            let x = stage[first + comptime!(i * lanes as usize)];
            sums = fma(select(squares, x, weights[i]), x, sums);
        }
        let mut sum = sums.extract(0usize);
        #[unroll]
        for j in 1..size {
            sum += sums.extract(j);
        }
        let sum = group_sum(sum, lanes, blueprint.target);
        if lane == 0 && row <= blueprint.rows {
            let to = (token * comptime!(blueprint.sums()) + row) as usize;
            partials[to * CUBE_COUNT_X as usize + CUBE_POS_X as usize] = sum;
        }
    }
}
