//! A kernel for many rows of `x`, which is bound by the tensor cores.

use cubecl::prelude::*;

use super::activation::swiglu;
use super::columns::{Columns, padded, part_of, place};
use super::decode::Format;
use super::few_share::add_parts;
use super::many_step::{
    Step, Tiles, any_rare, fetch_columns, fetch_weights, multiply_step, put_columns,
};
use super::weights::{Stack, Weights};
use crate::intrinsics::Target;

/// Columns of weights that a cube multiplies between two barriers.
pub(super) const STEP_COLUMNS: u32 = 128;
/// Units of 8 columns of a step.
pub(super) const UNITS: u32 = STEP_COLUMNS / 8;
/// From one row of `x` to the next in shared memory, in units: such that eight lanes that read together meet no bank twice.
pub(super) const PITCH: u32 = UNITS + 4;
/// Tiles of 16 rows of a plane: each part of `x` that it reads serves both.
pub(super) const ROW_TILES: u32 = 2;

/// How [`many_kernel`] is compiled.
///
/// A cube multiplies `8 * tiles` columns, which are rows of `x`, by `32 * planes` rows of weights. The planes share `x`, which goes through
/// shared memory a step at a time, and each reads and decodes its own weights, in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ManyBlueprint {
    /// How the weights are stored, and `x`.
    pub columns: Columns,
    /// Tiles of 8 columns.
    pub tiles: u32,
    pub planes: u32,
    /// Half of the rows are a gate, whose activation is multiplied with the other half and with the score; the result is written as
    /// weights of this format are multiplied by it.
    pub gated: Option<Format>,
    /// Whether the columns of the weights are a multiple of 128.
    pub even: bool,
    pub target: Target,
}

impl ManyBlueprint {
    /// Rows of `x` of a cube.
    pub const fn rows(self) -> u32 {
        8 * self.tiles / self.columns.parts
    }

    /// Units of 8 columns that a unit of the cube puts into shared memory in a step.
    pub const fn own_units(self) -> u32 {
        (8 * self.tiles * UNITS).div_ceil(self.planes * 32)
    }

    /// Rows of the output of a cube.
    pub const fn outputs(self) -> u32 {
        let rows = 16 * ROW_TILES * self.planes;
        if self.gated.is_some() { rows / 2 } else { rows }
    }
}

/// Which rows of `x` a cube multiplies, and by which matrix.
#[derive(CubeType)]
pub(super) struct Work {
    pub matrix: u32,
    /// In the order of the groups.
    pub start: u32,
    pub count: u32,
}

