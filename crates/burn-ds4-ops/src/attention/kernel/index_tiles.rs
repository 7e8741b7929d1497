//! Scores of the lightning indexer, on tensor cores.

use cubecl::prelude::*;

use super::angles::{RowSteps, UnitAngles};
use super::index::{INDEX_PLANES, IndexInputs, store_score, visible_rows};
use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::{multiply_tiles, read_ordered, shuffle_xor};

/// Rows of a cube, and heads that they are multiplied by at a time.
pub(crate) const INDEX_TILE_ROWS: u32 = 16;
const INDEX_TILE_HEADS: u32 = 8;

/// How [`index_tiles_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct IndexTilesBlueprint {
    /// Channels of a row, in the 32 that four lanes read at a time.
    pub steps: u32,
    /// Whether rows are `f16` rather than `bf16`.
    pub f16_input: bool,
    /// Whether everything is requested at once, and the next tile of heads before one is
    /// multiplied. That takes so many registers that it pays only where an SM has few cubes.
    pub at_once: bool,
    /// Vectors in front of a row of the queries that are not rotated, if the kernel rotates them.
    pub unrotated: Option<u32>,
    pub target: Target,
}

impl IndexTilesBlueprint {
    /// How four lanes share a head.
    fn row(self) -> RowSteps {
        RowSteps {
            steps: self.steps,
            units: 4,
            unrotated: self.unrotated.unwrap_or(4 * self.steps),
            target: self.read_target(),
        }
    }

    /// The target of reads: without PTX, [`read_ordered`] leaves their order to the compiler.
    fn read_target(self) -> Target {
        Target {
            ptx: self.target.ptx && self.at_once,
            ..self.target
        }
    }
}

/// What a lane has of a tile of heads. Four lanes load a head; after the product, a lane has the
/// dot products of two other heads.
#[derive(CubeType)]
struct HeadTile<F: Float> {
    /// The lane's vectors of its head.
    queries: Array<Vector<F, Const<8>>>,
    /// The weights of the heads whose products it has.
    weights: Array<f32>,
    #[cube(comptime)]
    blueprint: IndexTilesBlueprint,
}

#[cube]
impl<F: Float> HeadTile<F> {
    fn new(#[comptime] blueprint: IndexTilesBlueprint) -> HeadTile<F> {
        HeadTile::<F> {
            queries: Array::new(comptime!(blueprint.steps as usize)),
            weights: Array::new(2usize),
            blueprint,
        }
    }

    /// Requests the tile from head `head` on. Heads past the end are the last one.
    fn request<P: Int>(
        &mut self,
        inputs: &IndexInputs<F, P, Const<8>>,
        query: usize,
        token: u32,
        head: u32,
    ) {
        let (steps, reads) = comptime!((self.blueprint.steps, self.blueprint.read_target()));
        let heads = inputs.sizes.heads;
        let (row, group_lane) = (UNIT_POS_X / 4, UNIT_POS_X % 4);
        let own = query + min(head + row, heads - 1) as usize * inputs.sizes.queries_head;
        #[unroll]
        for step in 0..comptime!(steps as usize) {
            let at = own + comptime!(4 * step);
            self.queries[step] = read_ordered(&inputs.queries, at, reads);
        }
        #[unroll]
        for column in 0..2u32 {
            let of = min(head + group_lane * 2 + column, heads - 1);
            let at = (token * heads + of) as usize;
            self.weights[column as usize] = read_ordered(&inputs.weights, at, reads);
        }
    }
}

/// Computes [`index_kernel`](super::index_kernel) for rows of 16-bit floats whose channels are a
/// multiple of 32. Every plane multiplies all rows of the cube by tiles of heads, in a strided
/// loop. The results are added up within a lane, then over the four lanes of a row, then over
/// planes. No score depends on how many others there are.
///
/// Queries that are to be rotated are rounded afterwards, as by an operator of their own; every
/// cube rotates all of them. Four lanes read 64 neighbouring bytes of a row, and use them as the
/// channels that the layout of the tile asks for. That permutes the channels in the same way for
/// rows and heads.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn index_tiles_kernel<F: Float, P: Int>(
    inputs: &IndexInputs<F, P, Const<8>>,
    scores: &mut [f32],
    #[comptime] blueprint: IndexTilesBlueprint,
    #[define(F, P)] _dtypes: [ElemType; 2],
) {
    let (steps, target) = comptime!((blueprint.steps, blueprint.target));
    let (at_once, reads) = comptime!((blueprint.at_once, blueprint.read_target()));
    let dtype = comptime!(if blueprint.f16_input { "f16" } else { "bf16" });
    let mut partials =
        Shared::<[f32]>::new_slice(comptime!((INDEX_PLANES * INDEX_TILE_ROWS) as usize));
    let sizes = &inputs.sizes;
    let (row, group_lane) = (UNIT_POS_X / 4, UNIT_POS_X % 4);
    let first = CUBE_POS_X * INDEX_TILE_ROWS;
    let token = CUBE_POS_Y;
    let (sequence, of_sequence) = sizes.query_of(token);
    let visible = visible_rows::<P>(&inputs.start, sizes, sequence, of_sequence);
    // If none of the cube's rows is visible, none is read.
    let any_visible = first < visible;
    let mut low_score = 0.0f32;
    let mut high_score = 0.0f32;
    if any_visible {
        let mut rows = Array::<Vector<F, Const<8>>>::new(comptime!(2 * steps as usize));
        let keys_start = sizes.keys(sequence) + group_lane as usize;
        let low = min(first + row, sizes.rows - 1);
        let low = inputs.key(keys_start, sequence, low);
        let high = min(first + row + 8, sizes.rows - 1);
        let high = inputs.key(keys_start, sequence, high);
        #[unroll]
        for step in 0..comptime!(steps as usize) {
            let ahead = comptime!(4 * step);
            rows[comptime!(2 * step)] = read_ordered(&inputs.keys, low + ahead, reads);
            rows[comptime!(2 * step + 1)] = read_ordered(&inputs.keys, high + ahead, reads);
        }
        let query = sizes.query(sequence, of_sequence) + group_lane as usize;
        let mut head = UNIT_POS_Y * INDEX_TILE_HEADS;
        let mut tile = HeadTile::<F>::new(blueprint);
        if comptime!(at_once) {
            tile.request::<P>(inputs, query, token, head);
        }
        let mut angles = UnitAngles::<Const<8>>::new(comptime!(blueprint.row()));
        #[comptime]
        if let ComptimeOption::Some(positions) = &inputs.rotation {
            let start = positions.start[sequence as usize];
            let angle = positions.table.at::<P>(start, of_sequence);
            angles.request(&positions.table, angle, group_lane, comptime!(4 * steps));
        }
        while head < sizes.heads {
            if comptime!(!at_once) {
                tile.request::<P>(inputs, query, token, head);
            }
            let mut own = Array::<Vector<u32, Const<4>>>::new(comptime!(steps as usize));
            #[unroll]
            for step in 0..steps {
                let mut vector = tile.queries[step as usize];
                if comptime!(blueprint.row().may_rotate(step)) {
                    let place = group_lane + comptime!(4 * step);
                    let value = Vector::<f32, Const<8>>::cast_from(vector);
                    let value = angles.rotate(value, place, comptime!(4 * steps), step, false);
                    vector = Vector::cast_from(value);
                }
                own[step as usize] = Vector::<u32, Const<4>>::reinterpret(vector);
            }
            let weights = (tile.weights[0], tile.weights[1]);
            let current = head;
            head += comptime!(INDEX_PLANES * INDEX_TILE_HEADS);
            if comptime!(at_once) && head < sizes.heads {
                tile.request::<P>(inputs, query, token, head);
            }
            // Two sums, so that neighbouring products do not depend on each other.
            let mut sums = Array::<Vector<f32, Const<4>>>::new(2usize);
            sums[0] = Vector::new(0.0f32);
            sums[1] = Vector::new(0.0f32);
            #[unroll]
            for step in 0..comptime!(steps as usize) {
                let low = Vector::<u32, Const<4>>::reinterpret(rows[comptime!(2 * step)]);
                let high = Vector::<u32, Const<4>>::reinterpret(rows[comptime!(2 * step + 1)]);
                #[unroll]
                for half in 0..2usize {
                    let (i, j) = comptime!((2 * half, 2 * half + 1));
                    sums[half] = multiply_tiles(
                        low.extract(i),
                        high.extract(i),
                        low.extract(j),
                        high.extract(j),
                        own[step].extract(i),
                        own[step].extract(j),
                        sums[half],
                        dtype,
                    );
                }
            }
            let dots = sums[0] + sums[1];
            #[unroll]
            for column in 0..2u32 {
                if current + group_lane * 2 + column < sizes.heads {
                    let weight = if comptime!(column == 0) {
                        weights.0
                    } else {
                        weights.1
                    };
                    let low = dots.extract(comptime!(column as usize));
                    let high = dots.extract(comptime!(column as usize + 2));
                    low_score += weight * select(low < 0.0f32, 0.0f32, low);
                    high_score += weight * select(high < 0.0f32, 0.0f32, high);
                }
            }
        }
    }
    #[unroll]
    for step in 0..2u32 {
        low_score += shuffle_xor(low_score, comptime!(1u32 << step), target);
        high_score += shuffle_xor(high_score, comptime!(1u32 << step), target);
    }
    if group_lane == 0 {
        let at = (UNIT_POS_Y * INDEX_TILE_ROWS + row) as usize;
        partials[at] = low_score;
        partials[at + 8] = high_score;
    }
    sync_cube();
    let own = first + UNIT_POS;
    if UNIT_POS < INDEX_TILE_ROWS && own < sizes.rows {
        store_score(
            &partials[..],
            UNIT_POS,
            scores,
            token,
            own,
            visible,
            sizes,
            INDEX_TILE_ROWS,
        );
    }
}