/// Multiplies many rows of `x` by the rows of their matrices: `x · Wᵀ`, or with a gate.
///
/// - `x`: rows of vectors
/// - `order`: the pairs, group by group; without, pair `p` is at place `p` and all have the first matrix
/// - `work`: matrix, first place and number of places, one after the other for every `CUBE_POS_Y`; and in the end how many there are
/// - `scores`: by which a gated pair is multiplied
/// - `words`, `scales`: a stack of matrices
/// - `output`: `[pairs, rows]`; gated, `[places, parts, rows / 2]` in `bf16`, see [`place`]
///
/// `R` is the dtype that a gated result is rounded to. `share` pairs have one row of `x`; where its rows are ordered, it has one for
/// each place and part.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn many_kernel<X: Numeric, R: Float, Y: Float, N: Size>(
    x: &[Vector<X, N>],
    order: ComptimeOption<&[u32]>,
    work: ComptimeOption<&[u32]>,
    scores: ComptimeOption<&[f32]>,
    words: &[Vector<u32, Const<4>>],
    scales: &[Vector<u32, Const<1>>],
    output: &mut [Y],
    pairs: u32,
    share: u32,
    x_vectors: usize,
    stack: Stack,
    limit: f32,
    #[comptime] blueprint: ManyBlueprint,
    #[define(X, R, Y)] _dtypes: [ElemType; 3],
) {
    let row = UNIT_POS_X / 4;
    let quarter = UNIT_POS_X % 4;
    let parts = comptime!(blueprint.columns.parts);
    let format = comptime!(blueprint.columns.format);
    let gated = comptime!(blueprint.gated.is_some());
    let tile_count = comptime!(blueprint.tiles);
    let (rows, width) = (stack.rows, stack.columns);
    let outputs = if comptime!(gated) { rows / 2 } else { rows };

    let work = find_work(&work, pairs, comptime!(blueprint.rows()));
    if work.count == 0 {
        terminate!();
    }
    let weights = Weights::<Const<1>>::new(
        words,
        scales,
        stack,
        format,
        blueprint.even,
        blueprint.target,
    );
    let tile_outputs = comptime!(if gated { 8u32 } else { 16u32 });
    let first_output =
        (CUBE_POS_X * blueprint.planes + UNIT_POS_Y) * comptime!(ROW_TILES * tile_outputs);
    let mut tiles = Tiles::new(comptime!(ROW_TILES as usize));
    #[unroll]
    for m in 0..ROW_TILES {
        let own = first_output + m * tile_outputs + row;
        let low = min(own, outputs - 1);
        let high = if comptime!(gated) {
            low + outputs
        } else {
            own + 8
        };
        let tile = weights.tile(work.matrix, low, high);
        tiles.rows[comptime!(2 * m as usize)] = tile.low;
        tiles.rows[comptime!(2 * m as usize + 1)] = tile.high;
        tiles.scales[comptime!(2 * m as usize)] = tile.low_scale;
        tiles.scales[comptime!(2 * m as usize + 1)] = tile.high_scale;
    }

    let mut stage = Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(
        (2 * 8 * tile_count * PITCH) as usize
    ));
    let mut sums =
        Array::<Vector<f32, Const<4>>>::new(comptime!((ROW_TILES * tile_count) as usize));
    #[unroll]
    for i in 0..comptime!(ROW_TILES * tile_count) {
        sums[i as usize] = Vector::new(0.0f32);
    }

    // While a step is multiplied, the next one's weights and columns are on their way to registers.
    let steps = (width + comptime!(STEP_COLUMNS - 1)) / STEP_COLUMNS;
    let mut current = Step::new(format);
    let mut next = Step::new(format);
    let mut columns =
        Array::<Vector<u32, Const<4>>>::new(comptime!(blueprint.own_units() as usize));
    fetch_columns(
        x,
        &order,
        &work,
        share,
        x_vectors,
        0u32,
        width,
        &mut columns,
        blueprint,
    );
    fetch_weights(&weights, &tiles, 0u32, quarter, &mut current);
    put_columns(&columns, 0u32, &mut stage, blueprint);
    sync_cube();
    for step in 0..steps {
        let ahead = min(step + 1, steps - 1);
        fetch_columns(
            x,
            &order,
            &work,
            share,
            x_vectors,
            ahead,
            width,
            &mut columns,
            blueprint,
        );
        fetch_weights(&weights, &tiles, ahead * STEP_COLUMNS, quarter, &mut next);
        let buffer = step % 2 * comptime!(8 * tile_count * PITCH);
        let at = buffer + row * PITCH + quarter;
        if any_rare(&current, format, blueprint.target) {
            multiply_step(&current, &stage, at, &mut sums, true, blueprint);
        } else {
            multiply_step(&current, &stage, at, &mut sums, false, blueprint);
        }
        put_columns(&columns, (step + 1) % 2, &mut stage, blueprint);
        current.take(&next, format);
        sync_cube();
    }

    #[unroll]
    for m in 0..ROW_TILES {
        let own = first_output + m * tile_outputs + row;
        #[unroll]
        for n in 0..tile_count {
            let sum = sums[comptime!((m * tile_count + n) as usize)];
            let sum = add_parts(sum, parts, blueprint.target);
            let writes = comptime!(if parts == 1 { 2u32 } else { 1u32 });
            #[unroll]
            for w in 0..writes {
                let column = (n * 8 + quarter * 2 + w) / parts;
                let low = sum.extract(comptime!(w as usize));
                let high = sum.extract(comptime!(w as usize + 2));
                if quarter * 2 % parts == 0 && column < work.count {
                    let at = work.start + column;
                    let pair: ComptimeOption<u32> = order.map(|order| order[at as usize]);
                    let pair = pair.unwrap_or_else(|| at);
                    if comptime!(gated) {
                        if own < outputs {
                            let score: ComptimeOption<f32> =
                                scores.map(|scores| scores[pair as usize]);
                            let score = score.unwrap_or_else(|| 1.0f32);
                            let value = swiglu(low, high, limit, blueprint.target) * score;
                            // What is rounded to the dtype of `x` has as many parts as that.
                            let next = comptime!(blueprint.gated.unwrap());
                            let value = f32::cast_from(R::cast_from(value));
                            #[unroll]
                            for part in 0..parts {
                                let line =
                                    (at * parts + part) as usize * padded(outputs, next) as usize;
                                output[line + place(own, next) as usize] =
                                    Y::cast_from(f32::reinterpret(part_of(value, part)));
                            }
                        }
                    } else {
                        let line = pair as usize * outputs as usize;
                        if own < outputs {
                            output[line + own as usize] = Y::cast_from(low);
                        }
                        if own + 8 < outputs {
                            output[line + own as usize + 8] = Y::cast_from(high);
                        }
                    }
                }
            }
        }
    }
}

/// What a cube has to do, from the table that the pairs were grouped into.
#[cube]
fn find_work(work: &ComptimeOption<&[u32]>, pairs: u32, #[comptime] most: u32) -> Work {
    let mut matrix = 0u32;
    let mut start = CUBE_POS_Y * most;
    let mut count = min(pairs - min(start, pairs), most);
    #[comptime]
    if let ComptimeOption::Some(work) = work {
        let entry = CUBE_POS_Y as usize * 3;
        let entries = work[CUBE_COUNT_Y as usize * 3];
        count = 0u32;
        if CUBE_POS_Y < entries {
            matrix = work[entry];
            start = work[entry + 1];
            count = work[entry + 2];
        }
    }
    Work {
        matrix,
        start,
        count,
    }
}
